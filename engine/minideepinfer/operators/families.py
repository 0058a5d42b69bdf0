"""The operator families of this engine."""

FAMILIES: tuple[str, ...] = ("attention", "indexer", "moe", "comm", "residual", "epilogue")
"""Operator families, in the order in which reports list them."""

BITWISE = ("comm",)
"""Families whose results are compared bit by bit, so that no tolerance applies."""

METHODS: dict[str, tuple[str, ...]] = {
    "attention": ("prepare", "run"),
    "indexer": ("prepare", "run"),
    "moe": ("transform_weights", "prepare", "route", "run"),
    "comm": ("prepare", "all_gather", "reduce_scatter", "fetch_rows"),
    "residual": ("transform_weights", "enter", "advance", "mix", "collapse"),
    "epilogue": ("run", "inject"),
}
"""What a built operator of a family can do: the methods of its protocol."""
