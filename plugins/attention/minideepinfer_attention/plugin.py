"""Attention operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import TOKEN_INDICES, OperatorDeclaration, Properties, Tier, hookimpl

OPERATORS = (
    OperatorDeclaration(
        family="attention",
        name="naive",
        summary="Gathers window and selected entries, then one masked softmax in float32.",
        build="minideepinfer_attention.naive:build",
        source="spec section 3.8",
        tier=Tier.REFERENCE,
        accepts={"cache": ("float32", "bf16"), "selection": (TOKEN_INDICES,)},
        properties=Properties(deterministic=True, batch_invariant=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
