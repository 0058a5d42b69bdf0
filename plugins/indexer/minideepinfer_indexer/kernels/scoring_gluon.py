"""`score_kernel` of `scoring` in Gluon, for Hopper: the same tiles, in an order of their own.

Tiling: a program takes up to 8 rows x 32 heads of one request and a range of its entries, 64 at a time. One warp has
the copy engine bring queries once and keys page by page into a ring of STAGES. Two warpgroups take every other tile at
their own pace: one sums heads while the other's products run, and handing the products over in turns costs 5 %.
Shared memory: 64 KB of queries, 16 KB a stage; registers: 64 entries x 256 columns of products and 256 head weights.
Floor at 4096 rows x 65536 entries: 2.20 TFLOP, 2.70 ms in bf16 and 1.42 ms in fp8 at cuBLAS rates of the same run.
Measured there on one H200: 3.17 and 2.13 ms beside cuBLAS bf16 8192^3 1.42; what binds it is in docs/findings.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from minideepinfer_indexer.kernels.gluon_sums import consume, view

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name in Triton 3.6


@gluon.jit(do_not_specialize=["first_row", "num_heads", "table_width", "page_shift"])
def score_kernel(
    queries,
    keys,
    head_weights,
    block_table,
    tiles,
    lengths,
    key_scales,
    scores,
    maxima,
    tops,
    first_row,
    num_heads,
    table_width,
    page_shift,
    width,
    entries_per_program,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK: gl.constexpr,
    TOP: gl.constexpr,
    WITH_TOPS: gl.constexpr,
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    SLABS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """One tile of rows against one range of entries; arguments as in `scoring`, except for two descriptors.

    Args:
        queries: `[T, num_heads, head_dim]` in boxes `[ROWS, HEADS, channels of a slab]`.
        keys: `[num_pages * 2^page_shift, head_dim]` in boxes of one page, at most ENTRIES, and a slab; if SCALED, pages
            hold ENTRIES, have one scale for each entry, and those of a request follow each other.
    """
    SLAB: gl.constexpr = keys.block_shape[1]
    LAYOUT: gl.constexpr = keys.layout
    tile = tiles + gl.program_id(0) * 3
    table = block_table + gl.load(tile).to(gl.int64) * table_width
    row0 = gl.load(tile + 1)
    num_rows = gl.load(tile + 2)
    slot = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    length = gl.load(lengths + row0 + slot, mask=slot < num_rows, other=0)
    start = gl.program_id(1) * entries_per_program
    stop = gl.minimum(gl.max(length, 0), start + entries_per_program)
    if start >= stop:
        return
    key_smem = gl.allocate_shared_memory(keys.dtype, [STAGES * SLABS, ENTRIES, SLAB], LAYOUT)
    q_smem = gl.allocate_shared_memory(keys.dtype, [SLABS, ROWS, HEADS, SLAB], queries.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    fence_async_shared()
    rows = (row0, num_rows, row0 - first_row)
    shared = (key_smem, q_smem, q_full, full, empty)
    inputs = (head_weights, num_heads, lengths, table, key_scales)
    outputs = (scores, maxima, tops, width)
    # fmt: off
    gl.warp_specialize(
        [
            (consume, (gl.constexpr(0), LAYOUT, start, stop, rows, inputs, outputs, shared,
                       ROWS, HEADS, ENTRIES, BLOCK, TOP, WITH_TOPS, SCALED, STAGES, PARTS)),
            (consume, (gl.constexpr(1), LAYOUT, start, stop, rows, inputs, outputs, shared,
                       ROWS, HEADS, ENTRIES, BLOCK, TOP, WITH_TOPS, SCALED, STAGES, PARTS)),
            (_produce, (queries, keys, table, page_shift, row0, start, stop, shared, ENTRIES, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on


@gluon.jit
def _produce(queries, keys, table, page_shift, row0, start, stop, shared, ENTRIES: gl.constexpr, STAGES: gl.constexpr):
    """Bring the queries, then the keys; past the range its last box comes again."""
    key_smem, q_smem, q_full, full, empty = shared
    BOX: gl.constexpr = keys.block_shape[0]
    SLAB: gl.constexpr = keys.block_shape[1]
    LAYOUT: gl.constexpr = keys.layout
    BOXES: gl.constexpr = ENTRIES // BOX
    SLABS: gl.constexpr = q_smem.shape[0]
    BYTES: gl.constexpr = keys.dtype.primitive_bitwidth // 8
    mbarrier.expect(q_full, q_smem.numel * BYTES)
    for slab in gl.static_range(SLABS):
        load_box(queries, [row0, 0, slab * SLAB], q_full, q_smem.index(slab))
    last = (stop - 1) // BOX * BOX
    stage = 0
    phase = 1
    for begin in range(start, stop, ENTRIES):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), ENTRIES * SLABS * SLAB * BYTES)
        for box in gl.static_range(BOXES):
            entry = gl.minimum(begin + box * BOX, last)
            row = (gl.load(table + (entry >> page_shift)) << page_shift) + (entry & ((1 << page_shift) - 1))
            for slab in gl.static_range(SLABS):
                target = view(key_smem.index(stage * SLABS + slab), [BOXES, BOX, SLAB], LAYOUT).index(box)
                load_box(keys, [row, slab * SLAB], full.index(stage), target)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
