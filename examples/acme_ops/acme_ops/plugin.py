"""What this distribution offers; declarations only, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from minideepinfer.operators import TOKEN_INDICES, OperatorDeclaration, OperatorOptions, Properties, Tier, hookimpl
from pydantic import Field


class TiledOptions(OperatorOptions):
    """Options of `acme-tiled`."""

    tile_size: int = Field(64, ge=1, description="keys attended at once")


@hookimpl
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Declare the operators."""
    return [
        OperatorDeclaration(
            family="attention",
            name="acme-tiled",
            summary="Attends to one tile of keys after the other with a running softmax.",
            build="acme_ops.tiled:build",
            source="Online normalizer calculation for softmax, Milakov and Gimelshein, 2018",
            tier=Tier.EXPERIMENTAL,
            accepts={"cache": ("float32", "bf16"), "selection": (TOKEN_INDICES,)},
            properties=Properties(deterministic=True),
            options=TiledOptions,
        ),
        OperatorDeclaration(
            family="attention",
            name="acme-broken",
            summary="acme-tiled with a fault, to show what the conformance kit says: never use it.",
            build="acme_ops.broken:build",
            tier=Tier.EXPERIMENTAL,
            accepts={"cache": ("float32", "bf16"), "selection": (TOKEN_INDICES,)},
            properties=Properties(deterministic=True),
        ),
    ]
