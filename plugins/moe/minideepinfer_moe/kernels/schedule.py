"""Sorting of routed rows by expert, in one launch (up to 1024 slots) or two, without a word to the host.

A slot is one entry of `topk_ids [T, k]`, numbered t * k + j. Program b owns BLOCK consecutive slots. `count_slots`
leaves each block's histogram, in registers until one store; `sort_slots` reads all histograms (L2), so that every
program knows where each expert's rows start and how many of them earlier blocks hold, and places its slots by a running
count over sub-blocks of SUB slots x EXPERTS (one-hot, prefix sum along slots). Slot order is kept within an expert: the
result is a function of the ids alone. Programs past the slots write the tile list.
"""

import triton
import triton.language as tl


@triton.jit
def _one_hot(ids_ptr, slots, num_slots, expert_start, num_experts, EXPERTS: tl.constexpr):
    """int32 `[SUB, EXPERTS]`, 1 where a slot chose a local expert; a row of zeros for other slots."""
    local = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    local = tl.where(local >= 0, local - expert_start, -1)
    local = tl.where(local < num_experts, local, -1)
    return (local[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "expert_start", "num_experts"])
def count_slots(
    ids_ptr, counts_ptr, num_slots, expert_start, num_experts,
    BLOCK: tl.constexpr, SUB: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """How many slots of each block chose each local expert, int32 `[blocks, EXPERTS]`."""
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, BLOCK, SUB):
        slots = tl.program_id(0) * BLOCK + first + tl.arange(0, SUB)
        counts += tl.sum(_one_hot(ids_ptr, slots, num_slots, expert_start, num_experts, EXPERTS), axis=0)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(
    do_not_specialize=["num_slots", "topk", "expert_start", "num_experts", "num_blocks", "max_tiles", "tile_rows"]
)
def sort_slots(
    ids_ptr, weights_ptr, counts_ptr, sorted_tokens_ptr, row_weights_ptr, slot_rows_ptr, offsets_ptr, tiles_ptr,
    num_slots, topk, expert_start, num_experts, num_blocks, max_tiles, tile_rows,
    ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Place the slots of one block, or write TILES entries of the tile list; see `minideepinfer_moe.schedule`."""
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals = tl.zeros((EXPERTS,), tl.int32)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    if ONE_BLOCK:
        for first in range(0, num_slots, SUB):
            slots = first + tl.arange(0, SUB)
            totals += tl.sum(_one_hot(ids_ptr, slots, num_slots, expert_start, num_experts, EXPERTS), axis=0)
    else:
        for first in range(0, num_blocks, SUB):
            blocks = first + tl.arange(0, SUB)
            places = counts_ptr + blocks[:, None] * EXPERTS + experts[None, :]
            counts = tl.load(places, mask=(blocks < num_blocks)[:, None], other=0)
            totals += tl.sum(counts, axis=0)
            earlier += tl.sum(tl.where((blocks < block)[:, None], counts, 0), axis=0)
    offsets = tl.cumsum(totals, axis=0) - totals
    if block < num_blocks:
        if block == 0:
            tl.store(offsets_ptr + experts, offsets, mask=experts <= num_experts)
        next_rows = offsets + earlier
        for first in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, num_slots), SUB):
            slots = first + tl.arange(0, SUB)
            chosen = _one_hot(ids_ptr, slots, num_slots, expert_start, num_experts, EXPERTS)
            local = tl.sum(chosen, axis=1) > 0
            rows = tl.sum(chosen * (tl.cumsum(chosen, axis=0) - 1 + next_rows[None, :]), axis=1)
            next_rows += tl.sum(chosen, axis=0)
            tl.store(slot_rows_ptr + slots, tl.where(local, rows, -1), mask=slots < num_slots)
            tl.store(sorted_tokens_ptr + rows, slots // topk, mask=local)
            tl.store(row_weights_ptr + rows, tl.load(weights_ptr + slots, mask=local), mask=local)
    else:
        tiles = (block - num_blocks) * TILES + tl.arange(0, TILES)
        heights = (totals + tile_rows - 1) // tile_rows
        ends = tl.cumsum(heights, axis=0)
        owner = tl.sum((ends[None, :] <= tiles[:, None]).to(tl.int32), axis=1)
        owned = (owner[:, None] == experts[None, :]).to(tl.int32)
        first_row = (tiles - tl.sum(owned * (ends - heights)[None, :], axis=1)) * tile_rows
        rows = tl.minimum(tl.sum(owned * totals[None, :], axis=1) - first_row, tile_rows)
        used = tiles < tl.sum(heights, axis=0)
        place, inside = tiles_ptr + tiles * 3, tiles < max_tiles
        tl.store(place, tl.where(used, owner, 0), mask=inside)
        tl.store(place + 1, tl.where(used, first_row + tl.sum(owned * offsets[None, :], axis=1), 0), mask=inside)
        tl.store(place + 2, tl.where(used, rows, 0), mask=inside)
