"""Triton kernels of the MoE operators; the modules beside this package launch them."""
