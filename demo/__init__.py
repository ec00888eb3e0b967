"""What `make demo` runs: real vLLM on the CPU, with and without PegaFlow, with its engine killed in between."""
