"""Exact top-k of each row, the lower index first among equals, from scores and their block maxima.

The k best entries lie in the k best blocks (by maximum, the lower block first among equals): were a chosen entry in
another block, the best entries of those k blocks would all precede it. So a row's program chooses k blocks, then k
entries among those blocks' entries, and reads nothing else of the row. Numbers to choose among are in registers; a
threshold is found by bisection of their order; the row of the result holds each level's choice in turn.
Floor at 4096 rows x 65536 scores: 0.05 ms (maxima and chosen blocks), one read of all scores would be 0.26 ms.
Measured on one H200: 512 entries 0.35 ms, 2048 blocks 0.27 ms (torch.topk 3.11 ms). By its counters the integer
pipe is busy 84 % of the time (the comparisons of the bisection); barriers are 6 % of the stalls.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
FIRST = tl.constexpr(-(2**31) + 1)
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["first_row", "topk", "unit_shift", "candidate_width", "candidate_shift"])
def topk_kernel(
    leaves,
    blocks,
    tops,
    lengths,
    candidates,
    indices,
    first_row,
    topk,
    unit_shift,
    row_leaves,
    candidate_width,
    candidate_shift,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    FAN: tl.constexpr,
    TOP_FAN: tl.constexpr,
    LEVELS: tl.constexpr,
    PINNED: tl.constexpr,
    POOLED: tl.constexpr,
):
    """One row.

    Args:
        leaves: float32 `[rows, row_leaves]`, what is chosen from.
        blocks: float32 `[rows, row_leaves / FAN]`, maxima of FAN leaves (LEVELS > 1).
        tops: float32 `[rows, row_leaves / FAN / TOP_FAN]`, maxima of TOP_FAN blocks (LEVELS > 2).
        lengths: int32 `[T]`; a leaf stands for 2^unit_shift of what they count.
        candidates: int32 `[rows, candidate_width]`, ascending blocks of 2^candidate_shift entries (POOLED).
        indices: int32 `[T, topk]`, chosen leaves (POOLED: the entries they stand for), ascending, -1 behind them;
            until then each level's choice in turn.
    """
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    length = tl.load(lengths + row)
    number = (length + (1 << unit_shift) - 1) >> unit_shift
    leaves += local * row_leaves
    blocks += local * (row_leaves // FAN)
    tops += local * (row_leaves // (FAN * TOP_FAN))
    chosen = indices + row * topk
    low, high = FIRST, FIRST
    place = tl.arange(0, LEAVES)
    if LEVELS == 3:
        count = tl.cdiv(number, FAN * TOP_FAN)
        low, high = _choose(tops, place, count, chosen, topk, low, high, SLOTS, PINNED)
        place = _children(chosen, topk, SLOTS, TOP_FAN)
    if LEVELS >= 2:
        low, high = _choose(blocks, place, tl.cdiv(number, FAN), chosen, topk, low, high, SLOTS, PINNED)
        place = _children(chosen, topk, SLOTS, FAN)
    _choose(leaves, place, number, chosen, topk, low, high, SLOTS, PINNED)
    if POOLED:
        tl.debug_barrier()
        slot = tl.arange(0, SLOTS)
        place = tl.load(chosen + slot, mask=slot < topk, other=-1)
        block = tl.load(candidates + local * candidate_width + (place >> candidate_shift), mask=place >= 0, other=0)
        entry = (block << candidate_shift) + (place & ((1 << candidate_shift) - 1))
        tl.store(chosen + slot, entry, mask=place >= 0)


@triton.jit
def _children(chosen, topk, SLOTS: tl.constexpr, FAN: tl.constexpr):
    """Places below the chosen ones, ascending; negative where there is none."""
    tl.debug_barrier()
    child = tl.arange(0, SLOTS * FAN)
    parent = tl.load(chosen + child // FAN, mask=child // FAN < topk, other=-1)
    tl.debug_barrier()
    return parent * FAN + child % FAN


@triton.jit
def _choose(scores, place, number, chosen, topk, low, high, SLOTS: tl.constexpr, PINNED: tl.constexpr):
    """Write the `topk` best of the places below `number` (PINNED: the last of them always), ascending, then -1.

    What is known before, and is returned for the level below: at least `topk` reach `low`, or it is FIRST; no score
    exceeds `high`.
    """
    there = (place >= 0) & (place < number)
    order = _order(tl.load(scores + place, mask=there, other=float("-inf")))
    if PINNED:
        order = tl.where(place == number - 1, HIGHEST, order)
    if low == FIRST:
        several = tl.sum((order > LOWEST).to(tl.int32)) > topk
        low = tl.where(several, tl.min(tl.where(order > LOWEST, order, HIGHEST)), FIRST)
        high = tl.where(several, tl.max(order), FIRST)
    threshold = _threshold(order, topk, low, high)
    taken = order >= threshold
    reached = tl.sum(taken.to(tl.int32))
    if reached > topk:
        tied = (order == threshold).to(tl.int32)
        taken = taken & ((order > threshold) | (tl.cumsum(tied) <= topk - reached + tl.sum(tied)))
    tl.store(chosen + tl.cumsum(taken.to(tl.int32)) - 1, place, mask=taken)
    if reached < topk:
        slot = tl.arange(0, SLOTS)
        tl.store(chosen + slot, -1, mask=(slot >= reached) & (slot < topk))
        threshold = FIRST
    return threshold, high


@triton.jit
def _order(scores):
    """int32 in the order of float32 scores, -0 equal to 0; LOWEST for what is never chosen, -inf and NaN."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores > float("-inf"), tl.where(bits < 0, bits ^ HIGHEST, bits), LOWEST)


