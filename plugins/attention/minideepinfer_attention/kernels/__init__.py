"""The Triton kernels of this distribution; the modules beside this package launch them."""
