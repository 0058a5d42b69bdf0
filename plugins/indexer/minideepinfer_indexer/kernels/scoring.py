"""Scores of paged index keys, and their block maxima.

Tiling: a program takes up to ROWS rows of one request and a range of its entries, ENTRIES at a time: keys
`[ENTRIES, DIM]` are the left operand, `[DIM, ROWS * HEADS]` queries the right one, so that a thread holds several heads
of one entry and most of their sum is inside registers. Queries and STAGES tiles of keys are in shared memory.
This form serves candidate pools, float32 and what the copy engine does not take, and is the interpreted twin of
`scoring_gluon`. Floor of a pool of 16384 entries a row: 17.2 GB through L2 for 4096 rows, nothing shared between rows.
Measured on one H200: 2.6 ms (6.7 TB/s); all 65536 entries instead of a pool 5.5 ms, where the Gluon form takes 3.4.
"""

import triton
import triton.language as tl

from minideepinfer_indexer.kernels.packed import index_values

_ANY = ["first_row", "num_heads", "table_width", "page_shift", "candidate_width", "candidate_shift"]


@triton.jit(do_not_specialize=_ANY)
def score_kernel(
    q,
    head_weights,
    pool,
    block_table,
    tiles,
    lengths,
    candidates,
    key_scales,
    scores,
    maxima,
    tops,
    first_row,
    num_heads,
    head_dim,
    page_stride,
    place_stride,
    table_width,
    page_shift,
    candidate_width,
    candidate_shift,
    width,
    entries_per_program,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    WITH_TOPS: tl.constexpr,
    POOLED: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    OPERAND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One tile of rows against one range of entries.

    Args:
        q: `[T, num_heads, head_dim]`.
        head_weights: `[T, num_heads]`.
        pool: `[num_pages, 2^page_shift, row]`, a row being head_dim numbers, or bytes of
            layout `released` for PACKED channels; 0 = it is not.
        block_table: int32 `[R, table_width]`.
        tiles: int32 `[num_tiles, 3]`: request, first row, rows.
        lengths: int32 `[T]`, entries (POOLED: places of the candidate pool) of each row.
        candidates: int32 `[T - first_row, candidate_width]`, ascending blocks of 2^candidate_shift entries (POOLED).
        key_scales: float32 `[num_pages, 2^page_shift]`, factor of each key (SCALED).
        scores: float32 `[T - first_row, width]`; what lies at or past a row's length is unspecified.
        maxima: float32 `[T - first_row, width / BLOCK]`, -inf entries included in place of those not there.
        tops: float32 `[T - first_row, width / TOP]`, the same for larger blocks (WITH_TOPS).
        OPERAND: dtype of the product's operands; the interpreter's product knows no bfloat16.
    """
    tile = tiles + tl.program_id(0) * 3
    request = tl.load(tile)
    row0 = tl.load(tile + 1)
    num_rows = tl.load(tile + 2)
    slot = tl.arange(0, ROWS)
    length = tl.load(lengths + row0 + slot, mask=slot < num_rows, other=0)
    start = tl.program_id(1) * entries_per_program
    stop = tl.minimum(tl.max(length, 0), start + entries_per_program)

    column = tl.arange(0, ROWS * HEADS)
    channel = tl.arange(0, DIM)
    head = column % HEADS
    there = (column // HEADS < num_rows) & (head < num_heads)
    row = row0 + column // HEADS
    weight = tl.load(head_weights + row * num_heads + head, mask=there, other=0.0).to(tl.float32)
    q_rows = (row.to(tl.int64) * num_heads + head) * head_dim
    q_mask = there[:, None] & (channel < head_dim)[None, :]
    queries = tl.trans(tl.load(q + q_rows[:, None] + channel[None, :], mask=q_mask, other=0.0)).to(OPERAND)

    local = (row0 - first_row + slot).to(tl.int64)
    stored = (slot < num_rows)[:, None]
    for begin in tl.range(start, stop, ENTRIES, num_stages=STAGES):
        place = begin + tl.arange(0, ENTRIES)
        inside = place < stop
        entry = place
        if POOLED:
            block = tl.load(
                candidates + (row0 - first_row).to(tl.int64) * candidate_width + (place >> candidate_shift),
                mask=inside,
                other=0,
            )
            entry = (block << candidate_shift) + (place & ((1 << candidate_shift) - 1))
        page = tl.load(block_table + request.to(tl.int64) * table_width + (entry >> page_shift), mask=inside, other=0)
        its_place = entry & ((1 << page_shift) - 1)
        if PACKED:
            keys = index_values(pool, (page.to(tl.int64) << page_shift) + its_place, inside, OPERAND, PACKED, DIM)
        else:
            key_rows = page.to(tl.int64) * page_stride + its_place * place_stride
            key_mask = inside[:, None] & (channel < head_dim)[None, :]
            keys = tl.load(pool + key_rows[:, None] + channel[None, :], mask=key_mask, other=0.0).to(OPERAND)
        products = tl.dot(keys, queries, input_precision="ieee")
        weighted = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        total = tl.trans(tl.sum(tl.reshape(weighted, (ENTRIES, ROWS, HEADS)), 2))
        if SCALED:
            total *= tl.load(
                key_scales + (page << page_shift) + (entry & ((1 << page_shift) - 1)), mask=inside, other=0
            )[None, :]
        tl.store(scores + local[:, None] * width + place[None, :], total, mask=stored & inside[None, :])
        seen = tl.where(place[None, :] < length[:, None], total, float("-inf"))
        best = tl.max(tl.reshape(seen, (ROWS, ENTRIES // BLOCK, BLOCK)), 2)
        number = begin // BLOCK + tl.arange(0, ENTRIES // BLOCK)
        tl.store(maxima + local[:, None] * (width // BLOCK) + number[None, :], best, mask=stored)
        if WITH_TOPS:
            top = tl.max(tl.reshape(best, (ROWS, ENTRIES // TOP, TOP // BLOCK)), 2)
            number = begin // TOP + tl.arange(0, ENTRIES // TOP)
            tl.store(tops + local[:, None] * (width // TOP) + number[None, :], top, mask=stored)
