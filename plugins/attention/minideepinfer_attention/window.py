"""Window-only attention: neighbouring tokens share one tile of keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
from minideepinfer.operators import Batch
from torch import Tensor

from minideepinfer_attention.kernels.window import EXTRA, window_attention_kernel
from minideepinfer_attention.rows import WindowLayout
from minideepinfer_attention.tiles import LOG2E

LARGEST_WINDOW = 128
MOST_TOKENS: int = EXTRA.value


def token_tile(num_heads: int, dtype: torch.dtype) -> tuple[int, int]:
    """Tokens and heads in a tile."""
    block_h = min(64, triton.next_power_of_2(num_heads))
    rows = 128 if dtype == torch.bfloat16 else 32
    return max(1, min(MOST_TOKENS, rows // block_h)), block_h


def token_tiles(batch: Batch, tokens: int) -> Tensor:
    """Tiles of at most `tokens` neighbouring rows of one request: int32 `[tiles, 2]`, first row and the row behind."""
    first, stops, start = [], [], 0
    for length in batch.seqlens:
        first.append(torch.arange(start, start + length, tokens, dtype=torch.int32))
        start += length
        stops.append((first[-1] + tokens).clamp(max=start))
    if not first:
        return torch.empty(0, 2, dtype=torch.int32, device=batch.positions.device)
    return torch.stack([torch.cat(first), torch.cat(stops)], 1).to(batch.positions.device)


def window_attention(
    q: Tensor,
    buffer: Tensor,
    layout: WindowLayout,
    tiles: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    cos: Tensor,
    sin: Tensor,
    **launch: Any,
) -> Tensor:
    """Attend to windows of at most `LARGEST_WINDOW` rows.

    Args:
        q: `[T, H, D]`, bfloat16 or float32.
        buffer: `[N, D]` in q's dtype, see `window_buffer`.
        layout: of the batch.
        tiles: see `token_tiles`.
        window: rows of a window.
        sink: float32 `[H]`; -inf = none.
        scale: factor on the logits.
        cos: float32 `[T, C]`.
        sin: float32 `[T, C]`.
        launch: other constants of the kernel, for tuning.

    Returns:
        `[T, H, D]`, rotated back; a token without keys is zero.
    """
    num_heads, dim = q.shape[1:]
    out = torch.empty_like(q)
    tokens, block_h = token_tile(num_heads, q.dtype)
    warps = 8 if tokens * block_h == 128 else 4
    if len(tiles):
        window_attention_kernel[len(tiles), triton.cdiv(num_heads, block_h)](
            q,
            buffer,
            tiles,
            layout.first,
            layout.hidden,
            sink,
            cos,
            sin,
            out,
            scale * LOG2E,
            num_heads,
            window,
            2 * cos.shape[1],
            DIM=dim,
            TOKENS=tokens,
            BLOCK_H=block_h,
            BLOCK_K=max(16, triton.next_power_of_2(window)),
            **({"CHUNK": min(64, max(16, triton.next_power_of_2(dim))), "num_warps": warps, "num_stages": 3} | launch),
        )
    return out
