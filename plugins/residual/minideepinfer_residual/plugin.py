"""Residual operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import OperatorDeclaration, Properties, Tier, hookimpl

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
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
