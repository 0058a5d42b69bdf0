"""`single`: a world of one rank, where everything is already where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minideepinfer.operators import Arrived, BuildContext, Dispatched
from torch import Tensor


class SingleComm:
    """See `CommOperator` and `TokenExchange`. Tensors are passed through, never copied or modified."""

    rank = 0
    world_size = 1
    sent_bytes = 0

    def prepare(self, counts: Sequence[int]) -> SingleComm:
        """All rows are here."""
        return self

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return x."""
        return x

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return x."""
        return x

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        """Keep the tokens here."""
        return Arrived(Dispatched(x, topk_ids, topk_weights, handle=None))

    def combine(self, partial: Tensor, handle: Any) -> Arrived[Tensor]:
        """Return the partial sums; they are complete."""
        return Arrived(partial)

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Arrived[tuple[Tensor, ...]]:
        """Gather where each table lives (device, host or memory-mapped) and move only the rows."""
        return Arrived(tuple(table[row_ids.to(table.device)].to(row_ids.device) for table in tables))


def build(context: BuildContext) -> SingleComm:
    """Build `single`."""
    return SingleComm()
