"""Epilogues: every channel that changes is read and written once."""

from __future__ import annotations

from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.problem import EpilogueProblem


def finish_cost(
    problem: EpilogueProblem,
    num_tokens: int,
    width: int,
    *,
    heads: int = 1,
    norm: bool = False,
    pairs: int = 0,
    rounded: bool = False,
    in_place: bool = False,
) -> Cost:
    """The least that `run` costs; what is rotated alone, and in place, leaves the channels before alone.

    Args:
        problem: for the dtype.
        num_tokens: T.
        width: D.
        heads: N.
        norm: whether there is a norm.
        pairs: C, 0 = nothing is rotated.
        rounded: whether there is a rounding.
        in_place: whether the result lies where x does.
    """
    rows = num_tokens * heads
    channels = width if norm or rounded or not in_place else 2 * pairs
    flops = rows * (2 * width * norm + 8 * pairs)  # a mean square, and sums of two
    moved = 2 * rows * channels * ELEMENT_BYTES[problem.dtype] + (width * norm + 2 * num_tokens * pairs) * FLOAT32
    return Cost({"float32": flops}, moved)


def inject_cost(problem: EpilogueProblem, num_tokens: int, num_streams: int, width: int) -> Cost:
    """The least that `inject` costs.

    Args:
        problem: for the dtype.
        num_tokens: T.
        num_streams: S.
        width: D.
    """
    row = num_tokens * num_streams * width
    moved = (3 * row + num_tokens * width) * ELEMENT_BYTES[problem.dtype] + num_streams * width * FLOAT32
    return Cost({"float32": 8 * row}, moved)
