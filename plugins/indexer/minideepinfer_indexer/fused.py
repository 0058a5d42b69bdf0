"""`fused`: scores and their block maxima in one launch, an exact top-k that reads a few blocks of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from minideepinfer.operators import Batch, BuildContext, IndexerOutput, Phase, Selection
from minideepinfer.operators.declaration import interpreting
from minideepinfer.operators.problem import IndexerProblem
from torch import Tensor

from minideepinfer_indexer.kernels.scoring import score_kernel
from minideepinfer_indexer.kernels.topk import pool_kernel, topk_kernel

TOP = 64
"""Entries of the largest blocks whose maxima are kept."""
WORKSPACE = 1 << 30
"""Bytes of scores held at once."""
TILE = 8192
"""Numbers that a program of the top-k chooses from at once, unless `topk` blocks hold more."""
_PROGRAMS = 1056
"""Programs that fill the card: 132 multiprocessors, two at once, four times over."""
_FLAGS = 2048


@dataclass(frozen=True)
class _Tiling:
    """Constants of the scoring kernel for one problem; a score does not depend on the batch because they do not."""

    rows: int
    heads: int
    dim: int
    entries: int
    warps: int
    stages: int

    @classmethod
    def of(cls, problem: IndexerProblem) -> _Tiling:
        heads, dim = _at_least(16, problem.num_heads), _at_least(16, problem.head_dim)
        one_row = problem.uses_candidates or problem.phase is Phase.DECODE
        if problem.dtype == "float32":
            return cls(1 if one_row else max(1, 64 // heads), heads, dim, entries=64, warps=4, stages=1)
        return cls(1 if one_row else max(1, min(8, 256 // heads)), heads, dim, entries=64, warps=4, stages=3)


@dataclass(frozen=True)
class _Chunk:
    """Rows that are scored and chosen together, and their tiles."""

    rows: range
    tiles: Tensor


@dataclass(frozen=True, eq=False)
class _Metadata:
    """A batch on the device.

    Attributes:
        block_table: int32 `[R, max_pages]`.
        visible: int32 `[T]`, entries that each row sees.
        num_entries: no row sees more.
        row_entries: places in a row of scores.
        chunks: all rows.
    """

    block_table: Tensor
    visible: Tensor
    num_entries: int
    row_entries: int
    chunks: tuple[_Chunk, ...]


class FusedIndexer:
    """See `IndexerOperator`. A score that is -inf or NaN is never selected."""

    def __init__(self, problem: IndexerProblem) -> None:
        self._problem = problem
        self._tiling = _Tiling.of(problem)
        self._block = problem.candidate_block_size if problem.emits_candidates else 8
        self.form = "triton, interpreted" if interpreting() else "triton"

    def prepare(self, batch: Batch) -> _Metadata:
        """Cut the rows into tiles of one request, and the tiles into chunks whose scores fit the workspace."""
        problem = self._problem
        lasts = [c + n for c, n in zip(batch.context_lens, batch.seqlens, strict=True) if n]
        num_entries = max(lasts, default=0) // problem.compress_ratio
        places = num_entries
        if problem.uses_candidates:
            places = min(places, problem.candidate_topk_blocks * problem.candidate_block_size)
        row_entries = _round_up(places, max(TOP, self._tiling.entries))
        device = batch.positions.device
        return _Metadata(
            block_table=batch.block_table.contiguous(),
            visible=batch.visible_entries(problem.compress_ratio).int(),
            num_entries=num_entries,
            row_entries=row_entries,
            chunks=tuple(self._chunks(batch, max(1, WORKSPACE // max(1, 4 * row_entries)), device)),
        )

    def _chunks(self, batch: Batch, most: int, device: torch.device) -> list[_Chunk]:
        """Consecutive tiles of together at most `most` rows, one tile at least."""
        tiles, start = [], 0
        for request, length in enumerate(batch.seqlens):
            stop = start + length
            tiles += [(request, row, min(self._tiling.rows, stop - row)) for row in range(start, stop, self._tiling.rows)]
            start = stop
        chunks, begin = [], 0
        for end in range(1, len(tiles) + 1):
            rows = range(tiles[begin][1], tiles[end - 1][1] + tiles[end - 1][2])
            if end == len(tiles) or rows.stop + tiles[end][2] - rows.start > most:
                chunks.append(_Chunk(rows, _upload(tiles[begin:end], device)))
                begin = end
        return chunks

    def run(
        self, q: Tensor, head_weights: Tensor, index_keys: Tensor, candidates: Tensor | None, metadata: _Metadata
    ) -> IndexerOutput:
        """See `IndexerOperator.run`."""
        problem, tokens = self._problem, q.shape[0]
        indices = q.new_empty(tokens, problem.topk, dtype=torch.int32)
        blocks = None
        if problem.emits_candidates:
            blocks = q.new_empty(tokens, problem.candidate_topk_blocks, dtype=torch.int32)
        if not metadata.num_entries:
            return IndexerOutput(Selection(indices.fill_(-1)), None if blocks is None else blocks.fill_(-1))
        q, head_weights = q.contiguous(), head_weights.contiguous()
        for chunk in metadata.chunks:
            call = _Call(problem, self._tiling, self._block, metadata, chunk)
            lengths, pool = metadata.visible, None
            if candidates is not None:
                lengths, pool = call.pool(candidates.contiguous())
            call.score(q, head_weights, index_keys, lengths, pool)
            if blocks is not None:
                call.choose_blocks(blocks)
            call.choose(indices, lengths, pool)
        return IndexerOutput(Selection(indices), blocks)


class _Call:
    """The launches of one chunk and the buffers between them."""

    def __init__(
        self, problem: IndexerProblem, tiling: _Tiling, block: int, metadata: _Metadata, chunk: _Chunk
    ) -> None:
        self._problem, self._tiling, self._block, self._chunk = problem, tiling, block, chunk
        self._metadata = metadata
        self._shift = problem.candidate_block_size.bit_length() - 1
        self._size = metadata.row_entries
        self._levels = _levels(self._size, problem.topk, (block, TOP // block))
        block_levels = 1
        if problem.emits_candidates:
            block_levels = _levels(self._size // block, problem.candidate_topk_blocks, (TOP // block,))
        self._block_levels = block_levels
        self._with_tops = self._levels == 3 or block_levels == 2
        rows, new = len(chunk.rows), metadata.visible.new_empty
        self._scores = new(rows, self._size, dtype=torch.float32)
        self._maxima = new(rows, self._size // block, dtype=torch.float32)
        self._tops = new(rows, self._size // TOP, dtype=torch.float32) if self._with_tops else self._maxima

    def pool(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Entries in each row's candidate blocks int32 `[T]` (of this chunk), and the blocks in order."""
        rows, width, visible = self._chunk.rows, candidates.shape[1], self._metadata.visible
        row_flags = _round_up(-(-self._metadata.num_entries >> self._shift), _FLAGS)
        flags = visible.new_empty(len(rows), row_flags, dtype=torch.int8)
        pool, lengths = visible.new_empty(len(rows), width), torch.empty_like(visible)
        pool_kernel[(len(rows),)](
            candidates,
            visible,
            flags,
            pool,
            lengths,
            rows.start,
            width,
            self._shift,
            row_flags,
            WIDTH=_at_least(16, width),
            TILE=_FLAGS,
        )
        return lengths, pool

    def score(self, q: Tensor, head_weights: Tensor, index_keys: Tensor, lengths: Tensor, pool: Tensor | None) -> None:
        """Fill the buffers."""
        problem, tiling, metadata = self._problem, self._tiling, self._metadata
        num_tiles = len(self._chunk.tiles)
        per_program = min(_round_up(-(-self._size * num_tiles // _PROGRAMS), 256), 8192)
        score_kernel[(num_tiles, -(-self._size // per_program))](
            q,
            head_weights,
            index_keys,
            metadata.block_table,
            self._chunk.tiles,
            lengths,
            pool if pool is not None else lengths,
            self._scores,
            self._maxima,
            self._tops,
            self._chunk.rows.start,
            problem.num_heads,
            problem.head_dim,
            index_keys.stride(0),
            index_keys.stride(1),
            metadata.block_table.shape[1],
            index_keys.shape[1].bit_length() - 1,
            problem.candidate_topk_blocks,
            self._shift,
            self._size,
            per_program,
            ROWS=tiling.rows,
            HEADS=tiling.heads,
            DIM=tiling.dim,
            ENTRIES=tiling.entries,
            BLOCK=self._block,
            TOP=TOP,
            WITH_TOPS=self._with_tops,
            POOLED=pool is not None,
            STAGES=tiling.stages,
            OPERAND=tl.float32 if interpreting() or problem.dtype == "float32" else tl.bfloat16,
            num_warps=tiling.warps,
        )

    def choose_blocks(self, blocks: Tensor) -> None:
        """The candidate blocks of each row."""
        self._topk(blocks, self._metadata.visible, None, (self._maxima, self._tops, self._tops), self._block_levels)

    def choose(self, indices: Tensor, lengths: Tensor, pool: Tensor | None) -> None:
        """The selected entries of each row."""
        self._topk(indices, lengths, pool, (self._scores, self._maxima, self._tops), self._levels)

    def _topk(
        self, chosen: Tensor, lengths: Tensor, pool: Tensor | None, buffers: tuple[Tensor, Tensor, Tensor], levels: int
    ) -> None:
        leaves, blocks, tops = buffers
        of_blocks, width = leaves is self._maxima, leaves.shape[1]
        fans = (leaves.shape[1] // blocks.shape[1] if levels > 1 else 1, TOP // self._block if levels > 2 else 1)
        size = _at_least(64, width // fans[0] // fans[1])
        topk_kernel[(len(leaves),)](
            leaves,
            blocks,
            tops,
            lengths,
            pool if pool is not None else lengths,
            chosen,
            self._chunk.rows.start,
            chosen.shape[1],
            self._shift if of_blocks else 0,
            width,
            self._problem.candidate_topk_blocks,
            self._shift,
            LEAVES=size,
            SLOTS=_at_least(16, chosen.shape[1]),
            FAN=fans[0],
            TOP_FAN=fans[1],
            LEVELS=levels,
            PINNED=of_blocks,
            POOLED=pool is not None,
            num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
        )


def _levels(leaves: int, topk: int, fans: tuple[int, ...]) -> int:
    """How many levels to choose on: fewer where a program holds all that is left to choose from."""
    levels, slots = 1, _at_least(16, topk)
    for fan in fans:
        if leaves <= (slots * fan if levels == 1 else max(TILE, slots * fan)):
            return levels
        leaves, levels = leaves // fan, levels + 1
    return levels


def _upload(numbers: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _at_least(least: int, number: int) -> int:
    """The next power of two, `least` at least."""
    return max(least, 1 << (number - 1).bit_length())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def build(context: BuildContext) -> FusedIndexer:
    """Build `fused`."""
    return FusedIndexer(context.problem)
