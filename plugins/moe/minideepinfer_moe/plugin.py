"""MoE operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import MoeProblem, OperatorDeclaration, Properties, Support, Tier, hookimpl

from minideepinfer_moe.options import FusedOptions


def _fused_refuses(problem: MoeProblem) -> list[str]:
    found = [
        f"has {name} {size}, needs a multiple of 32"
        for name, size in (("hidden_size", problem.hidden_size), ("intermediate_size", problem.intermediate_size))
        if size % 32
    ]
    if problem.num_local_experts > 1023:
        found.append(f"has {problem.num_local_experts} local experts, needs at most 1023")
    return found


OPERATORS = (
    OperatorDeclaration(
        family="moe",
        name="naive",
        summary="One expert after the other, decoded from FP4 when a token chose it.",
        build="minideepinfer_moe.naive:build",
        source="spec section 3.10",
        tier=Tier.REFERENCE,
        properties=Properties(deterministic=True),
    ),
    OperatorDeclaration(
        family="moe",
        name="fused",
        summary="Rows sorted by expert on the device, products on packed FP4, one combine of local rows.",
        build="minideepinfer_moe.fused:build",
        source="spec section 3.10; article, round C",
        tier=Tier.OPTIMIZED,
        priority=10,
        support=Support(devices=("cuda",), min_capability=(9, 0), requires=("triton",), interpreted=True),
        refuses=_fused_refuses,
        options=FusedOptions,
        properties=Properties(deterministic=True, graph_capturable=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
