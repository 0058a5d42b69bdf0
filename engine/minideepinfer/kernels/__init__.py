"""What Triton kernels of any plugin may share. Import it from modules that hold kernels only: it needs Triton."""
