"""Attention operators of this distribution; declarations only."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import TOKEN_INDICES, OperatorDeclaration, Properties, Support, Tier, hookimpl

from minideepinfer_attention.refusals import refuses

TRITON = Support(devices=("cuda",), min_capability=(9, 0), requires=("triton",), interpreted=True)

OPERATORS = (
    OperatorDeclaration(
        family="attention",
        name="naive",
        summary="Gathers window and selected entries, then one masked softmax in float32.",
        build="minideepinfer_attention.naive:build",
        source="spec section 3.8",
        tier=Tier.REFERENCE,
        accepts={"cache": ("float32", "bf16", "released"), "selection": (TOKEN_INDICES,)},
        properties=Properties(deterministic=True, batch_invariant=True),
    ),
    OperatorDeclaration(
        family="attention",
        name="fused",
        summary="Heads as rows of matrix tiles, in Triton; neighbours share windows, few rows split their keys.",
        build="minideepinfer_attention.fused:build",
        source="spec section 3.8; Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022, 2023",
        tier=Tier.OPTIMIZED,
        priority=10,
        accepts={"cache": ("float32", "bf16", "released"), "selection": (TOKEN_INDICES,)},
        support=TRITON,
        refuses=refuses,
    ),
    OperatorDeclaration(
        family="attention",
        name="indexed",
        summary="As fused, but finds all keys in the kernel, through the tables; nothing is copied.",
        build="minideepinfer_attention.direct:build",
        source="spec section 3.8",
        tier=Tier.EXPERIMENTAL,
        accepts={"cache": ("float32", "bf16", "released"), "selection": (TOKEN_INDICES,)},
        support=TRITON,
        refuses=refuses,
    ),
)


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return OPERATORS
