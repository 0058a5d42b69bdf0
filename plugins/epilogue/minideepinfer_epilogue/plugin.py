"""Epilogue operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import OperatorDeclaration, Properties, Tier, hookimpl

OPERATORS = (
    OperatorDeclaration(
        family="epilogue",
        name="naive",
        summary="Norm, rotation and rounding as the specification has them, one after the other.",
        build="minideepinfer_epilogue.naive:build",
        source="spec sections 2.3, 3.4 and 3.11",
        tier=Tier.REFERENCE,
        properties=Properties(deterministic=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
