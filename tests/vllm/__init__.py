"""Tests on real vLLM engines on the CPU."""
