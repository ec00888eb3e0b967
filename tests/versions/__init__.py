"""What every supported version of vLLM asks of a connector, compared with ours."""
