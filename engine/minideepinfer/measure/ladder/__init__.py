"""Plans one after the other in one session: kernel, stage and step of each, its error, and one report."""

KERNEL, KERNEL_BEFORE = "kernel ", "kernel before "
"""Begin names in a rung's `values`, `floors` and `errors`; `FAMILY:NAME, PROBLEM` of the new operator follows."""
