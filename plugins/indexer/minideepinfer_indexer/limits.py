"""Options, tolerances and limits of `fused`, without torch."""

from __future__ import annotations

from typing import Literal

from minideepinfer.operators import OperatorOptions, OwnTolerance
from minideepinfer.operators.problem import IndexerProblem

MAX_BLOCK = 64

FP8_TOLERANCES = tuple(
    OwnTolerance(
        dtype,
        factor=2112.0,
        reason="fp8 tensor cores align the 32 products of an instruction, and the sum before it, to the largest of them"
        " and keep 13 bits behind the point: d/32 instructions lose at most 33·2⁻¹³·Σ|q k| each, together 33/32·2¹¹"
        " times the family's d·2⁻²⁴·Σ|q k|; queries and keys are exact where the group exponents of a vector differ by"
        " at most 14",
        options={"arithmetic": "fp8"},
    )
    for dtype in ("float32", "bfloat16")
)


class FusedOptions(OperatorOptions):
    """Options of `fused`.

    Attributes:
        arithmetic: `bf16`: products as exact as the problem's dtype, summed in float32; `fp8`: queries and keys as e4m3
            with a power of two for each vector, where they are MXFP4 values (kv_quantization `released`).
    """

    arithmetic: Literal["bf16", "fp8"] = "bf16"


def refuses(problem: IndexerProblem) -> list[str]:
    """One sentence per obstacle."""
    found = []
    per_page, rest = divmod(problem.page_tokens, problem.compress_ratio)
    if rest or not _power_of_two(per_page):
        found.append(
            f"has pages of {problem.page_tokens} tokens at ratio {problem.compress_ratio}, needs a power of two of "
            "entries in a page"
        )
    size = problem.candidate_block_size
    if (problem.emits_candidates or problem.uses_candidates) and not (_power_of_two(size) and size <= MAX_BLOCK):
        found.append(f"has candidate blocks of {size} entries, needs a power of two up to {MAX_BLOCK}")
    return found


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
