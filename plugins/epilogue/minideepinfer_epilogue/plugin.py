"""Epilogue operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import EpilogueProblem, OperatorDeclaration, Properties, Support, Tier, hookimpl

WIDEST = 8192
"""Channels that `fused` can have in registers."""


def _fused_refuses(problem: EpilogueProblem) -> list[str]:
    widest = max(problem.widths)
    return [f"has rows of {widest} channels, needs at most {WIDEST}"] if widest > WIDEST else []


OPERATORS = (
    OperatorDeclaration(
        family="epilogue",
        name="naive",
        summary="Norm, rotation, rounding and gates as the specification has them, one after the other.",
        build="minideepinfer_epilogue.naive:build",
        source="spec sections 3.4, 3.9 and 3.11",
        tier=Tier.REFERENCE,
        properties=Properties(deterministic=True),
    ),
    OperatorDeclaration(
        family="epilogue",
        name="fused",
        summary="Norm, rotation and rounding in one launch; what is only rotated and rounded has the bits of naive.",
        build="minideepinfer_epilogue.fused:build",
        source="spec sections 3.4, 3.9 and 3.11, in Triton",
        tier=Tier.OPTIMIZED,
        priority=10,
        support=Support(devices=("cuda",), min_capability=(9, 0), requires=("triton",), interpreted=True),
        refuses=_fused_refuses,
        properties=Properties(deterministic=True, batch_invariant=True, graph_capturable=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
