"""What the Triton kernels of this distribution cannot serve, in words; no torch."""

from __future__ import annotations

from minideepinfer.operators.problem import AttentionProblem

LARGEST_HEAD_DIM = 512
"""64 heads x 512 float32 sums are half of an SM's registers."""


def refuses(problem: AttentionProblem) -> list[str]:
    """Reasons why `fused` and `indexed` cannot serve a problem."""
    found = []
    if problem.head_dim % 8 or not 8 <= problem.head_dim <= LARGEST_HEAD_DIM:
        found.append(f"has head_dim {problem.head_dim}, needs a multiple of 8 up to {LARGEST_HEAD_DIM}")
    if problem.rope_dim % 2 or problem.rope_dim > problem.head_dim:
        found.append(f"has rope_dim {problem.rope_dim}, needs an even number up to head_dim")
    if problem.dtype == "bfloat16" and problem.cache_layout == "float32":
        found.append("has cache layout float32 with dtype bfloat16, needs bf16")
    return found
