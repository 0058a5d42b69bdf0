"""Communication, as far as one rank has any: rows fetched from a table that it holds."""

from __future__ import annotations

from minideepinfer.operators.cost import Cost

ID_BYTES = 8


def fetch_cost(num_rows: int, distinct_rows: int, row_bytes: int) -> Cost:
    """The least that fetching rows costs: each distinct row read once, every row written, ids read."""
    return Cost({}, (distinct_rows + num_rows) * row_bytes + num_rows * ID_BYTES)
