"""The launches of one chunk of rows and the buffers between them."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from minideepinfer.operators.declaration import interpreting
from minideepinfer.operators.problem import IndexerProblem
from torch import Tensor

from minideepinfer_indexer.kernels import scoring
from minideepinfer_indexer.kernels.topk import pool_kernel, topk_kernel
from minideepinfer_indexer.operands import Operands
from minideepinfer_indexer.tiling import TOP, Chunk, Metadata, Tiling, at_least, round_up

TILE = 1024
"""Numbers that a program of the top-k chooses from at first, unless `topk` blocks hold more."""
PROGRAMS = 1056
"""Programs that fill the card: 132 multiprocessors, two at once, four times over."""
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

    def score(self, operands: Operands, lengths: Tensor, pool: Tensor | None, descriptor: Any = None) -> None:
        """Fill the buffers; `descriptor` of the keys asks for the Gluon kernel."""
        problem, tiling, chunk, keys = self._problem, self._tiling, self._chunk, operands.keys
        num_tiles, width = len(chunk.tiles), self._metadata.width
        per_program = min(round_up(-(-width * num_tiles // PROGRAMS), 128), 8192)
        grid = (num_tiles, -(-width // per_program))
        scales = operands.key_scales if operands.key_scales is not None else lengths
        table, page_shift = operands.block_table, keys.shape[1].bit_length() - 1
        inputs = (table, chunk.tiles, lengths)
        outputs = (scales, self.scores, self.maxima, self.tops)
        sizes = (chunk.rows.start, problem.num_heads, problem.head_dim)
        constants = {
            "ROWS": tiling.rows,
            "HEADS": tiling.heads,
            "DIM": tiling.dim,
            "ENTRIES": tiling.entries,
            "BLOCK": self._block,
            "TOP": TOP,
            "WITH_TOPS": self._with_tops,
            "SCALED": operands.key_scales is not None,
            "STAGES": tiling.stages,
            "num_warps": 4,
        }
        if descriptor is not None:
            from minideepinfer_indexer.kernels import scoring_gluon

            scoring_gluon.score_kernel[grid](
                operands.q,
                operands.head_weights,
                descriptor,
                *inputs,
                *outputs,
                *sizes,
                table.shape[1],
                page_shift,
                width,
                per_program,
                **constants,
            )
            return
        scoring.score_kernel[grid](
            operands.q,
            operands.head_weights,
            keys,
            *inputs,
            pool if pool is not None else lengths,
            *outputs,
            *sizes,
            keys.stride(0),
            keys.stride(1),
            table.shape[1],
            page_shift,
            problem.candidate_topk_blocks,
            self._shift,
            width,
            per_program,
            **constants,
            POOLED=pool is not None,
            OPERAND=tl.float32 if interpreting() else _OPERANDS[keys.dtype],
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
        size = at_least(64, width // fan // top_fan)
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
            SLOTS=at_least(16, chosen.shape[1]),
            FAN=fan,
            TOP_FAN=top_fan,
            LEVELS=levels,
            PINNED=of_blocks,
            POOLED=pool is not None,
            num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
        )


def levels(leaves: int, topk: int, fans: tuple[int, ...]) -> int:
    """On how many levels to choose: fewer where a program holds all that is left to choose from."""
    count, slots = 1, at_least(16, topk)
    for fan in fans:
        if leaves <= (slots * fan if count == 1 else max(TILE, slots * fan)):
            return count
        leaves, count = leaves // fan, count + 1
    return count
