"""Attention that finds its keys itself: window entries in rings and in this step, selected ones through the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from minideepinfer.operators import Batch, BuildContext, Selection, Stage
from minideepinfer.operators.problem import AttentionProblem
from minideepinfer.transfer import upload
from torch import Tensor

from minideepinfer_attention.kernels.direct import combine_kernel, direct_kernel
from minideepinfer_attention.tiles import FORM, LOG2E, PACKED, head_tile, no_sink, num_programs

MOST_SPLITS = 32
"""`combine_kernel` holds the sums of one head of all of them."""


@dataclass(frozen=True, eq=False)
class DirectMetadata:
    """A batch, and the positions of its requests' first rows: int64 `[R]` on the device."""

    batch: Batch
    context_lens: Tensor


class DirectAttention:
    """See `AttentionOperator`. Few rows split their keys among programs; the bits then depend on how many there are."""

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self.form = FORM
        self.fuses = {Stage.KEY_GATHER: Stage.ATTENTION}
        self._window, self._ratio = problem.sliding_window, problem.compress_ratio
        self._packed = problem.cache_layout == PACKED
        self._no_sink = no_sink(problem.num_heads, device)
        self.programs = num_programs(device)
        """As many at least, where there are keys enough, share the work."""

    def prepare(self, batch: Batch) -> DirectMetadata:
        """Move what the kernel needs to the device."""
        context = upload(torch.tensor(batch.context_lens, dtype=torch.int64), batch.positions.device)
        return DirectMetadata(batch, context)

    def run(
        self,
        q: Tensor,
        window_new: Tensor,
        window_ring: Tensor,
        global_kv: Tensor | None,
        selection: Selection | None,
        sink: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        metadata: DirectMetadata,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        batch, (num_tokens, num_heads, dim) = metadata.batch, q.shape
        q, window_new, cos, sin = (tensor.contiguous() for tensor in (q, window_new, cos, sin))
        out = torch.empty_like(q)
        if not num_tokens:
            return out
        tile = row_tile(num_tokens, self.programs, num_heads, dim, q.dtype, self._packed)
        head_tiles = triton.cdiv(num_heads, tile["BLOCK_H"])
        topk = 0 if selection is None else selection.indices.shape[1]
        window_tiles = triton.cdiv(self._window, tile["BLOCK_K"])
        num_tiles = window_tiles + triton.cdiv(topk, tile["BLOCK_K"])
        wanted_splits = min(MOST_SPLITS, self.programs // (num_tokens * head_tiles))
        tiles_per_split = triton.cdiv(num_tiles, max(1, wanted_splits))
        num_splits = triton.cdiv(num_tiles, tiles_per_split)
        partial = total = peak = None
        if num_splits > 1:
            partial = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
            total, peak = torch.empty(2, num_splits, num_tokens, num_heads, dtype=torch.float32, device=q.device)
        sink = self._no_sink if sink is None else sink
        pool = window_ring if global_kv is None else global_kv
        indices = batch.block_table if selection is None else selection.indices.contiguous()
        lens = None if selection is None else selection.lens
        direct_kernel[num_tokens, head_tiles, num_splits](
            q,
            window_new,
            window_ring,
            pool,
            indices,
            indices if lens is None else lens,
            batch.positions,
            batch.request_ids,
            batch.cu_seqlens,
            metadata.context_lens,
            batch.ring_table,
            batch.window_start,
            batch.block_table.contiguous(),
            sink,
            cos,
            sin,
            out,
            partial,
            total,
            peak,
            scale * LOG2E,
            num_heads,
            self._window,
            window_ring.shape[1],
            batch.block_table.shape[1],
            pool.shape[1],
            max(self._ratio, 1),
            topk,
            int(lens is not None),
            window_tiles,
            num_tiles,
            tiles_per_split,
            2 * cos.shape[1],
            PACKED=self._packed,
            DIM=dim,
            **tile,
        )
        if partial is not None:
            combine_kernel[num_tokens, num_heads](
                partial,
                total,
                peak,
                sink,
                cos,
                sin,
                out,
                num_heads,
                num_splits,
                2 * cos.shape[1],
                DIM=dim,
                BLOCK_S=triton.next_power_of_2(num_splits),
                BLOCK_D=triton.next_power_of_2(dim),
                num_warps=4,
            )
        return out


def row_tile(
    num_tokens: int, programs: int, num_heads: int, head_dim: int, dtype: torch.dtype, packed: bool = False
) -> dict[str, Any]:
    """`head_tile`; few rows have 16 heads in a large tile, so that more programs share their work, without spills.

    Few are those whose keys are still split among two programs at least. Tiles of packed keys are small enough for the
    registers and shared memory that decoding takes.
    """
    tile = head_tile(num_heads, head_dim, dtype)
    if packed and (tile["num_warps"] == 8 or tile["BLOCK_D"] > 256):
        tile |= {"BLOCK_H": min(32, tile["BLOCK_H"]), "BLOCK_K": min(32, tile["BLOCK_K"])}
    if tile["num_warps"] == 8 and 2 * num_tokens * triton.cdiv(num_heads, 16) <= programs:
        tile["BLOCK_H"] = 16
    return tile


def build(context: BuildContext) -> DirectAttention:
    """Build `indexed`."""
    return DirectAttention(context.problem, context.device)
