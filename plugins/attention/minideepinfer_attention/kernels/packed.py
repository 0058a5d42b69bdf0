"""Entries of cache layout `released` as numbers, in registers, and pages of them unpacked into a plain pool.

A row is the codes of all channels and then a byte of scale for each group: E4M3 codes and E8M0 scales of 32 channels in
rings, E2M1 codes (even channel in the low nibble) and E4M3 scales of 16 channels in pools. Every number is exact in
bfloat16.

Tiling of `unpack_pages_kernel`: a program turns ROWS entries of one page into plain ones; each byte is read once, each
number written once. The floor is these bytes. On one H200 131,072 entries of 512 channels take about 0.05 ms.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_values(ptr, row, channel, mask, DTYPE: tl.constexpr, DIM: tl.constexpr):
    """Entries of rings: `[N, C]` of DTYPE, zero where masked.

    Args:
        ptr: uint8, of all rings.
        row: int64 `[N]`.
        channel: `[C]`, or `[N, C]`.
        mask: bool `[N, C]`.
        DTYPE: float32 or bfloat16.
        DIM: channels of an entry.
    """
    start = ptr + row[:, None] * (DIM + DIM // 32)
    codes = tl.load(start + channel, mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
    exponents = tl.load(start + DIM + channel // 32, mask=mask, other=0)  # never 0 or 255: QDQ-FP8 has 2^-22 at least
    scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (codes.to(tl.float32) * scales).to(DTYPE)


@triton.jit
def main_values(ptr, row, valid, DTYPE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Entries of a pool: `[N, BLOCK_D]` of DTYPE, zero where not valid and behind DIM.

    Args:
        ptr: uint8, of all pages.
        row: int64 `[N]`.
        valid: bool `[N]`.
        DTYPE: float32 or bfloat16.
        DIM: channels of an entry.
    """
    size: tl.constexpr = row.shape[0]
    start = ptr + row[:, None] * (DIM // 2 + DIM // 16)
    byte, group = tl.arange(0, BLOCK_D // 2)[None, :], tl.arange(0, BLOCK_D // 16)[None, :]
    pairs = tl.load(start + byte, mask=valid[:, None] & (byte < DIM // 2), other=0).to(tl.int32)
    scales = tl.load(start + DIM // 2 + group, mask=valid[:, None] & (group < DIM // 16), other=0)
    scales = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    codes = tl.join(pairs << 28, pairs << 24).reshape(size, BLOCK_D // 16, 16)
    bits = (codes & -0x80000000) | ((codes & 0x70000000) >> 6)
    values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: E2M1's bits among those of float32
    return (values * scales[:, :, None]).to(DTYPE).reshape(size, BLOCK_D)


@triton.jit(do_not_specialize=["per_page"])
def unpack_pages_kernel(
    out_ptr, pool_ptr, pages, per_page, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Unpack `ROWS` entries of one page: `pages` int32 `[N]` -> out `[N, per_page, DIM]`."""
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = place < per_page
    row = tl.load(pages + tl.program_id(0)).to(tl.int64) * per_page + place
    values = main_values(pool_ptr, row, there, out_ptr.dtype.element_ty, DIM, BLOCK_D)
    target, channel = tl.program_id(0).to(tl.int64) * per_page + place, tl.arange(0, BLOCK_D)
    mask = there[:, None] & (channel < DIM)[None, :]
    tl.store(out_ptr + target[:, None] * DIM + channel[None, :], values, mask=mask)
