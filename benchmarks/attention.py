"""What `attention: fused` is made of, on one GPU.

    python benchmarks/attention.py [--output FILE]

Prefill at the released sizes, with selected entries and with the window alone: the operator, its kernel's twin in plain
Triton, and what it copies and translates before. And what bounds it: a kernel that only adds up the keys that are
gathered, and a copy of the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from minideepinfer_attention import fused
from minideepinfer_attention.rows import pool_rows, window_buffer, window_layout
from minideepinfer_attention.sparse import sparse_attention
from minideepinfer_attention.window import WindowTile, WindowTiles, window_attention
from parts import Parts, built, case_of, run
from torch import Tensor


@triton.jit
def _gather_kernel(pool, rows, out, count, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the keys that one token names."""
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for start in range(0, count, BLOCK):
        row = tl.load(rows + token * count + start + tl.arange(0, BLOCK)).to(tl.int64)
        total += tl.load(pool + row[:, None] * DIM + channel[None, :]).to(tl.float32)
    tl.store(out + token * DIM + channel, tl.sum(total, 0))


def gather_sum(pool: Tensor, rows: Tensor) -> Tensor:
    """What reading the rows takes at least: their sums, float32 `[T, D]`."""
    out = torch.empty(len(rows), pool.shape[1], device=pool.device)
    _gather_kernel[(len(rows),)](pool, rows, out, rows.shape[1], DIM=pool.shape[1], BLOCK=16, num_warps=4)
    return out


def whole(case: Any) -> Any:
    """The operator's call."""
    operator = built(fused, case.problem)
    metadata = operator.prepare(case.batch)
    inputs = case.q, case.window_new, case.window_ring, case.global_kv, case.selection, case.sink, case.cos, case.sin
    return lambda: operator.run(*inputs, case.scale, metadata)


def parts() -> Iterator[Parts]:
    """Selected entries, and the window alone."""
    recipe, case = case_of("attention", "v41-rank", "ratio 2")
    layout, out = window_layout(case.batch, recipe.sliding_window), torch.empty_like(case.q)
    pool, per_page = case.global_kv.flatten(0, 1), case.global_kv.shape[1]
    buffer = window_buffer(case.window_new, case.window_ring, layout)
    rows = pool_rows(case.selection, case.batch, 2, per_page)
    every = torch.cat([layout.rows.clamp(min=0), rows], 1)
    calls = {
        "fused": whole(case),
        "plain Triton kernel": lambda: sparse_attention(
            case.q, buffer, layout.rows, pool, rows, case.sink, case.scale, out, case.cos, case.sin
        ),
        "window buffer": lambda: window_buffer(case.window_new, case.window_ring, layout),
        "rows of the pool": lambda: pool_rows(case.selection, case.batch, 2, per_page),
        "gather and add": lambda: gather_sum(pool, every),
    }
    yield Parts("ratio 2", recipe, calls)

    recipe, case = case_of("attention", "v41-rank", "window only")
    tile = WindowTile.of(recipe.num_heads, recipe.head_dim, recipe.sliding_window, case.q.dtype)
    tiles = WindowTiles.of(case.batch, tile, recipe.sliding_window)
    buffer = window_buffer(case.window_new, case.window_ring, tiles.layout)
    calls = {
        "fused": whole(case),
        "plain Triton kernel": lambda: window_attention(
            case.q, buffer, tiles, case.sink, case.scale, case.cos, case.sin
        ),
        "window buffer": lambda: window_buffer(case.window_new, case.window_ring, tiles.layout),
        "copy of the queries": lambda: out.copy_(case.q),
    }
    yield Parts("window only", recipe, calls)


if __name__ == "__main__":
    run("attention", __doc__, parts)
