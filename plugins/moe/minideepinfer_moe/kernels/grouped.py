"""Grouped products with packed MXFP4 weights for Hopper, in Gluon: gate and up with SwiGLU, or down.

Tiling: a program computes `weights @ rows^T`, 128 outputs (gate and up rows in turn: 64 of each) times one tile of an
expert's sorted rows, and goes on to the next tile (persistent; an expert's blocks of outputs follow one another, so its
rows stay in L2 and its weights are read once). Rows are the right operand, so a tile's width is `wgmma`'s N: 16 to 320
rows by what the expert has, as one or two accumulators.
Warps: one copies, eight multiply (two warpgroups, 64 outputs each). The eight are the default partition, whose
registers ptxas counts right.
Memory: a ring of `STAGES` holds 128 bytes of every row and the packed weights of these columns, copied by TMA, rows in
boxes of `BOX`. Weights go from there to registers, are decoded in halves of a stage (`grouped_decode`) and multiplied
from registers, while the product of the other half is in flight: one is always queued. Sums stay in registers and are
written straight from there, while the ring fills with the next tile.
Floor: arithmetic, or the weights' bytes for few rows. Measured: see `minideepinfer_moe.grouped`.
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
from triton.language.core import _aggregate as aggregate

from minideepinfer_moe.kernels.grouped_decode import decode, load_words
from minideepinfer_moe.kernels.grouped_store import store

SIZES = ((256, 64), (256, 32), (256, 16), (256, 0), (128, 64), (64, 32), (64, 0), (32, 0), (16, 0))
"""Tiles there are: rows in the first and in the second accumulator. `TILES` has a bit for each that is compiled."""
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # before Triton 3.9
_OLD_REINTERPRET = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))  # before Triton 3.9


@gluon.constexpr_function
def _num_sizes():
    return len(SIZES)


@gluon.constexpr_function
def _size(i):
    return SIZES[i]


@gluon.constexpr_function
def _head(rows):
    """Rows in the first of the two buffers: the largest power of two, the first accumulator of the largest tile."""
    return 1 << (rows.bit_length() - 1)


@gluon.constexpr_function
def _below(i, tiles):
    """Rows of the next smaller tile that is compiled."""
    return max((sum(SIZES[j]) for j in range(i + 1, len(SIZES)) if tiles >> j & 1), default=0)


@aggregate
class Call:
    """What one launch works on; see `grouped_kernel`."""

    x: tma.tensor_descriptor
    words: tma.tensor_descriptor
    exponents: tma.tensor_descriptor
    out: gl.tensor
    row_weights: gl.tensor
    x_scales: gl.tensor
    w_scales: gl.tensor
    tiles: gl.tensor
    limit: gl.tensor
    steps: gl.tensor
    blocks: gl.tensor
    OUT_WIDTH: gl.constexpr
    ROWS: gl.constexpr
    BOX: gl.constexpr
    TILES: gl.constexpr
    STAGES: gl.constexpr
    UP: gl.constexpr
    FP8: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x, words, exponents, out, row_weights, x_scales, w_scales, tiles, limit, steps, blocks,
        OUT_WIDTH, ROWS, BOX, TILES, STAGES, UP, FP8,
    ):  # fmt: skip
        self.x, self.words, self.exponents, self.out = x, words, exponents, out
        self.row_weights, self.x_scales, self.w_scales, self.tiles = row_weights, x_scales, w_scales, tiles
        self.limit, self.steps, self.blocks = limit, steps, blocks
        self.OUT_WIDTH, self.ROWS, self.BOX = gl.constexpr(OUT_WIDTH), gl.constexpr(ROWS), gl.constexpr(BOX)
        self.TILES = gl.constexpr(TILES)
        self.STAGES, self.UP, self.FP8 = gl.constexpr(STAGES), gl.constexpr(UP), gl.constexpr(FP8)


@aggregate
class Ring:
    """Shared memory: a tile's rows in two buffers (`_head`), words and exponents as copied, barriers of slots."""

    rows: gl.shared_memory_descriptor
    extra: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    exponents: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, rows, extra, words, exponents, full, empty):
        self.rows, self.extra, self.words, self.exponents = rows, extra, words, exponents
        self.full, self.empty = full, empty


