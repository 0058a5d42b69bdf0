"""What the operators between processes have in common; they differ in how tokens get to their experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minideepinfer.operators import Pending, TokenExchange
from torch import Tensor

from minideepinfer_comm.group import Group, Move, Travelling
from minideepinfer_comm.rows import fetch_rows


class GroupComm:
    """See `CommOperator`. Of its calls only `fetch_rows` makes the host wait.

    Args:
        group: the ranks.
        exchange: makes a `TokenExchange` of the group and the number of rows of every rank.
    """

    def __init__(self, group: Group, exchange: Callable[[Group, Sequence[int]], TokenExchange]) -> None:
        self._group, self._exchange = group, exchange
        self.rank, self.world_size = group.rank, group.size

    @property
    def sent_bytes(self) -> int:
        """See `CommOperator`."""
        return self._group.sent_bytes

    def prepare(self, counts: Sequence[int]) -> TokenExchange:
        """See `CommOperator`."""
        return self._exchange(self._group, counts)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See `CommOperator`; sends `(ranks - 1) * x.nbytes`."""
        return gather(self._group, x, counts=counts).wait()[0]

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See `CommOperator`; sends all of x but the rank's own rows."""
        return scatter_sums(self._group, x, counts).wait()

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Pending[tuple[Tensor, ...]]:
        """See `CommOperator`, and `rows.fetch_rows` for what is sent."""
        return fetch_rows(self._group, tables, row_ids, rows_per_rank)


def gather(group: Group, *tensors: Tensor, counts: Sequence[int]) -> Travelling[tuple[Tensor, ...]]:
    """The ranks' rows of some tensors, in rank order: `[counts[rank], ...]` here -> `[sum(counts), ...]` everywhere."""
    whole = tuple(x.new_empty(sum(counts), *x.shape[1:]) for x in tensors)
    moves = [Move([x] * group.size, every.split(list(counts))) for x, every in zip(tensors, whole, strict=True)]
    return group.exchange(moves, lambda: whole)


def scatter_sums(group: Group, x: Tensor, counts: Sequence[int]) -> Travelling[Tensor]:
    """Sum the ranks' `[sum(counts), ...]`; each gets and adds up the summands of its own rows `[counts[rank], ...]`."""
    parts = x.new_empty(group.size, counts[group.rank], *x.shape[1:]).unbind()
    return group.exchange([Move(x.split(list(counts)), parts)], lambda: _in_order(parts))


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, the first two first, so that it has the same bits every time."""
    total, *others = parts
    for number, part in enumerate(others):
        total = total.add_(part) if number else total + part
    return total
