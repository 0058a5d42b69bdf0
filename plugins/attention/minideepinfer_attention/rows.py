"""Where keys lie: windows copied into one buffer in logical order, and selected entries as rows of the pool.

The buffer holds, request after request, the last `window - 1` entries of its ring and then its new entries, so that
the window of any token is `window` consecutive rows. What no token reads is zero there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import Batch, Selection
from minideepinfer.transfer import upload
from torch import Tensor

from minideepinfer_attention.kernels.rows import pool_rows_kernel, window_buffer_kernel


@dataclass(frozen=True, eq=False)
class WindowLayout:
    """Where the windows of a batch lie in the buffer, N rows; the same for all layers.

    Attributes:
        new_rows: int32 `[N]`, the row of this step's entries that comes here; -1 = none.
        ring_rows: int32 `[N]`, the ring that an older entry comes from; -1 = none.
        positions: int64 `[N]`, the entry's position.
        first: int32 `[T]`, first row of a token's window.
        hidden: int32 `[T]`, how many of its first rows the token does not see; all of them in padding.
        rows: int32 `[T, window]`, the rows of each token's window, -1 where it sees none.
    """

    new_rows: Tensor
    ring_rows: Tensor
    positions: Tensor
    first: Tensor
    hidden: Tensor
    rows: Tensor


def window_layout(batch: Batch, window: int, gap: int = 0) -> WindowLayout:
    """Lay out the windows of a batch.

    Args:
        batch: the rows.
        window: entries of a window.
        gap: rows of zeros behind each request's entries.
    """
    device, num_tokens, num_requests = batch.positions.device, batch.num_tokens, batch.num_requests
    context = upload(torch.tensor(batch.context_lens, dtype=torch.int64), device)
    starts, oldest = batch.cu_seqlens.long(), batch.window_start.clamp(min=0)
    tail, extra = window - 1, window - 1 + gap
    size = num_tokens + num_requests * extra
    request = torch.repeat_interleave(starts.diff() + extra, output_size=size)
    offset = torch.arange(size, device=device) - starts[request] - request * extra - tail  # from its first new entry
    position = offset + context[request]
    # The position of the entry's own row, or for older ones that of the request's first row, which sees them all.
    reader = (starts[request] + offset.clamp(min=0)).clamp(max=max(num_tokens - 1, 0))
    reads = batch.positions[reader] if num_tokens else torch.full_like(position, -1)
    inside = (offset < starts.diff()[request]) & (starts.diff()[request] > 0)
    real = inside & (position >= oldest[request]) & (reads >= oldest[request])
    first = torch.arange(num_tokens, device=device) + batch.request_ids * extra
    hidden = (oldest[batch.request_ids] - batch.positions + tail).clamp(0, window)
    hidden = hidden.where(batch.positions >= 0, window)
    slots = torch.arange(window, device=device)
    rows = torch.where(slots >= hidden[:, None], first[:, None] + slots, -1)
    return WindowLayout(
        new_rows=reader.where(real & (offset >= 0), -1).int(),
        ring_rows=batch.ring_table[request].where(real & (offset < 0), -1).int(),
        positions=position,
        first=first.int(),
        hidden=hidden.int(),
        rows=rows.int(),
    )


def window_buffer(new: Tensor, ring: Tensor, layout: WindowLayout) -> Tensor:
    """The buffer of a layer: `[N, D]` in the dtype of the new entries.

    Args:
        new: `[T, D]`, this step's entries; D a multiple of 8.
        ring: `[num_rings, ring_size, row]`, as before the step; bytes are cache layout `released`.
        layout: of the batch.
    """
    size, dim = layout.positions.shape[0], new.shape[1]
    buffer = new.new_empty(size, dim)
    if size:
        block = 256
        window_buffer_kernel[(triton.cdiv(size * dim // 8, block),)](
            buffer,
            new,
            ring,
            layout.new_rows,
            layout.ring_rows,
            layout.positions,
            size,
            ring.shape[1],
            PACKED=ring.dtype == torch.uint8,
            DIM=dim,
            BLOCK=block,
        )
    return buffer


def pool_rows(selection: Selection, batch: Batch, ratio: int, per_page: int) -> Tensor:
    """Rows of the pool that a selection names.

    Args:
        selection: entries of each token's own request.
        batch: whose tokens they are.
        ratio: tokens per entry.
        per_page: entries per page.

    Returns:
        int32 `[T, K]`; -1 = no entry.
    """
    num_tokens, topk = selection.indices.shape
    rows = torch.empty(num_tokens, topk, dtype=torch.int32, device=selection.indices.device)
    if rows.numel():
        block_k = min(512, max(16, triton.next_power_of_2(topk)))
        block_t = 2048 // block_k
        pool_rows_kernel[triton.cdiv(num_tokens, block_t), triton.cdiv(topk, block_k)](
            rows,
            selection.indices.contiguous(),
            selection.lens,
            batch.positions,
            batch.request_ids,
            batch.block_table.contiguous(),
            num_tokens,
            ratio,
            batch.block_table.shape[1],
            per_page,
            topk,
            BLOCK_T=block_t,
            BLOCK_K=block_k,
        )
    return rows
