"""Triton kernels of comm operators."""
