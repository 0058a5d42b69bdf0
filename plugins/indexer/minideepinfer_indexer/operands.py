"""What the scoring kernels read: the caller's tensors, or copies: in e4m3, or of packed keys as plain ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from minideepinfer.operators import Batch
from torch import Tensor

from minideepinfer_indexer.kernels.e4m3 import key_kernel, query_kernel
from minideepinfer_indexer.kernels.packed import unpack_kernel
from minideepinfer_indexer.tiling import Metadata, Tiling, upload

PAGE = 64
"""Entries of a page of converted keys."""


@dataclass(frozen=True, eq=False)
class Operands:
    """Axes as in `IndexerOperator.run`.

    Attributes:
        q: `[T, h, d]`.
        head_weights: `[T, h]`.
        keys: `[num_pages, entries_per_page, d]`, or in cache layout `released` uint8 `[.., row]`.
        block_table: int32 `[R, max_pages]`, of `keys`.
        key_scales: float32 `[num_pages, entries_per_page]`, or None where keys are what they are.
    """

    q: Tensor
    head_weights: Tensor
    keys: Tensor
    block_table: Tensor
    key_scales: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether keys are bytes."""
        return self.keys.dtype == torch.uint8


@dataclass(frozen=True, eq=False)
class PageList:
    """Pages of converted keys, those of one request behind those of the request before it.

    Attributes:
        pages: int32 `[num_pages, 2]`: request, page within it.
        counts: int32 `[R]`, entries of each request; none of one that is padding, which owns no page.
        block_table: int32 `[R, max_pages]`.
    """

    pages: Tensor
    counts: Tensor
    block_table: Tensor

    @classmethod
    def of(cls, counts: tuple[int, ...], batch: Batch) -> PageList:
        """The pages that hold the entries of all requests.

        Args:
            counts: entries of each request.
            batch: the requests, with a row at least.
        """
        device = batch.positions.device
        num_pages = [-(-count // PAGE) for count in counts]
        starts = list(accumulate(num_pages, initial=0))[:-1]
        width = max(num_pages)
        first = batch.cu_seqlens[:-1].long().clamp(max=batch.num_tokens - 1)
        return cls(
            upload([(r, page) for r, number in enumerate(num_pages) for page in range(number)], device),
            upload([counts], device)[0].where(batch.positions[first] >= 0, 0),
            upload([[start + page for page in range(width)] for start in starts], device),
        )


def unpacked(operands: Operands, pages: PageList, tiling: Tiling) -> Operands:
    """Packed keys as plain ones in q's dtype, those of the call's requests only."""
    q, packed, table = operands.q, operands.keys, operands.block_table
    keys = q.new_empty(len(pages.pages), PAGE, q.shape[2])
    unpack_kernel[(len(pages.pages),)](
        packed,
        table,
        pages.pages,
        pages.counts,
        keys,
        table.shape[1],
        packed.shape[1].bit_length() - 1,
        ROWS=PAGE,
        HEAD_DIM=q.shape[2],
        DIM=tiling.dim,
    )
    return replace(operands, keys=keys, block_table=pages.block_table)


def to_e4m3(
    q: Tensor, head_weights: Tensor, index_keys: Tensor, metadata: Metadata, pages: PageList, tiling: Tiling
) -> Operands:
    """Convert a call's vectors, the keys of its requests only."""
    tokens, heads, dim = q.shape
    padded = max(16, dim)
    e4m3, float32 = torch.float8_e4m3fn, torch.float32
    q8, weights = torch.empty_like(q, dtype=e4m3), torch.empty_like(head_weights, dtype=float32)
    query_kernel[(-(-tokens * heads // PAGE),)](
        q, head_weights, q8, weights, tokens * heads, dim, ROWS=PAGE, DIM=tiling.dim
    )
    keys = q.new_empty(len(pages.pages), PAGE, padded, dtype=e4m3)
    scales = q.new_empty(len(pages.pages), PAGE, dtype=float32)
    key_kernel[(len(pages.pages),)](
        index_keys,
        metadata.block_table,
        pages.pages,
        pages.counts,
        keys,
        scales,
        index_keys.stride(0),
        index_keys.stride(1),
        metadata.block_table.shape[1],
        index_keys.shape[1].bit_length() - 1,
        dim,
        ROWS=PAGE,
        DIM=tiling.dim,
        PADDED=padded,
        PACKED=dim if index_keys.dtype == torch.uint8 else 0,
    )
    return Operands(q8, weights, keys, pages.block_table, scales)
