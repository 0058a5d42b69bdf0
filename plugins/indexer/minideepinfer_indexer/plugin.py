"""Indexers of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import TOKEN_INDICES, OperatorDeclaration, Properties, Tier, hookimpl

OPERATORS = (
    OperatorDeclaration(
        family="indexer",
        name="naive",
        summary="Scores all visible entries and sorts them, the lower entry first among equals.",
        build="minideepinfer_indexer.naive:build",
        source="spec sections 3.6 and 3.7",
        tier=Tier.REFERENCE,
        accepts={"cache": ("float32", "bf16")},
        emits={"selection": (TOKEN_INDICES,)},
        properties=Properties(deterministic=True),
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
