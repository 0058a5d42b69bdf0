"""Several ranks in one process, for operators that are called through a comm operator.

Each rank is a thread, and one thread runs at a time: until it reaches a collective, where it waits for the others. So
the order of everything is fixed, and what is not safe in threads (Triton's interpreter) is safe here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from minideepinfer.operators import Arrived, Dispatched
from minideepinfer.testing.contract import Violation

R = TypeVar("R")

PATIENCE = 120.0
"""Seconds that a rank waits for the others; one that is longer away hangs."""


class _Abandoned(BaseException):
    """Another rank has failed; there is nobody to wait for."""


class World:
    """Some ranks that meet at collectives.

    Args:
        size: how many.
        num_experts: routed experts of the model, shared evenly, rank 0 first.
        packed: whether `dispatch` brings only tokens with an expert here; else all tokens of all ranks have a row
            everywhere.
        unsent: what a row holds that nobody sends.
    """

    def __init__(self, size: int, num_experts: int, *, packed: bool = False, unsent: float = torch.nan) -> None:
        self.size, self.num_experts, self.packed, self.unsent = size, num_experts, packed, unsent
        self._turn = threading.Condition()
        self._given: dict[int, tuple[str, Any]] = {}
        self._taken: tuple[Any, ...] = ()
        self._round = 0
        self._done: set[int] = set()
        self._fault: BaseException | None = None

    def run(self, work: Callable[[RankComm], R]) -> list[R]:
        """What each rank returns, in rank order.

        Raises:
            Violation: a rank left out a collective that others called, or called it wrongly.
            Whatever a rank raised first.
        """
        results: dict[int, R] = {}

        def rank_of(rank: int) -> None:
            with self._turn:
                try:
                    results[rank] = work(RankComm(self, rank))
                except _Abandoned:
                    pass
                except BaseException as error:
                    self._fail(error)
                self._done.add(rank)
                if self._given:
                    self._fail(self._absent())

        threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._fault is not None:
            raise self._fault
        return [results[rank] for rank in range(self.size)]

    def exchange(self, rank: int, call: str, value: Any) -> tuple[Any, ...]:
        """Give something and wait for what the others give, in rank order."""
        self._given[rank] = (call, value)
        if self._done:
            self._fail(self._absent())
        elif len(self._given) == self.size:
            calls = [self._given[other][0] for other in range(self.size)]
            if len(set(calls)) > 1:
                self._fail(Violation(f"the ranks call different collectives: {', '.join(calls)}"))
            self._taken = tuple(self._given[other][1] for other in range(self.size))
            self._given, self._round = {}, self._round + 1
            self._turn.notify_all()
        else:
            meeting = self._round
            if not self._turn.wait_for(lambda: self._round > meeting or self._fault is not None, PATIENCE):
                self._fail(Violation(f"rank {rank} waits in {call} and nobody comes"))
        if self._fault is not None:
            raise _Abandoned
        return self._taken

    def _absent(self) -> Violation:
        waiting = ", ".join(f"rank {rank} in {call}" for rank, (call, _) in sorted(self._given.items()))
        return Violation(f"rank {min(self._done)} has returned, but {waiting} waits for it")

    def _fail(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._turn.notify_all()


@dataclass(frozen=True, eq=False)
class _Handle:
    """How `combine` finds home: the global row of each dispatched token, and each rank's number of tokens."""

    rows: Tensor
    counts: tuple[int, ...]


class RankComm:
    """The comm operator of one rank of a `World`, and its `TokenExchange`; sums go in rank order."""

    sent_bytes = 0

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.world_size = rank, world.size
        self._world = world

    def prepare(self, counts: Sequence[int]) -> RankComm:
        """See `CommOperator`; ranks tell each other in every call."""
        return self

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See `CommOperator`."""
        parts = self._world.exchange(self.rank, "all_gather", x)
        _expect("all_gather", [len(part) for part in parts], list(counts))
        return torch.cat(parts)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """See `CommOperator`."""
        parts = self._world.exchange(self.rank, "reduce_scatter", x)
        _expect("reduce_scatter", [len(part) for part in parts], [sum(counts)] * self.world_size)
        total: Tensor = torch.stack(parts).sum(0)
        return total[sum(counts[: self.rank]) :][: counts[self.rank]]

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        """See `CommOperator`."""
        given = self._world.exchange(self.rank, "dispatch", (x, topk_ids, topk_weights))
        x, topk_ids, topk_weights = (torch.cat(parts) for parts in zip(*given, strict=True))
        share = self._world.num_experts // self.world_size
        here = ((topk_ids >= 0) & (topk_ids // share == self.rank)).any(1)
        rows = torch.arange(len(x), device=x.device)
        if self._world.packed:
            x, topk_ids, topk_weights, rows = x[here], topk_ids[here], topk_weights[here], rows[here]
        else:
            x = x.masked_fill(~here[:, None], self._world.unsent)
        handle = _Handle(rows, tuple(len(parts[0]) for parts in given))
        return Arrived(Dispatched(x, topk_ids, topk_weights, handle))

    def combine(self, partial: Tensor, handle: Any) -> Arrived[Tensor]:
        """See `CommOperator`."""
        if partial.dtype is not torch.float32 or len(partial) != len(handle.rows):
            raise Violation(
                f"combine was given {partial.dtype} {list(partial.shape)}; float32 [{len(handle.rows)}, hidden] is "
                "needed, a row for each dispatched token"
            )
        home = partial.new_zeros(sum(handle.counts), partial.shape[1])
        home[handle.rows] = partial
        parts = self._world.exchange(self.rank, "combine", home)
        total: Tensor = torch.stack(parts).sum(0)
        return Arrived(total[sum(handle.counts[: self.rank]) :][: handle.counts[self.rank]])

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Arrived[tuple[Tensor, ...]]:
        """See `CommOperator`."""
        everybodys = self._world.exchange(self.rank, "fetch_rows", tables)
        whole = (torch.cat(shards) for shards in zip(*everybodys, strict=True))
        return Arrived(tuple(table[row_ids.to(table.device)].to(row_ids.device) for table in whole))


def _expect(call: str, found: list[int], counts: list[int]) -> None:
    if found != counts:
        raise Violation(f"{call} was given rows {found} by the ranks, but counts {counts}")
