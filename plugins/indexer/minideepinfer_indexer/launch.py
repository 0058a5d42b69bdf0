"""The launches of one chunk of rows and the buffers between them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from minideepinfer.operators import interpreting
from minideepinfer.operators.problem import IndexerProblem
from torch import Tensor

from minideepinfer_indexer.kernels import scoring
from minideepinfer_indexer.kernels.topk import pool_kernel, topk_kernel
from minideepinfer_indexer.operands import Operands
from minideepinfer_indexer.tiling import TOP, Chunk, Metadata, Tiling, at_least, round_up

TILE = 16384
"""Numbers that a program of the top-k chooses from at first, unless `topk` blocks hold more."""
TILE_OF_KEYS = 128
"""A program scores a multiple of it."""
_FLAGS = 2048
_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv}


class Launch:
    """Scores, block maxima and choices of one chunk."""

    def __init__(self, problem: IndexerProblem, tiling: Tiling, metadata: Metadata, chunk: Chunk) -> None:
        self._problem, self._tiling, self._metadata, self._chunk = problem, tiling, metadata, chunk
        self._block = problem.candidate_block_size if problem.emits_candidates else 8
        self._shift = problem.candidate_block_size.bit_length() - 1
        width, block, rows = metadata.width, self._block, len(chunk.rows)
        self._levels = levels(width, problem.topk, (block, TOP // block))
        self._block_levels = 1
        if problem.emits_candidates:
            self._block_levels = levels(width // block, problem.candidate_topk_blocks, (TOP // block,))
        self._with_tops = self._levels == 3 or self._block_levels == 2
        empty = metadata.visible.new_empty
        self.scores = empty(rows, width, dtype=torch.float32)
        self.maxima = empty(rows, width // block, dtype=torch.float32)
        self.tops = empty(rows, width // TOP, dtype=torch.float32) if self._with_tops else self.maxima

    def pool(self, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Entries in each row's candidate blocks int32 `[T]` (this chunk's only), and the blocks in order."""
        rows, width, visible = self._chunk.rows, candidates.shape[1], self._metadata.visible
        row_flags = round_up((self._metadata.num_entries >> self._shift) + 1, _FLAGS)
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
            WIDTH=at_least(16, width),
            TILE=_FLAGS,
        )
        return lengths, pool

    def score(self, operands: Operands, lengths: Tensor, pool: Tensor | None, descriptors: Any = None) -> None:
        """Fill the buffers; `descriptors` of queries and keys ask for the Gluon kernel."""
        tiling, metadata = self._tiling, self._metadata
        num_tiles, width = len(self._chunk.tiles), metadata.width
        splits = -(-width // round_up(-(-width * num_tiles // tiling.programs), TILE_OF_KEYS))
        per_program = round_up(-(-width // splits), TILE_OF_KEYS)
        constants = {
            "ROWS": tiling.rows,
            "HEADS": tiling.heads,
            "ENTRIES": tiling.entries,
            "BLOCK": self._block,
            "TOP": TOP,
            "WITH_TOPS": self._with_tops,
            "SCALED": operands.key_scales is not None,
            "STAGES": tiling.stages,
            "num_warps": 4,
        }
        grid = (num_tiles, splits)
        if descriptors is None:
            self._score_triton(grid, operands, lengths, pool, per_program, constants)
        else:
            self._score_gluon(grid, operands, lengths, descriptors, per_program, constants)

    def _score_gluon(
        self,
        grid: tuple[int, int],
        operands: Operands,
        lengths: Tensor,
        descriptors: Any,
        per_program: int,
        constants: dict[str, Any],
    ) -> None:
        from minideepinfer_indexer.descriptor import slab
        from minideepinfer_indexer.kernels import scoring_gluon

        table = operands.block_table
        scoring_gluon.score_kernel[grid](
            *descriptors,
            operands.head_weights,
            table,
            self._chunk.tiles,
            lengths,
            operands.key_scales if operands.key_scales is not None else lengths,
            self.scores,
            self.maxima,
            self.tops,
            self._chunk.rows.start,
            self._problem.num_heads,
            table.shape[1],
            operands.keys.shape[1].bit_length() - 1,
            self._metadata.width,
            per_program,
            PARTS=self._tiling.parts,
            SLABS=self._tiling.dim // slab(self._tiling, operands.keys),
            REGISTERS=self._tiling.registers,
            **constants,
        )

    def _score_triton(
        self,
        grid: tuple[int, int],
        operands: Operands,
        lengths: Tensor,
        pool: Tensor | None,
        per_program: int,
        constants: dict[str, Any],
    ) -> None:
        problem, keys, table = self._problem, operands.keys, operands.block_table
        scoring.score_kernel[grid](
            operands.q,
            operands.head_weights,
            keys,
            table,
            self._chunk.tiles,
            lengths,
            pool if pool is not None else lengths,
            operands.key_scales if operands.key_scales is not None else lengths,
            self.scores,
            self.maxima,
            self.tops,
            self._chunk.rows.start,
            problem.num_heads,
            problem.head_dim,
            keys.stride(0),
            keys.stride(1),
            table.shape[1],
            keys.shape[1].bit_length() - 1,
            problem.candidate_topk_blocks,
            self._shift,
            self._metadata.width,
            per_program,
            DIM=self._tiling.dim,
            POOLED=pool is not None,
            OPERAND=tl.float32 if interpreting() else _OPERANDS[operands.q.dtype],
            PACKED=problem.head_dim if operands.packed else 0,
            **constants,
        )

    def choose_blocks(self, blocks: Tensor) -> None:
        """The candidate blocks of each row."""
        self._topk(blocks, self._metadata.visible, None, (self.maxima, self.tops, self.tops), self._block_levels)

    def choose(self, indices: Tensor, lengths: Tensor, pool: Tensor | None) -> None:
        """The selected entries of each row."""
        self._topk(indices, lengths, pool, (self.scores, self.maxima, self.tops), self._levels)

    def _topk(
        self, chosen: Tensor, lengths: Tensor, pool: Tensor | None, buffers: tuple[Tensor, Tensor, Tensor], levels: int
    ) -> None:
        leaves, blocks, tops = buffers
        of_blocks, width = leaves is self.maxima, leaves.shape[1]
        fan = width // blocks.shape[1] if levels > 1 else 1
        top_fan = TOP // self._block if levels > 2 else 1
        size, slots = at_least(64, width // fan // top_fan), at_least(16, chosen.shape[1])
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
            SLOTS=slots,
            FAN=fan,
            TOP_FAN=top_fan,
            LEVELS=levels,
            PINNED=of_blocks,
            POOLED=pool is not None,
            **_warps(max(size, slots * fan, slots * top_fan)),
        )


def _warps(numbers: int) -> dict[str, int]:
    """Warps of a program that chooses among so many numbers; few registers let more programs hide their waiting."""
    if numbers <= 1024:
        return {"num_warps": 4}
    return {"num_warps": 8 if numbers <= 8192 else 16, "maxnreg": 64}


def levels(leaves: int, topk: int, fans: tuple[int, ...]) -> int:
    """On how many levels to choose: fewer where a program holds all that is left to choose from."""
    count, slots = 1, at_least(16, topk)
    for fan in fans:
        if leaves <= (slots * fan if count == 1 else max(TILE, slots * fan)):
            return count
        leaves, count = leaves // fan, count + 1
    return count
