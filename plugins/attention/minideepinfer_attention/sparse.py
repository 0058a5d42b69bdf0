"""Attention of each token to its own list of physical rows: some of a window buffer, then some of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import Batch, Selection, Stage, StageClock
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

from minideepinfer_attention.kernels.sparse import again_kernel, sparse_kernel
from minideepinfer_attention.packed import OwnPages, unpack_pages
from minideepinfer_attention.rows import WindowLayout, pool_rows, window_buffer, window_layout
from minideepinfer_attention.tiles import FORM, LOG2E, PACKED, head_tile, no_sink, num_programs, suits_gluon


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    pool: Tensor,
    pool_rows: Tensor,
    sink: Tensor,
    scale: float,
    out: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Attend to listed rows; a token's keys are those of its two lists together. All tensors are contiguous.

    Args:
        q: `[T, H, D]`, bfloat16 or float32.
        window: `[Nw, D]` keys, in q's dtype.
        window_rows: int32 `[T, W]`, row numbers in `window`; -1 = none.
        pool: `[Ng, D]` keys, in q's dtype; may have more than 2^31 elements.
        pool_rows: int32 `[T, K]`, row numbers in `pool`; -1 = none; K may be 0.
        sink: float32 `[H]` logits, in the denominator only; -inf = none.
        scale: factor on the logits.
        out: `[T, H, D]` in q's dtype, overwritten. A token without keys is zero.
        cos: float32 `[T, C]` to rotate the last 2C channels back by (rounded before and after); None = leave them.
        sin: float32 `[T, C]`.

    Returns:
        `out`. A token's bits depend on nothing but its own inputs.
    """
    num_tokens, num_heads, dim = q.shape
    if not num_tokens:
        return out
    tile = head_tile(num_heads, dim, q.dtype)
    num_window, num_pool = window_rows.shape[1], pool_rows.shape[1]
    window_tiles = triton.cdiv(num_window, tile["BLOCK_K"])
    head_tiles = triton.cdiv(num_heads, tile["BLOCK_H"])
    lost = torch.empty(num_tokens, head_tiles, dtype=torch.int32, device=q.device)
    programs = min(num_tokens * head_tiles, num_programs(q.device))
    for kernel, grid in ((sparse_kernel, (num_tokens, head_tiles)), (again_kernel, (programs, 1))):
        kernel[grid](
            q,
            window,
            window_rows,
            pool,
            pool_rows,
            sink,
            cos,
            sin,
            out,
            lost,
            scale * LOG2E,
            num_tokens,
            num_heads,
            num_window,
            num_pool,
            window_tiles,
            window_tiles + triton.cdiv(num_pool, tile["BLOCK_K"]),
            0 if cos is None else 2 * cos.shape[1],
            DIM=dim,
            **tile,
        )
    return out


@dataclass(frozen=True, eq=False)
class SparseMetadata:
    """A batch, where its windows lie, and which pages have to be unpacked; None = they are read in place."""

    batch: Batch
    layout: WindowLayout
    packed: OwnPages | None


class SparseAttention:
    """See `AttentionOperator`; for many rows.

    Windows are copied into one buffer and selections turned into rows of the pool, both small beside the rest; a kernel
    then walks them. At the released sizes on Hopper that is a Gluon kernel, elsewhere and where Triton is interpreted
    its twin. Of packed pages all that the batch may read is unpacked before, head_dim numbers for each entry.
    """

    def __init__(self, problem: AttentionProblem, device: torch.device, clock: StageClock) -> None:
        self._problem = problem
        self._no_sink = no_sink(problem.num_heads, device)
        self._clock = clock
        self.fuses = {Stage.KEY_GATHER: Stage.ATTENTION}
        self._attend: Callable[..., Tensor] = sparse_attention
        self.form = FORM
        if suits_gluon(problem):
            from minideepinfer_attention.sparse_gluon import sparse_prefill

            self._attend, self.form = sparse_prefill, "gluon"

    def prepare(self, batch: Batch) -> SparseMetadata:
        """Find out where windows lie, and the pages that the batch may read."""
        problem, packed = self._problem, None
        if problem.compress_ratio and problem.cache_layout == PACKED:
            packed = OwnPages.of(batch, problem.compress_ratio)
            batch = packed.batch
        return SparseMetadata(batch, window_layout(batch, problem.sliding_window), packed)

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
        metadata: SparseMetadata,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        q, window_new, cos, sin = (tensor.contiguous() for tensor in (q, window_new, cos, sin))
        layout = metadata.layout
        with self._clock.stage(Stage.KEY_GATHER):
            buffer = window_buffer(window_new, window_ring, layout)
            pool, rows = buffer, layout.rows[:, :0]
            if global_kv is not None and selection is not None:
                if metadata.packed is not None:
                    global_kv = unpack_pages(global_kv, metadata.packed.pages, q.shape[2], q.dtype)
                pool = global_kv.flatten(0, 1)
                rows = pool_rows(selection, metadata.batch, self._problem.compress_ratio, global_kv.shape[1])
        return self._attend(
            q=q,
            window=buffer,
            window_rows=layout.rows,
            pool=pool,
            pool_rows=rows,
            sink=self._no_sink if sink is None else sink,
            scale=scale,
            out=torch.empty_like(q),
            cos=cos,
            sin=sin,
        )
