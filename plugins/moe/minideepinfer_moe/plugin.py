"""MoE operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import OperatorDeclaration, Properties, Tier, hookimpl

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
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
