"""`acme-broken`: `acme-tiled` with one fault, which `mini-deepinfer ops check attention:acme-broken` finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minideepinfer.operators import Batch, BuildContext

from acme_ops.tiled import Metadata, TiledAttention


class BrokenAttention(TiledAttention):
    """The last visible entry is forgotten: a bound that is off by one, harmless on a long context."""

    def prepare(self, batch: Batch) -> Metadata:
        """Find the window of every row."""
        metadata = super().prepare(batch)
        return replace(metadata, visible=metadata.visible - 1)


def build(context: BuildContext) -> Any:
    """Build the operator."""
    return BrokenAttention(context.problem, tile_size=64)
