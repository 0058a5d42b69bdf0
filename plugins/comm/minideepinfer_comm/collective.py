"""`collective`: every rank sees the tokens of all ranks; sums are scattered back to where the tokens live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minideepinfer.operators import BuildContext, Dispatched, Pending, TokenExchange
from torch import Tensor

from minideepinfer_comm.group import Group, Move, Travelling, in_rank_order
from minideepinfer_comm.rows import fetch_rows


class CollectiveComm:
    """See `CommOperator`. No call but `fetch_rows` makes the host wait."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.world_size = group.rank, group.size

    @property
    def sent_bytes(self) -> int:
        """See `CommOperator`."""
        return self._group.sent_bytes

    def prepare(self, counts: Sequence[int]) -> TokenExchange:
        """See `CommOperator`."""
        return GatheredTokens(self._group, counts)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See `CommOperator`."""
        return gather(self._group, x, counts=counts).wait()[0]

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See `CommOperator`."""
        return scatter_sums(self._group, x, counts).wait()

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Pending[tuple[Tensor, ...]]:
        """See `CommOperator`, and `rows.fetch_rows`."""
        return fetch_rows(self._group, tables, row_ids, rows_per_rank)


class GatheredTokens:
    """See `TokenExchange`. With R ranks of T_r rows, k experts a token and e bytes an element, rank r sends

    - `dispatch`: `(R - 1) * T_r * (H * e + 8 * k)` bytes, ids and weights being 4 bytes each;
    - `combine`: `(T_0 + .. + T_{R-1} - T_r) * H * 4` bytes.
    """

    def __init__(self, group: Group, counts: Sequence[int]) -> None:
        self._group, self._counts = group, counts
        self.rank, self.world_size = group.rank, group.size

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Pending[Dispatched]:
        """See `TokenExchange`; every rank gets every token."""
        arriving = gather(self._group, x, topk_ids, topk_weights, counts=self._counts)
        return arriving.then(lambda tokens: Dispatched(tokens[0], tokens[1], tokens[2], handle=None))

    def combine(self, partial: Tensor, handle: Any) -> Pending[Tensor]:
        """See `TokenExchange`."""
        return scatter_sums(self._group, partial, self._counts)


def gather(group: Group, *tensors: Tensor, counts: Sequence[int]) -> Travelling[tuple[Tensor, ...]]:
    """The ranks' rows of some tensors, in rank order: `[counts[rank], ...]` here -> `[sum(counts), ...]` everywhere."""
    whole = tuple(x.new_empty(sum(counts), *x.shape[1:]) for x in tensors)
    moves = [Move([x] * group.size, every.split(list(counts))) for x, every in zip(tensors, whole, strict=True)]
    return group.exchange(moves, lambda: whole)


def scatter_sums(group: Group, x: Tensor, counts: Sequence[int]) -> Travelling[Tensor]:
    """Sum the ranks' `[sum(counts), ...]`; each gets and adds up the summands of its own rows `[counts[rank], ...]`."""
    parts = x.new_empty(group.size, counts[group.rank], *x.shape[1:]).unbind()
    return group.exchange([Move(x.split(list(counts)), parts)], lambda: in_rank_order(parts))


def build(context: BuildContext) -> CollectiveComm:
    """Build `collective`."""
    return CollectiveComm(Group(context))
