"""Pages in cache layout `released`, unpacked into a plain pool of a batch's own, for kernels that read plain entries.

That pays where rows read entries many times, as in the prefill of long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from minideepinfer.operators import Batch
from minideepinfer.transfer import upload
from torch import Tensor

from minideepinfer_attention.kernels.packed import unpack_pages_kernel

_ROWS = 16
"""Entries that a program unpacks."""


@dataclass(frozen=True, eq=False)
class OwnPages:
    """The pages that a batch may read, request after request.

    Attributes:
        batch: the batch; its block table numbers the unpacked pages.
        pages: int32 `[N]`, where they lie in the pool.
    """

    batch: Batch
    pages: Tensor

    @classmethod
    def of(cls, batch: Batch, ratio: int) -> OwnPages:
        """Number the pages of a batch; a request of padding owns none, and reads none of those counted for it."""
        counts = [-(-entries * ratio // batch.page_tokens) for entries in batch.last_visible_entries(ratio)]
        width = max(counts, default=0)
        table, start = torch.zeros(len(counts), max(width, 1), dtype=torch.int32), 0
        for request, count in enumerate(counts):
            table[request, :count] = torch.arange(start, start + count)
            start += count
        owned = torch.arange(table.shape[1]) < torch.tensor(counts, dtype=torch.int64).unsqueeze(1)
        owners, places = upload(owned.nonzero(), batch.positions.device).unbind(1)
        is_real = batch.positions[batch.cu_seqlens[owners].long()] >= 0
        pages = batch.block_table[owners, places].where(is_real, 0)
        return cls(replace(batch, block_table=upload(table, batch.positions.device)), pages)


def unpack_pages(pool: Tensor, pages: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Pages as plain numbers.

    Args:
        pool: uint8 `[num_pages, per_page, row]`.
        pages: int32 `[N]`.
        dim: channels of an entry.
        dtype: of the result.

    Returns:
        `[N, per_page, dim]`.
    """
    per_page = pool.shape[1]
    out = torch.empty(len(pages), per_page, dim, dtype=dtype, device=pool.device)
    if out.numel():
        block_d = triton.next_power_of_2(dim)
        unpack_pages_kernel[len(pages), triton.cdiv(per_page, _ROWS)](
            out, pool, pages, per_page, DIM=dim, ROWS=_ROWS, BLOCK_D=block_d
        )
    return out
