"""`score_kernel` of `scoring` in Gluon, for Hopper: the same tiling and arguments.

Keys arrive page by page through the copy engine. A program has one warpgroup; two programs share a multiprocessor, so
that one sums heads while the other's products run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import PropagateNan

KEEP_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def score_kernel(
    q,
    head_weights,
    keys,
    block_table,
    tiles,
    lengths,
    key_scales,
    scores,
    maxima,
    tops,
    first_row,
    num_heads,
    head_dim,
    table_width,
    page_shift,
    width,
    entries_per_program,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK: gl.constexpr,
    TOP: gl.constexpr,
    WITH_TOPS: gl.constexpr,
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One tile of rows against one range of entries; `keys` is a descriptor of `[num_pages * 2^page_shift, head_dim]`
    in boxes `[entries of a page, at most ENTRIES; channels of a slab]`."""
    BOX: gl.constexpr = keys.block_shape[0]
    SLAB: gl.constexpr = keys.block_shape[1]
    SLABS: gl.constexpr = DIM // SLAB
    BOXES: gl.constexpr = ENTRIES // BOX
    dtype: gl.constexpr = keys.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS * HEADS, 256 // dtype.primitive_bitwidth]
    )
    SHARE: gl.constexpr = 4 if ROWS > 4 else 2  # consecutive entries of a thread
    parts: gl.constexpr = gl.BlockedLayout([SHARE, 1, 4], [ENTRIES // SHARE, SHARE // 2, 1], [1, 4, 1], [2, 0, 1])
    total_layout: gl.constexpr = gl.SliceLayout(2, parts)

    tile = tiles + gl.program_id(0) * 3
    request = gl.load(tile)
    row0 = gl.load(tile + 1)
    num_rows = gl.load(tile + 2)
    slot = gl.arange(0, ROWS, layout=gl.SliceLayout(0, total_layout))
    length = gl.load(lengths + row0 + slot, mask=slot < num_rows, other=0)
    start = gl.program_id(1) * entries_per_program
    stop = gl.minimum(gl.max(length, 0), start + entries_per_program)
    if start < stop:
        table = block_table + request.to(gl.int64) * table_width
        key_smem = gl.allocate_shared_memory(dtype, [STAGES * SLABS * BOXES, BOX, SLAB], keys.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
        fence_async_shared()
        for stage in gl.static_range(STAGES):
            begin = start + stage * ENTRIES
            rows = _locate(table, begin, stop, page_shift, BOX, BOXES)
            _fetch(keys, rows, begin < stop, key_smem, full, stage, SLABS)

        q_smem = gl.allocate_shared_memory(dtype, [SLABS, ROWS * HEADS, SLAB], keys.layout)
        _store_queries(q, q_smem, row0, num_rows, num_heads, head_dim, ROWS, HEADS, SLAB, SLABS)
        column = gl.arange(0, ROWS * HEADS, layout=gl.SliceLayout(0, product))
        head = column % HEADS
        there = (column // HEADS < num_rows) & (head < num_heads)
        weight = gl.load(head_weights + (row0 + column // HEADS) * num_heads + head, mask=there, other=0.0)
        weight = weight.to(gl.float32)
        fence_async_shared()
        gl.thread_barrier()

        local = (row0 - first_row + slot).to(gl.int64)
        stored = (slot < num_rows)[None, :]
        stage = 0
        phase = 0
        for begin in range(start, stop, ENTRIES):
            later = begin + STAGES * ENTRIES
            rows = _locate(table, later, stop, page_shift, BOX, BOXES)
            if SCALED:
                page = gl.load(table + begin // ENTRIES)
                scale = gl.load(key_scales + page * ENTRIES + gl.arange(0, ENTRIES, gl.SliceLayout(1, total_layout)))
            mbarrier.wait(full.index(stage), phase)
            products = gl.zeros([ENTRIES, ROWS * HEADS], gl.float32, layout=product)
            for slab in gl.static_range(SLABS):
                left = key_smem.index((stage * SLABS + slab) * BOXES)
                left = left._reinterpret(dtype, [ENTRIES, SLAB], keys.layout)
                products = warpgroup_mma(
                    left, q_smem.index(slab).permute((1, 0)), products, use_acc=slab > 0, is_async=True
                )
            products = warpgroup_mma_wait(0, deps=[products])
            gl.thread_barrier()
            _fetch(keys, rows, later < stop, key_smem, full, stage, SLABS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            weighted = gl.maximum(products, 0.0, propagate_nan=KEEP_NAN) * weight[None, :]
            # A thread holds two of every eight heads: they are summed in registers, the other threads' through memory.
            own = gl.permute(gl.reshape(weighted, [ENTRIES, ROWS, HEADS // 8, 4, 2]), (0, 1, 3, 2, 4))
            part = gl.sum(gl.reshape(own, [ENTRIES, ROWS, 4, HEADS // 4]), 3)
            total = gl.sum(gl.convert_layout(part, parts), 2)
            place = begin + gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, total_layout))
            if SCALED:
                total *= scale[:, None]
            gl.store(scores + (local[None, :] * width + place[:, None]), total, mask=stored & (place < width)[:, None])
            seen = gl.where(place[:, None] < length[None, :], total, float("-inf"))
            best = gl.max(gl.reshape(seen, [ENTRIES // BLOCK, BLOCK, ROWS]), 1)
            _store_maxima(maxima, best, begin // BLOCK, width // BLOCK, row0, first_row, num_rows)
            if WITH_TOPS:
                top = gl.max(gl.reshape(best, [ENTRIES // TOP, TOP // BLOCK, ROWS]), 1)
                _store_maxima(tops, top, begin // TOP, width // TOP, row0, first_row, num_rows)


@gluon.jit
def _locate(table, begin, stop, page_shift, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Pool rows at which the boxes of one tile begin; past the range its last box comes again."""
    rows = ()
    for box in gl.static_range(BOXES):
        entry = gl.minimum(begin + box * BOX, (stop - 1) // BOX * BOX)
        page = gl.load(table + (entry >> page_shift))
        rows += ((page << page_shift) + (entry & ((1 << page_shift) - 1)),)
    return rows


@gluon.jit
def _fetch(keys, rows, there, key_smem, full, stage, SLABS: gl.constexpr):
    """Start the copy of one tile of keys, if there is one."""
    BOX: gl.constexpr = keys.block_shape[0]
    SLAB: gl.constexpr = keys.block_shape[1]
    BOXES: gl.constexpr = len(rows)
    bar = full.index(stage)
    mbarrier.expect(bar, SLABS * BOXES * BOX * SLAB * (keys.dtype.primitive_bitwidth // 8), pred=there)
    for box in gl.static_range(BOXES):
        for slab in gl.static_range(SLABS):
            target = key_smem.index((stage * SLABS + slab) * BOXES + box)
            tma.async_copy_global_to_shared(keys, [rows[box], slab * SLAB], bar, target, pred=there)


@gluon.jit
def _store_queries(
    q,
    q_smem,
    row0,
    num_rows,
    num_heads,
    head_dim,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    SLAB: gl.constexpr,
    SLABS: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    for row in gl.static_range(ROWS):
        for slab in gl.static_range(SLABS):
            channel = slab * SLAB + gl.arange(0, SLAB, layout=gl.SliceLayout(0, layout))
            mask = ((head < num_heads) & (row < num_rows))[:, None] & (channel < head_dim)[None, :]
            offsets = ((row0 + row).to(gl.int64) * num_heads + head) * head_dim
            values = gl.load(q + offsets[:, None] + channel[None, :], mask=mask, other=0.0)
            q_smem.index(slab).slice(row * HEADS, HEADS).store(values)


@gluon.jit
def _store_maxima(target, values, number, width, row0, first_row, num_rows):
    COUNT: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = values.type.layout
    slot = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    place = number + gl.arange(0, COUNT, layout=gl.SliceLayout(1, layout))
    local = (row0 - first_row + slot).to(gl.int64)
    gl.store(target + (local[None, :] * width + place[:, None]), values, mask=(slot < num_rows)[None, :])
