"""How the fused indexer cuts a batch: tiles of rows, chunks of tiles, and what is known of them before `run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from minideepinfer import transfer
from minideepinfer.operators import Batch, Phase
from minideepinfer.operators.problem import IndexerProblem
from torch import Tensor

TOP = 64
"""Entries of the largest blocks whose maxima are kept; a row of scores is a multiple of it."""
WORKSPACE = 1 << 30
"""Bytes of scores held at once."""


@dataclass(frozen=True)
class Tiling:
    """Constants of the scoring kernels for one problem; a score does not depend on the batch because they do not.

    Attributes:
        rows: most rows of a tile.
        heads: index heads, filled up.
        dim: channels, filled up.
        entries: of a tile of keys.
        stages: tiles of keys on their way at once.
        parts: in which a tile's rows are multiplied and summed (Gluon).
        programs: how many there are to be, if there is work for them.
        registers: of a thread that multiplies (Gluon).
    """

    rows: int
    heads: int
    dim: int
    entries: int
    stages: int
    programs: int
    registers: int = 240
    parts: int = 1

    @classmethod
    def of(cls, problem: IndexerProblem) -> Tiling:
        """The tiling for a problem: as many rows as fill the product's 256 columns, one where rows share no keys."""
        heads, dim = at_least(16, problem.num_heads), at_least(16, problem.head_dim)
        if problem.uses_candidates:
            return cls(1, heads, dim, entries=128, stages=2, programs=4096)
        if problem.phase is Phase.DECODE:
            return cls(1, heads, dim, entries=64, stages=8, programs=264, registers=120)
        if problem.dtype == "float32":
            return cls(max(1, min(8, 64 // heads)), heads, dim, entries=64, stages=1, programs=1056)
        rows = max(1, min(8, 256 // heads))
        return cls(rows, heads, dim, entries=64, stages=6, programs=1056, parts=2 if rows > 1 else 1)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows that are scored and chosen together.

    Attributes:
        rows: their numbers.
        tiles: int32 `[num_tiles, 3]`: request, first row, number of rows.
    """

    rows: range
    tiles: Tensor


@dataclass(frozen=True, eq=False)
class Metadata:
    """A batch on the device.

    Attributes:
        block_table: int32 `[R, max_pages]`.
        visible: int32 `[T]`, entries that each row sees.
        counts: entries of each request; none of its rows sees more.
        width: places in a row of scores.
        chunks: all rows.
    """

    block_table: Tensor
    visible: Tensor
    counts: tuple[int, ...]
    width: int
    chunks: tuple[Chunk, ...]

    @property
    def num_entries(self) -> int:
        """No row sees more entries."""
        return max(self.counts, default=0)


def plan(problem: IndexerProblem, tiling: Tiling, batch: Batch) -> Metadata:
    """Cut the rows into tiles of one request, and the tiles into chunks whose scores fit the workspace."""
    ratio = problem.compress_ratio
    counts = batch.last_visible_entries(ratio)
    places = max(counts, default=0)
    if problem.uses_candidates:
        places = min(places, problem.candidate_topk_blocks * problem.candidate_block_size)
    width = round_up(places, max(TOP, tiling.entries))
    tiles, start = [], 0
    for request, length in enumerate(batch.seqlens):
        stop = start + length
        tiles += [(request, row, min(tiling.rows, stop - row)) for row in range(start, stop, tiling.rows)]
        start = stop
    return Metadata(
        block_table=batch.block_table.contiguous(),
        visible=batch.visible_entries(ratio).int(),
        counts=counts,
        width=width,
        chunks=_chunks(tiles, max(1, WORKSPACE // max(1, 4 * width)), batch.positions.device),
    )


def _chunks(tiles: list[tuple[int, int, int]], most: int, device: torch.device) -> tuple[Chunk, ...]:
    """Consecutive tiles of together at most `most` rows, one tile at least."""
    chunks, begin = [], 0
    for end in range(1, len(tiles) + 1):
        rows = range(tiles[begin][1], tiles[end - 1][1] + tiles[end - 1][2])
        if end == len(tiles) or rows.stop + tiles[end][2] - rows.start > most:
            chunks.append(Chunk(rows, upload(tiles[begin:end], device)))
            begin = end
    return tuple(chunks)


def upload(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Host numbers as an int32 tensor on a device, without waiting for it."""
    return transfer.upload(torch.tensor(numbers, dtype=torch.int32), device)


def at_least(least: int, number: int) -> int:
    """The next power of two, `least` at least."""
    return max(least, 1 << (number - 1).bit_length())


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
