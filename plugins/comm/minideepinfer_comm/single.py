"""`single`: a world of one rank, where everything is already where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minideepinfer.operators import BuildContext, Dispatched
from torch import Tensor


class SingleComm:
    """See `CommOperator`. Tensors are passed through, never copied or modified."""

    rank = 0
    world_size = 1

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return x."""
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return x."""
        return x

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatched:
        """Keep the tokens here."""
        return Dispatched(x, topk_ids, topk_weights, handle=None)

    def combine(self, partial: Tensor, handle: Any) -> Tensor:
        """Return the partial sums; they are complete."""
        return partial

    def fetch_rows(self, table: Tensor, row_ids: Tensor) -> Tensor:
        """Gather where the table lives (device, host or memory-mapped) and move only the rows."""
        return table[row_ids.to(table.device)].to(row_ids.device)


def build(context: BuildContext) -> SingleComm:
    """Build `single`."""
    return SingleComm()
