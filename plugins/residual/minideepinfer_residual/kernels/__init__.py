"""Triton kernels of `fused`."""
