"""What the calls of each family cost at least: formulas of the problem, whatever the implementation; without torch.

Operations are the multiply-adds of products and weighted sums, two each; exponentials, comparisons, divisions and
conversions are not counted. Bytes are compulsory: every operand that the call depends on is read once, every result
written once, in the layout that the problem names. Tables of pages, rings and requests, a few bytes a row, are left
out.
"""

from __future__ import annotations

from minideepinfer.operators.problem import Problem

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number, by dtype."""
FLOAT32 = INT32 = 4


def arithmetic(problem: Problem) -> str:
    """In which arithmetic products of the problem's operands are exact enough."""
    return "bf16" if problem.dtype == "bfloat16" else "float32"
