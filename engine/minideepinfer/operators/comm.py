"""Family `comm`: everything that passes between ranks. Nothing else touches torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Tokens as the rank that computes them sees them.

    Attributes:
        x: `[T', H]` tokens to compute here.
        topk_ids: int32 `[T', k]` their experts (global ids, others' included).
        topk_weights: float32 `[T', k]`.
        handle: for `combine`.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: Any


class CommOperator(Protocol):
    """A built comm operator. Every rank takes part in every call of a step, with no rows if it has none."""

    rank: int
    world_size: int

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the ranks' rows: `[counts[rank], ...]` here -> `[sum(counts), ...]` everywhere, in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum the ranks' `[sum(counts), ...]` and return this rank's `[counts[rank], ...]`."""
        ...

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Dispatched:
        """Bring tokens to the ranks that own their experts."""
        ...

    def combine(self, partial: Tensor, handle: Any) -> Tensor:
        """Bring partial sums home.

        Args:
            partial: float32 `[T', H]`, for each dispatched token the sum over this rank's experts.
            handle: of the `dispatch` that this answers.

        Returns:
            float32 `[T, H]`, for each of this rank's own tokens the sum over all ranks.
        """
        ...

    def fetch_rows(self, table: Tensor, row_ids: Tensor) -> Tensor:
        """Rows of a table that is sharded by rows, rank 0 first.

        Args:
            table: uint8 `[rows_here, row_bytes]`, this rank's shard, on any device.
            row_ids: int64 `[N]` global row numbers, on the compute device; N may be 0, ids may repeat.

        Returns:
            uint8 `[N, row_bytes]` on the device of `row_ids`.
        """
        ...
