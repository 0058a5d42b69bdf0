"""The operator families of this engine."""

FAMILIES: tuple[str, ...] = ("attention", "indexer", "moe", "comm", "residual")
"""Operator families, in the order in which reports list them."""

BITWISE = ("comm",)
"""Families whose results are compared bit by bit, so that no tolerance applies."""