@gluon.jit
def _next(slot, phase, c):
    last = slot == c.STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, 1 - phase, phase)


@gluon.jit
def _previous(slot, c):
    return gl.where(slot == 0, c.STAGES - 1, slot - 1)


@gluon.jit
def _produce(c, ring, start, total):
    """The copying warp: fill slot after slot, tile after tile. Boxes without a row get zeros, and read nothing."""
    width: gl.constexpr = 128 if c.FP8 else 64
    parts: gl.constexpr = 2 if c.FP8 else 1
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)
    for item in range(start, total, gl.num_programs(0)):
        first, num_rows, at = _locate(c, item)
        at *= c.steps
        for k in range(c.steps):
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(full, c.ROWS * 128 + parts * (4096 + 256))
            _load_box(c.words, [(at + k) * (4 * parts), 0], full, ring.words.index(slot))
            _load_box(c.exponents, [at + k, 0], full, ring.exponents.index(slot))
            for box in gl.static_range(c.ROWS // c.BOX):
                if box * c.BOX < _head(c.ROWS):
                    target = ring.rows.index(slot).slice(box * c.BOX, c.BOX)
                else:
                    target = ring.extra.index(slot).slice(box * c.BOX - _head(c.ROWS), c.BOX)
                row = gl.where(num_rows > box * c.BOX, first + box * c.BOX, c.x.shape[0])
                _load_box(c.x, [row, k * width], full, target)
            slot, phase = _next(slot, phase, c)


@gluon.jit
def _as_words(memory, shape: gl.constexpr, layout: gl.constexpr):
    if _OLD_REINTERPRET:
        words = memory._reinterpret(gl.int32, shape, layout)
    else:
        words = memory.reinterpret(gl.int32, shape, layout)
    return words


@gluon.jit
def _load_words(c, ring, slot):
    parts: gl.constexpr = 2 if c.FP8 else 1
    plain4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    words = _as_words(ring.words.index(slot), [8, 8, 4, 4 * parts], plain4)
    if c.FP8:
        plain3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        exponents = _as_words(ring.exponents.index(slot), [8, 8, 2], plain3)
    else:
        plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        exponents = _as_words(ring.exponents.index(slot), [8, 8], plain2)
    return load_words(words, exponents, c.FP8)


@gluon.jit
def _locate(c, item):
    """Of a work item: first sorted row, number of rows, block of outputs among all experts'."""
    tile = c.tiles + item // c.blocks * 3
    return gl.load(tile + 1), gl.load(tile + 2), gl.load(tile) * c.blocks + item % c.blocks


@gluon.jit
def _multiply(
    c, ring, slot, weights, sums, rest, HALF: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, L1: gl.constexpr
):
    """Queue the products of half a stage."""
    width: gl.constexpr = weights.shape[1]
    rows = ring.rows.index(slot).slice(HALF * width, width, dim=1)
    sums = warpgroup_mma(weights, rows.slice(0, N0).permute((1, 0)), sums, is_async=True)
    if N1 > 0:
        weights = gl.convert_layout(weights, L1, assert_trivial=True)
        if _head(c.ROWS) == N0:
            other = ring.extra.index(slot).slice(HALF * width, width, dim=1).slice(0, N1)
        else:
            other = rows.slice(N0, N1)
        rest = warpgroup_mma(weights, other.permute((1, 0)), rest, is_async=True)
    return sums, rest


@gluon.jit
def _wait(sums, rest, pending: gl.constexpr, N1: gl.constexpr):
    """Until at most `pending` halves are in flight."""
    if N1 > 0:
        sums, rest = warpgroup_mma_wait(pending * 2, deps=[sums, rest])
    else:
        sums = warpgroup_mma_wait(pending, deps=[sums])
    return sums, rest


@gluon.jit
def _tile(c, ring, slot, phase, first, num_rows, block, N0: gl.constexpr, N1: gl.constexpr):
    """Compute one tile and write it."""
    depth: gl.constexpr = 32 if c.FP8 else 16
    rest_rows: gl.constexpr = max(N1, 16)
    m0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N0, depth])
    m1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, rest_rows, depth])
    l0: gl.constexpr = gl.DotOperandLayout(0, m0, 4 if c.FP8 else 2)
    l1: gl.constexpr = gl.DotOperandLayout(0, m1, 4 if c.FP8 else 2)
    sums = gl.zeros([128, N0], gl.float32, m0)
    rest = gl.zeros([128, rest_rows], gl.float32, m1)
    mbarrier.wait(ring.full.index(slot), phase)
    words0, words1, exponents0, exponents1 = _load_words(c, ring, slot)
    for k in range(c.steps):
        # In flight: the second half of the step before.
        weights = decode(words0, exponents0, 0, c.FP8, l0)
        sums, rest = _multiply(c, ring, slot, weights, sums, rest, 0, N0, N1, l1)
        sums, rest = _wait(sums, rest, 1, N1)
        mbarrier.arrive(ring.empty.index(_previous(slot, c)), pred=k > 0)
        weights = decode(words1, exponents1, 1, c.FP8, l0)
        sums, rest = _multiply(c, ring, slot, weights, sums, rest, 1, N0, N1, l1)
        after, phase = _next(slot, phase, c)
        mbarrier.wait(ring.full.index(after), phase, pred=k + 1 < c.steps)
        words0, words1, exponents0, exponents1 = _load_words(c, ring, after)
        sums, rest = _wait(sums, rest, 1, N1)
        slot = after
    sums, rest = _wait(sums, rest, 0, N1)
    mbarrier.arrive(ring.empty.index(_previous(slot, c)))
    store(c, sums, first, first + num_rows, block)
    if N1 > 0:
        store(c, rest, first + N0, first + num_rows, block)
    return slot, phase


