"""Sorting of routed rows by expert, in one launch (up to 4096 slots) or three, without a word to the host.

A slot is one entry of `topk_ids [T, k]`, numbered t * k + j. Program b places the BLOCK slots that it owns: where an
expert's rows start and how many of them earlier blocks hold follows from histograms (of the ids themselves, or of all
blocks, made by `count_slots` and summed along the blocks by `sum_counts`), and the rest is a count of equal ids before
a slot, by comparing all pairs of the block in registers. Slot order is kept within an expert: the result is a function
of the ids alone. Programs behind the last block write the tile list.

Floor: a launch, and the chain of loads in a program. Measured on one H200 (96 of 384 experts local, top-6): 0.009 ms
for up to 341 tokens, 0.013 for 512, 0.017 for 4096, 0.030 for 16384.
"""

import triton
import triton.language as tl


@triton.jit
def _local_ids(ids_ptr, slots, last, expert_start, num_experts):
    """Local expert of each slot; `num_experts` where it is not local, or from slot `last` on."""
    ids = tl.load(ids_ptr + slots, mask=slots < last, other=-1)
    local = (ids >= 0) & (ids >= expert_start) & (ids < expert_start + num_experts)
    return tl.where(local, ids - expert_start, num_experts)


@triton.jit(do_not_specialize=["num_slots", "expert_start", "num_experts", "num_blocks"])
def count_slots(
    ids_ptr, counts_ptr, num_slots, expert_start, num_experts, num_blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """How many slots of each block chose each local expert, int32 `[EXPERTS, blocks]`."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(_local_ids(ids_ptr, slots, num_slots, expert_start, num_experts), EXPERTS)
    tl.store(counts_ptr + tl.arange(0, EXPERTS) * num_blocks + tl.program_id(0), counts)


@triton.jit(do_not_specialize=["num_blocks"])
def sum_counts(counts_ptr, totals_ptr, num_blocks, BLOCKS: tl.constexpr):
    """Of one expert: counts of the blocks -> counts of all earlier blocks, in place, and their total."""
    total = 0
    counts_ptr += tl.program_id(0) * num_blocks
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        counts = tl.load(counts_ptr + blocks, mask=blocks < num_blocks, other=0)
        tl.store(counts_ptr + blocks, total + tl.cumsum(counts, axis=0) - counts, mask=blocks < num_blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + tl.program_id(0), total)


@triton.jit(
    do_not_specialize=["num_slots", "topk", "expert_start", "num_experts", "num_blocks", "max_tiles", "tile_rows"]
)
def sort_slots(
    ids_ptr, weights_ptr, counts_ptr, totals_ptr, sorted_tokens_ptr, row_weights_ptr, slot_rows_ptr, offsets_ptr,
    tiles_ptr, num_tiles_ptr, num_slots, topk, expert_start, num_experts, num_blocks, max_tiles, tile_rows,
    SMALL: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Place the slots of one block, or write TILES entries of the tile list; see `minideepinfer_moe.schedule`.

    SMALL is 0, or a power of two that the number of slots does not exceed: then there are no counts.
    """
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    if SMALL:
        every = tl.arange(0, SMALL)
        totals = tl.histogram(_local_ids(ids_ptr, every, num_slots, expert_start, num_experts), EXPERTS)
    else:
        totals = tl.load(totals_ptr + experts)
    totals = tl.where(experts < num_experts, totals, 0)
    offsets = tl.cumsum(totals, axis=0) - totals
    if block < num_blocks:
        if SMALL:
            before = tl.minimum(block * BLOCK, num_slots)
            earlier = tl.histogram(_local_ids(ids_ptr, every, before, expert_start, num_experts), EXPERTS)
        else:
            earlier = tl.load(counts_ptr + experts * num_blocks + block)
        if block == 0:
            tl.store(offsets_ptr + experts, offsets, mask=experts <= num_experts)
        slots = block * BLOCK + tl.arange(0, BLOCK)
        ids = _local_ids(ids_ptr, slots, num_slots, expert_start, num_experts)
        same = (ids[:, None] == ids[None, :]) & (slots[None, :] < slots[:, None])
        rows = tl.gather(offsets + earlier, ids, 0) + tl.sum(same.to(tl.int32), axis=1)
        local = ids < num_experts
        tl.store(slot_rows_ptr + slots, tl.where(local, rows, -1), mask=slots < num_slots)
        tl.store(sorted_tokens_ptr + rows, slots // topk, mask=local)
        tl.store(row_weights_ptr + rows, tl.load(weights_ptr + slots, mask=local), mask=local)
    else:
        tiles = (block - num_blocks) * TILES + tl.arange(0, TILES)
        parts = (totals + tile_rows - 1) // tile_rows
        heights = ((totals + parts * 8 - 1) // tl.maximum(parts * 8, 1)) * 8
        ends = tl.cumsum(parts, axis=0)
        if block == num_blocks:
            tl.store(num_tiles_ptr, tl.sum(parts, axis=0))
        owner = tl.sum((ends[None, :] <= tiles[:, None]).to(tl.int32), axis=1)
        used = owner < num_experts
        owner = tl.where(used, owner, 0)
        height = tl.gather(heights, owner, 0)
        first_row = (tiles - tl.gather(ends - parts, owner, 0)) * height
        height = tl.minimum(tl.gather(totals, owner, 0) - first_row, height)
        place, inside = tiles_ptr + tiles * 3, tiles < max_tiles
        tl.store(place, owner, mask=inside)
        tl.store(place + 1, tl.where(used, first_row + tl.gather(offsets, owner, 0), 0), mask=inside)
        tl.store(place + 2, tl.where(used, height, 0), mask=inside)
