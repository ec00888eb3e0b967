"""Tests on a real GPU: ``python -m pytest tests/gpu`` on a machine with PyTorch for CUDA; elsewhere there are none."""
