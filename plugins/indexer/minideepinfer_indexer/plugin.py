"""Indexers of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import (
    TOKEN_INDICES,
    OperatorDeclaration,
    Properties,
    Support,
    Tier,
    hookimpl,
)

from minideepinfer_indexer.limits import FP8_TOLERANCES, FusedOptions, refuses

OPERATORS = (
    OperatorDeclaration(
        family="indexer",
        name="naive",
        summary="Scores all visible entries and sorts them, the lower entry first among equals.",
        build="minideepinfer_indexer.naive:build",
        source="spec sections 3.6 and 3.7",
        tier=Tier.REFERENCE,
        accepts={"cache": ("float32", "bf16", "released")},
        emits={"selection": (TOKEN_INDICES,)},
        properties=Properties(deterministic=True),
    ),
    OperatorDeclaration(
        family="indexer",
        name="fused",
        summary="Scores and block maxima in one launch, and a top-k that reads the best blocks only.",
        build="minideepinfer_indexer.fused:build",
        source="spec sections 3.6 and 3.7",
        tier=Tier.OPTIMIZED,
        priority=10,
        accepts={"cache": ("float32", "bf16", "released")},
        emits={"selection": (TOKEN_INDICES,)},
        support=Support(devices=("cuda",), min_capability=(9, 0), requires=("triton",), interpreted=True),
        refuses=refuses,
        properties=Properties(deterministic=True, batch_invariant=True),
        tolerances=FP8_TOLERANCES,
        options=FusedOptions,
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
