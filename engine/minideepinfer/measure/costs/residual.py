"""Residual streams: weighted sums over the streams, and one narrow product for the coefficients of a site."""

from __future__ import annotations

from minideepinfer.measure.costs import ELEMENT_BYTES, FLOAT32, arithmetic
from minideepinfer.operators.cost import Cost
from minideepinfer.operators.problem import ResidualProblem

READS_OUTPUT = ("advance", "mix")
FINDS_SITE = ("enter", "advance")


def residual_cost(problem: ResidualProblem, call: str, num_tokens: int) -> Cost:
    """The least that a call costs.

    A bfloat16 operator may hold the projection `fn` as two bfloat16 parts: twice the products, at their rate.

    Args:
        problem: the streams.
        call: `enter`, `advance`, `mix`, or `normalise` for a collapse with a norm.
        num_tokens: rows.
    """
    streams, hidden = problem.num_streams, problem.hidden_size
    size, columns = ELEMENT_BYTES[problem.dtype], streams * (2 + streams)
    row = num_tokens * hidden
    flops, moved = {"float32": 0}, row * streams * size
    if call in READS_OUTPUT:
        flops["float32"] += 2 * row * streams * (streams + 1)
        moved += row * (streams + 1) * size + num_tokens * streams * (streams + 1) * FLOAT32
    if call != "mix":
        # The weighted streams, and the sum of the squares of what they give.
        flops["float32"] += 2 * row * streams + 2 * row
        moved += row * size + num_tokens * streams * FLOAT32 + hidden * FLOAT32
    if call in FINDS_SITE:
        kind, parts = arithmetic(problem), 2 if problem.dtype == "bfloat16" else 1
        flops["float32"] += 2 * row * streams
        flops[kind] = flops.get(kind, 0) + 2 * parts * row * streams * columns
        moved += (columns * (streams * hidden + 1) + 3 + num_tokens * columns) * FLOAT32
    return Cost(flops, moved)
