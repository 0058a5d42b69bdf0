"""Rows of a table whose shards lie in the memory of several GPUs, read by address.

A program has BN rows. It reads their numbers and each owner's address, then the rows, a word of 8 bytes a thread where
widths allow, and writes them; nothing is shared. The floor is what the links carry: 98,304 rows of 256 B all from one
peer take 0.102 ms between two H200 (246 GB/s), 0.077 ms from the GPU's own memory (a prototype of 2026-11-30).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "rows_per_rank"])
def peer_rows(
    addresses,  # int64 [ranks], of the ranks' shards
    row_ids,  # int64 [N]
    rows,  # [N, W] out, words
    num_rows,
    rows_per_rank,
    W: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.load(row_ids + n, mask=n < num_rows, other=0)
    owner = row // rows_per_rank
    shard = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
    word = tl.arange(0, BW)[None, :]
    exists = (n < num_rows)[:, None] & (word < W)
    source = shard[:, None] + (row - owner * rows_per_rank)[:, None] * W + word
    tl.store(rows + n.to(tl.int64)[:, None] * W + word, tl.load(source, mask=exists), mask=exists)
