"""Rows of a sharded table: each rank asks the owners for the rows it needs, each once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from minideepinfer.operators import Pending
from torch import Tensor

from minideepinfer_comm.group import Group, Move


def fetch_rows(
    group: Group, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int
) -> Pending[tuple[Tensor, ...]]:
    """See `CommOperator.fetch_rows`.

    A rank that needs U_o different rows of owner o sends it `8 * U_o` bytes, and 8 to say how many; an owner sends back
    the row bytes of all tables for each id it was asked for. The host waits once, for the numbers of rows.
    """
    ordered, places = row_ids.sort()  # by owner, equal ones together
    first = ordered != ordered.roll(1)
    first[:1] = True
    owners = torch.arange(group.size, device=row_ids.device)[:, None]
    numbers = group.exchange_numbers((first & (ordered // rows_per_rank == owners)).sum(1))
    wanted = ordered[torch.nonzero_static(first, size=len(first), fill_value=0)[:, 0]]  # and more behind them
    place = torch.empty_like(places).scatter_(0, places, first.cumsum(0) - 1)
    asked_of, asking = numbers.wait()
    wanted = wanted[: sum(asked_of)]
    questions = wanted.new_empty(sum(asking))
    group.exchange([Move(wanted.split(asked_of), questions.split(asking))], finish=_nothing).wait()
    here = questions - group.rank * rows_per_rank
    moves, found = [], []
    for table in tables:
        answers = table[here.to(table.device)].to(row_ids.device)
        found.append(answers.new_empty(len(wanted), *table.shape[1:]))
        moves.append(Move(answers.split(asking), found[-1].split(asked_of)))
    return group.exchange(moves, lambda: tuple(rows[place] for rows in found))


def _nothing() -> None:
    """What is made of questions: nothing yet."""