@gluon.jit
def _consume(c, ring, start, total):
    """The multiplying warps: each tile in the size that its rows need."""
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    for item in range(start, total, gl.num_programs(0)):
        first, num_rows, block = _locate(c, item)
        for i in gl.static_range(_num_sizes()):
            if c.TILES >> i & 1:  # noqa: SIM102  the outer one is decided when compiling
                if (num_rows > _below(i, c.TILES)) & (num_rows <= _size(i)[0] + _size(i)[1]):
                    slot, phase = _tile(c, ring, slot, phase, first, num_rows, block, _size(i)[0], _size(i)[1])


@gluon.jit(do_not_specialize=["steps", "blocks"])
def grouped_kernel(
    x, words, exponents, out, row_weights, x_scales, w_scales, tiles, num_tiles, limit, steps, blocks,
    OUT_WIDTH: gl.constexpr, ROWS: gl.constexpr, BOX: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    UP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Sorted rows of bfloat16 or e4m3 to `[R, OUT_WIDTH]`; `steps` stages of columns, `blocks` of outputs.

    x, words and exponents are descriptors: `[R, K]` in boxes of BOX rows and 128 bytes, and stages of a matrix's words
    and exponents. `row_weights` and `limit` are read if UP, scales (one of a row of x, one of a row of weights) if FP8.
    """
    c = Call(
        x, words, exponents, out, row_weights, x_scales, w_scales, tiles, limit, steps, blocks,
        OUT_WIDTH, ROWS, BOX, TILES, STAGES, UP, FP8,
    )  # fmt: skip
    columns: gl.constexpr = 128 if FP8 else 64
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, _head(ROWS), columns], x.layout)
    extra = gl.allocate_shared_memory(x.dtype, [STAGES, max(ROWS - _head(ROWS), 8), columns], x.layout)
    stage_words = gl.allocate_shared_memory(gl.int32, [STAGES, 8 if FP8 else 4, 256], words.layout)
    stage_exponents = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 128 if FP8 else 64], exponents.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    ring = Ring(rows, extra, stage_words, stage_exponents, full, empty)
    total = gl.load(num_tiles) * blocks  # a sum made here would share memory with what partitions are handed, unordered
    start = gl.program_id(0)
    gl.warp_specialize([(_consume, (c, ring, start, total)), (_produce, (c, ring, start, total))], [1], [24])
