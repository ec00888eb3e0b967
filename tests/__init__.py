"""Tests of PegaFlow. A package, so that the folder vllm in it never hides the real one."""