@triton.jit
def _threshold(order, topk, low, high):
    """The highest value that at least `topk` reach, or a lower one that exactly `topk` reach; `low` if it is `high`."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        reached = tl.sum((order >= middle).to(tl.int32))
        high = tl.where(reached == topk, middle, tl.where(reached > topk, high, middle - 1))
        low = tl.where(reached >= topk, middle, low)
    return low


@triton.jit(do_not_specialize=["first_row", "width", "shift"])
def pool_kernel(
    candidates,
    visible,
    flags,
    pool,
    lengths,
    first_row,
    width,
    shift,
    row_flags,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """A row's candidate blocks without repetition, ascending, and the number of entries in them that it sees.

    Args:
        candidates: int32 `[T, width]`, any order, any number twice; a block with no visible entry counts as -1.
        visible: int32 `[T]`, entries that each row sees.
        flags: int8 `[rows, row_flags]`, scratch; row_flags is a multiple of TILE.
        pool: int32 `[rows, width]`, ascending blocks of 2^shift entries, -1 behind them.
        lengths: int32 `[T]`.
    """
    local = tl.program_id(0).to(tl.int64)
    row = first_row + local
    seen = tl.load(visible + row)
    number = (seen + (1 << shift) - 1) >> shift
    flags += local * row_flags
    pool += local * width
    place = tl.arange(0, TILE)
    for start in range(0, number, TILE):
        tl.store(flags + start + place, tl.zeros((TILE,), tl.int8))
    tl.debug_barrier()
    slot = tl.arange(0, WIDTH)
    block = tl.load(candidates + row * width + slot, mask=slot < width, other=-1)
    tl.store(flags + block, tl.full((WIDTH,), 1, tl.int8), mask=(block >= 0) & (block < number))
    tl.debug_barrier()
    count = 0
    length = 0
    for start in range(0, number, TILE):
        named = (tl.load(flags + start + place).to(tl.int32) == 1) & (start + place < number)
        one = named.to(tl.int32)
        tl.store(pool + count + tl.cumsum(one) - 1, start + place, mask=named)
        count += tl.sum(one)
        length += tl.sum(tl.where(named, tl.minimum(seen - ((start + place) << shift), 1 << shift), 0))
    tl.store(pool + slot, -1, mask=(slot >= count) & (slot < width))
    tl.store(lengths + row, length)
