"""Epilogue: norm, rotation and rounding of rows that are read and written once; Engram's gates."""

from __future__ import annotations

from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32
from minideepinfer.operators.cost import Cost


def epilogue_cost(
    dtype: str, num_tokens: int, heads: int, width: int, *, pairs: int, norm: bool, rounds: bool, in_place: bool
) -> Cost:
    """The least that one call of `run` costs. Of rows that are only rotated, in place, the other channels stay.

    Args:
        dtype: of the rows.
        num_tokens: tokens.
        heads: rows of a token, at least 1.
        width: channels of a row.
        pairs: pairs of channels that are rotated; 0 = none.
        norm: whether there is a norm.
        rounds: whether rows are rounded to a format.
        in_place: whether the result may be where the rows are.
    """
    rows = num_tokens * heads
    moved = width if norm or rounds or not in_place else 2 * pairs
    weights = width * FLOAT32 if norm else 0
    angles = 2 * num_tokens * pairs * FLOAT32
    flops = 2 * rows * ((width if norm else 0) + 4 * pairs)
    return Cost({"float32": flops}, 2 * rows * moved * ELEMENT_BYTES[dtype] + weights + angles)


def inject_cost(dtype: str, num_tokens: int, streams: int, width: int) -> Cost:
    """The least that adding Engram's value costs: two mean squares, a product and a weighted sum for each stream."""
    rows = num_tokens * (3 * streams + 1)
    moved = rows * width * ELEMENT_BYTES[dtype] + streams * width * FLOAT32
    return Cost({"float32": 8 * num_tokens * streams * width}, moved)
