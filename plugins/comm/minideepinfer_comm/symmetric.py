"""`symmetric`: as `collective`, but table rows are read straight from their owners' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
from minideepinfer.operators import Arrived, BuildContext
from torch import Tensor

from minideepinfer_comm.collective import GatheredTokens
from minideepinfer_comm.group import Group
from minideepinfer_comm.kernels.peer_rows import peer_rows
from minideepinfer_comm.operator import GroupComm

PROGRAM_WORDS = 1024
"""Words that a program moves, about."""


class _Shard(NamedTuple):
    """A rank's part of a table: the table that was given, its copy, and the addresses of every rank's copy."""

    table: Tensor
    copy: Tensor
    addresses: Tensor


class SymmetricComm(GroupComm):
    """See `CommOperator`. `fetch_rows` sends nothing and waits for nobody.

    The first fetch from a table copies it, on all ranks together, into torch's symmetric memory, where it stays: the
    table is then twice on the device, and must be the same tensor each time. What peers read there is not counted in
    `sent_bytes`.
    """

    form = "triton"

    def __init__(self, group: Group) -> None:
        super().__init__(group, GatheredTokens)
        self._shards: dict[int, _Shard] = {}
        """By the table's identity, which nothing else takes as long as the table is held here."""

    def fetch_rows(self, tables: Sequence[Tensor], row_ids: Tensor, rows_per_rank: int) -> Arrived[tuple[Tensor, ...]]:
        """See `CommOperator`; repeated rows are read repeatedly."""
        return Arrived(tuple(self._fetch(table, row_ids, rows_per_rank) for table in tables))

    def _fetch(self, table: Tensor, row_ids: Tensor, rows_per_rank: int) -> Tensor:
        if id(table) not in self._shards:
            self._shards[id(table)] = _share(table, rows_per_rank, row_ids.device)
        return read_rows(self._shards[id(table)].addresses, row_ids, table.shape[1], rows_per_rank)


def read_rows(addresses: Tensor, row_ids: Tensor, width: int, rows_per_rank: int) -> Tensor:
    """Rows by address.

    Args:
        addresses: int64 `[ranks]`, where each rank's shard begins; multiples of 8.
        row_ids: int64 `[N]`, contiguous.
        width: bytes of a row.
        rows_per_rank: rows of a shard.

    Returns:
        uint8 `[N, width]`.
    """
    rows = torch.empty(len(row_ids), width, dtype=torch.uint8, device=row_ids.device)
    words = rows.view(torch.int64) if width % 8 == 0 and len(rows) else rows
    if len(rows):
        block = triton.next_power_of_2(words.shape[1])
        each = max(1, PROGRAM_WORDS // block)
        grid = (triton.cdiv(len(rows), each),)
        peer_rows[grid](addresses, row_ids, words, len(rows), rows_per_rank, words.shape[1], block, each)
    return rows


def _share(table: Tensor, rows_per_rank: int, device: torch.device) -> _Shard:
    """Copy a shard to where the other ranks can read it; every rank does, at the same time."""
    copy = symmetric_memory.empty(rows_per_rank, table.shape[1], dtype=table.dtype, device=device)
    copy[: len(table)].copy_(table)
    handle = symmetric_memory.rendezvous(copy, dist.distributed_c10d._get_default_group())
    handle.barrier()  # nobody reads before everybody has copied
    return _Shard(table, copy, torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device))


def build(context: BuildContext) -> SymmetricComm:
    """Build `symmetric`."""
    return SymmetricComm(Group(context))
