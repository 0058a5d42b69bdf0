"""Family `comm`: everything that passes between ranks. Nothing else touches torch.distributed.

A call that takes time to arrive returns at once, with a `Pending`: work given to the device before its `wait` runs
while things travel. Every rank makes every call of a step, in one order, with no rows if it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Something on its way. What was given away may not be written to before it was waited for."""

    def wait(self) -> T_co:
        """The thing itself, once; what is given to the device from now on sees all of it. The host need not wait."""
        ...


@dataclass(frozen=True, eq=False)
class Arrived(Generic[T]):
    """A `Pending` that is here already."""

    value: T

    def wait(self) -> T:
        """The value."""
        return self.value


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Tokens as the rank that computes them sees them: in rank order, those of a rank in its own order.

    Attributes:
        x: `[T', H]` tokens to compute here; a row without an expert here may be missing, or hold anything.
        topk_ids: int32 `[T', k]` their experts (global ids; others' may be there, or -1 in their place).
        topk_weights: float32 `[T', k]`; where the id is -1 it may be anything.
        handle: for `combine`.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: Any


class TokenExchange(Protocol):
    """Brings tokens to their experts and back, for one set of rows; what MoE operators are given."""

    rank: int
    world_size: int

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Pending[Dispatched]:
        """Bring tokens to the ranks that own their experts.

        Args:
            x: `[T, H]`, where T is what `CommOperator.prepare` was told of this rank.
            topk_ids: int32 `[T, k]` global ids; -1 = no expert.
            topk_weights: float32 `[T, k]`.
        """
        ...

    def combine(self, partial: Tensor, handle: Any) -> Pending[Tensor]:
        """Bring partial sums home.

        Args:
            partial: float32 `[T', H]`, for each dispatched token the sum over this rank's experts.
            handle: of the `Dispatched` that this answers.

        Returns:
            float32 `[T, H]`, for each of this rank's own tokens the sum over all ranks, added in rank order.
        """
        ...


class CommOperator(Protocol):
    """A built comm operator.

    Attributes:
        rank: this one.
        world_size: all of them.
        sent_bytes: given to other ranks since the operator was built.
    """

    rank: int
    world_size: int
    sent_bytes: int

    def prepare(self, counts: Sequence[int]) -> TokenExchange:
        """Say how many rows every rank has; once for all layers that run on the same rows.

        Args:
            counts: rows of each rank, the same numbers on all of them.
        """
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the ranks' rows: `[counts[rank], ...]` here -> `[sum(counts), ...]` everywhere, in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum the ranks' `[sum(counts), ...]` in rank order and return this rank's `[counts[rank], ...]`."""
        ...

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Pending[tuple[Tensor, ...]]:
        """Rows of tables that are sharded by rows: row i lies on rank `i // rows_per_rank`.

        The host may have to wait for numbers of rows; hence it is called at the start of a step, not in a layer.

        Args:
            tables: uint8 `[rows_here, row_bytes]` each, this rank's shards of tables with the same row numbers, on any
                device.
            row_ids: int64 `[N]` global row numbers, on the compute device; N may be 0, ids may repeat.
            rows_per_rank: rows of a shard; the last ranks may have fewer.

        Returns:
            For each table uint8 `[N, row_bytes]` on the device of `row_ids`.
        """
        ...
