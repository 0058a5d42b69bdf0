"""Residual operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import OperatorDeclaration, Properties, ResidualProblem, Support, Tier, hookimpl


def _fused_refuses(problem: ResidualProblem) -> list[str]:
    return [f"has {problem.num_streams} streams, needs at most 4"] if problem.num_streams > 4 else []


OPERATORS = (
    OperatorDeclaration(
        family="residual",
        name="naive",
        summary="Every formula of mHC as the specification has it, in float32.",
        build="minideepinfer_residual.naive:build",
        source="spec sections 3.2 and 3.3",
        tier=Tier.REFERENCE,
        properties=Properties(deterministic=True),
    ),
    OperatorDeclaration(
        family="residual",
        name="fused",
        summary="The streams are read once for each site; a weight of a projection is two bfloat16 numbers.",
        build="minideepinfer_residual.fused:build",
        source="spec sections 3.2 and 3.3, in Triton",
        tier=Tier.OPTIMIZED,
        priority=10,
        support=Support(devices=("cuda",), min_capability=(9, 0), requires=("triton",), interpreted=True),
        refuses=_fused_refuses,
        properties=Properties(deterministic=True, batch_invariant=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
