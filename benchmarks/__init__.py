"""Benchmarks of PegaFlow; each module answers one question: ``python -m benchmarks.NAME``."""
