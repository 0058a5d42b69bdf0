"""`fused`: attention as matrix tiles, both products on tensor cores (spec 3.8).

Prefill copies windows into one buffer, small beside the rest: window-only layers then share it between neighbouring
tokens (`window`), the others turn their selection into rows of the pool and walk both (`sparse`). Decode has few rows:
it splits their keys among programs, and reads all of them in place (`direct`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from minideepinfer.operators import Batch, BuildContext, Phase, Selection
from minideepinfer.operators.declaration import interpreting
from minideepinfer.operators.problem import AttentionProblem
from torch import Tensor

from minideepinfer_attention.direct import DirectMetadata, direct_attention
from minideepinfer_attention.rows import WindowLayout, pool_rows, window_buffer, window_layout
from minideepinfer_attention.sparse import sparse_attention
from minideepinfer_attention.tiles import FORM, num_programs
from minideepinfer_attention.window import LARGEST_WINDOW, WindowTile, WindowTiles, window_attention

GLUON_SIZES = (64, 512, 64, 128)
"""Heads, head_dim, rope_dim and window of the Gluon kernel."""


@dataclass(frozen=True, eq=False)
class _Prefill:
    batch: Batch
    layout: WindowLayout


class FusedAttention:
    """See `AttentionOperator`."""

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self._attend, self.form = _sparse_kernel(problem)
        self._problem = problem
        self._programs = num_programs(device)
        self._no_sink = torch.full((problem.num_heads,), -torch.inf, device=device)
        self._window_tile = None
        if not problem.compress_ratio and problem.sliding_window <= LARGEST_WINDOW:
            self._window_tile = WindowTile.of(
                problem.num_heads, problem.head_dim, problem.sliding_window, getattr(torch, problem.dtype)
            )

    def prepare(self, batch: Batch) -> _Prefill | WindowTiles | DirectMetadata:
        """Find out where keys lie."""
        problem = self._problem
        if problem.phase is Phase.DECODE:
            return DirectMetadata.of(batch)
        if self._window_tile is not None:
            return WindowTiles.of(batch, self._window_tile, problem.sliding_window)
        return _Prefill(batch, window_layout(batch, problem.sliding_window))

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
        metadata: _Prefill | WindowTiles | DirectMetadata,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        problem = self._problem
        sink = self._no_sink if sink is None else sink
        if isinstance(metadata, DirectMetadata):
            return direct_attention(
                q,
                window_new,
                window_ring,
                global_kv,
                selection,
                sink,
                cos,
                sin,
                scale,
                metadata,
                problem.sliding_window,
                problem.compress_ratio,
                self._programs,
            )
        layout = metadata.layout
        buffer = window_buffer(window_new, window_ring, layout)
        if isinstance(metadata, WindowTiles):
            return window_attention(q, buffer, metadata, sink, scale, cos, sin)
        if global_kv is None or selection is None:
            pool, rows = buffer, layout.rows[:, :0]
        else:
            pool = global_kv.flatten(0, 1)
            rows = pool_rows(selection, metadata.batch, problem.compress_ratio, global_kv.shape[1])
        return self._attend(
            q=q,
            window=buffer,
            window_rows=layout.rows,
            pool=pool,
            pool_rows=rows,
            sink=sink,
            scale=scale,
            out=torch.empty_like(q),
            cos=cos,
            sin=sin,
        )


def _sparse_kernel(problem: AttentionProblem) -> tuple[Callable[..., Tensor], str]:
    """What computes sparse prefill, and its form: the Gluon kernel at the sizes it is made for, else its twin."""
    sizes = problem.num_heads, problem.head_dim, problem.rope_dim, problem.sliding_window
    if interpreting() or problem.dtype != "bfloat16" or sizes != GLUON_SIZES:
        return sparse_attention, FORM
    from minideepinfer_attention.sparse_gluon import sparse_prefill

    return sparse_prefill, "gluon"


def build(context: BuildContext) -> FusedAttention:
    """Build `fused`."""
    return FusedAttention(context.problem, context.device)
