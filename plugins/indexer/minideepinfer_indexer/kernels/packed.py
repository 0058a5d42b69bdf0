"""Index keys of cache layout `released` as numbers, in registers, and unpacked into pages of a call's own.

A row is E2M1 codes, the even channel in the low nibble, and then one E8M0 scale for each group of 32 channels. Every
number is exact in bfloat16.

Tiling of `unpack_kernel`: a program unpacks ROWS consecutive entries of a request; each byte is read once, each number
written once. The floor is these bytes; on one H200 131,072 keys take less than 0.07 ms.
"""

import triton
import triton.language as tl


@triton.jit
def index_values(pool, row, valid, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Keys `[N, DIM]` of DTYPE, zero where not valid and behind HEAD_DIM.

    Args:
        pool: bytes, contiguous.
        row: which keys, int64 `[N]`, counted over all pages.
        valid: bool `[N]`.
        DTYPE: float32 or bfloat16.
        HEAD_DIM: channels of a key; each has kernels of its own, or loads would be of single bytes.
        DIM: the same, filled up.
    """
    size: tl.constexpr = row.shape[0]
    start = pool + row * (HEAD_DIM // 2 + HEAD_DIM // 32)
    byte, group = tl.arange(0, DIM // 2)[None, :], tl.arange(0, DIM // 32)[None, :]
    pairs = tl.load(start[:, None] + byte, mask=valid[:, None] & (byte < HEAD_DIM // 2), other=0).to(tl.int32)
    mask = valid[:, None] & (group < HEAD_DIM // 32)
    exponents = tl.load(start[:, None] + HEAD_DIM // 2 + group, mask=mask, other=0).to(tl.int32)
    exponents = tl.where(exponents == 255, 0x7FC00000, exponents << 23)  # 0 is no scale of QDQ-MXFP4
    scales = exponents.to(tl.float32, bitcast=True)
    codes = tl.join(pairs << 28, pairs << 24).reshape(size, DIM // 32, 32)
    bits = (codes & -0x80000000) | ((codes & 0x70000000) >> 6)
    values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: E2M1's bits among those of float32
    return (values * scales[:, :, None]).to(DTYPE).reshape(size, DIM)


@triton.jit(do_not_specialize=["table_width", "page_shift"])
def unpack_kernel(
    pool,
    block_table,
    pages,
    counts,
    target,
    table_width,
    page_shift,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """A program unpacks up to ROWS consecutive entries of one request to a page of their own.

    Args:
        pool: bytes `[num_pages, 2^page_shift, row]`.
        block_table: int32 `[R, table_width]`.
        pages: int32 `[programs, 2]`: request, page within it.
        counts: int32 `[R]`, entries of each request; those behind them become 0.
        target: `[programs, ROWS, HEAD_DIM]`.
    """
    page = tl.program_id(0)
    request = tl.load(pages + page * 2)
    place, channel = tl.arange(0, ROWS), tl.arange(0, DIM)
    entry = tl.load(pages + page * 2 + 1) * ROWS + place
    there = entry < tl.load(counts + request)
    source = tl.load(block_table + request.to(tl.int64) * table_width + (entry >> page_shift), mask=there, other=0)
    source = (source.to(tl.int64) << page_shift) + (entry & ((1 << page_shift) - 1))
    values = index_values(pool, source, there, target.dtype.element_ty, HEAD_DIM, DIM)
    row = page.to(tl.int64) * ROWS + place
    tl.store(target + row[:, None] * HEAD_DIM + channel[None, :], values, mask=(channel < HEAD_DIM)[None, :])
