"""Triton kernels of the fused indexer."""
