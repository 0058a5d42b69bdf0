"""Attention of each token to its own list of physical rows: some of a window buffer, then some of a pool."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minideepinfer_attention.kernels.sparse import again_kernel, sparse_kernel
from minideepinfer_attention.tiles import LOG2E, head_tile, num_programs


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    pool: Tensor,
    pool_rows: Tensor,
    sink: Tensor | None,
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
        sink: float32 `[H]` logits, in the denominator only; None = none.
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
    if sink is None:
        sink = q.new_full((num_heads,), -torch.inf, dtype=torch.float32)
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
