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
    the row bytes of all tables for each id it was asked for. The host waits twice: for the number of different rows,
    and for the numbers of others' rows.
    """
    wanted, place = torch.unique(row_ids, return_inverse=True)  # ascending, so by owner
    owners = torch.arange(group.size, device=row_ids.device)[:, None]
    asked_of, asking = group.exchange_numbers((wanted // rows_per_rank == owners).sum(1))
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
