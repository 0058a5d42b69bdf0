"""Grouped products with packed MXFP4 weights for Hopper, in Gluon: gate and up with SwiGLU, or down.

Tiling: a program computes `weights @ tokens^T`, 128 outputs (gate and up rows in turn: 64 of each) times one tile of an
expert's rows, and goes on to the next tile (persistent; an expert's blocks of outputs follow one another, so its rows
stay in L2 and its weights are read once). Two warpgroups take 64 outputs each. Tokens are the right operand, so a
tile's width is `wgmma`'s N: 64 to 320 rows by what the expert has, as one or two accumulators.
Memory: a ring of `STAGES` holds 128 bytes of every row (gathered by `cp.async`, swizzled) and the packed weights of
these columns. Weights go from there to registers, are decoded in halves of a stage (`grouped_decode`) and multiplied
from registers, while the product of the other half is in flight: one is always queued. Sums stay in registers.
The ring is filled with the next tile's first stages before the sums are written, straight from registers.
Floor: arithmetic, or the weights' bytes for few rows. Measured: see `minideepinfer_moe.grouped`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from minideepinfer_moe.kernels.grouped_decode import decode, load_words
from minideepinfer_moe.kernels.grouped_store import opaque, store

_SIZES = (
    *((256, 64), (256, 32), (256, 16), (256, 0), (128, 64), (128, 0)),
    *((64, 32), (64, 16), (64, 0), (32, 0), (16, 0)),
)
"""Tiles there are: rows in the first and in the second accumulator. `TILES` has a bit for each that is compiled."""
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # before Triton 3.9
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # before Triton 3.9
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_ROWS_FP8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
_FLAT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
_FEW = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))


@gluon.constexpr_function
def _size(i):
    return _SIZES[i]


@gluon.constexpr_function
def _below(i, tiles):
    """Rows of the next smaller tile that is compiled."""
    return max((sum(_SIZES[j]) for j in range(i + 1, len(_SIZES)) if tiles >> j & 1), default=0)


@aggregate
class Call:
    """What one launch works on; see `grouped_kernel`."""

    x: gl.tensor
    tokens: gl.tensor
    words: gl.tensor
    exponents: gl.tensor
    out: gl.tensor
    row_weights: gl.tensor
    x_scales: gl.tensor
    w_scales: gl.tensor
    tiles: gl.tensor
    limit: gl.tensor
    steps: gl.tensor
    blocks: gl.tensor
    WIDTH: gl.constexpr
    OUT_WIDTH: gl.constexpr
    MAX_ROWS: gl.constexpr
    STAGES: gl.constexpr
    UP: gl.constexpr
    FP8: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, x, tokens, words, exponents, out, row_weights, x_scales, w_scales, tiles, limit, steps, blocks,
        WIDTH, OUT_WIDTH, MAX_ROWS, STAGES, UP, FP8,
    ):  # fmt: skip
        self.x, self.tokens, self.words, self.exponents, self.out = x, tokens, words, exponents, out
        self.row_weights, self.x_scales, self.w_scales, self.tiles = row_weights, x_scales, w_scales, tiles
        self.limit, self.steps, self.blocks = limit, steps, blocks
        self.WIDTH, self.OUT_WIDTH = gl.constexpr(WIDTH), gl.constexpr(OUT_WIDTH)
        self.MAX_ROWS, self.STAGES = gl.constexpr(MAX_ROWS), gl.constexpr(STAGES)
        self.UP, self.FP8 = gl.constexpr(UP), gl.constexpr(FP8)


@aggregate
class Ring:
    """Shared memory: rows 0..255 and the rest, words, exponents."""

    rows: gl.shared_memory_descriptor
    extra: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    exponents: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, rows, extra, words, exponents):
        self.rows, self.extra, self.words, self.exponents = rows, extra, words, exponents


@gluon.jit
def _next(slot, c):
    return gl.where(slot == c.STAGES - 1, 0, slot + 1)


@gluon.jit
def _copy_rows(c, numbers, num_rows, target, k, first: gl.constexpr):
    """128 bytes of each row; zeros for rows that the tile does not have."""
    layout: gl.constexpr = _ROWS_FP8 if c.FP8 else _ROWS
    width: gl.constexpr = 128 if c.FP8 else 64
    place = first + gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, width, gl.SliceLayout(0, layout))
    source = c.x + k * width + (gl.expand_dims(numbers, 1).to(gl.int64) * c.WIDTH + gl.expand_dims(columns, 0))
    _async_load(target, source, mask=gl.expand_dims(place < num_rows, 1))


@gluon.jit
def _fill(c, ring, slot, k, numbers, more, num_rows, at):
    """Start copying step k of a tile into a slot; nothing behind the last step."""
    if k < c.steps:
        _copy_rows(c, numbers, num_rows, ring.rows.index(slot), k, 0)
        if c.MAX_ROWS > 256:
            _copy_rows(c, more, num_rows, ring.extra.index(slot), k, 256)
        # Words lie in memory as in shared memory.
        parts: gl.constexpr = 2 if c.FP8 else 1
        base = (at + k).to(gl.int64)
        i = gl.expand_dims(gl.arange(0, 8 * parts, gl.SliceLayout(1, _FLAT)), 1)
        j = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, _FLAT)), 0)
        words = c.words + base * (1024 * parts) + (i * 128 + j)
        _async_load(ring.words.index(slot).reshape([8 * parts, 128]), words)
        i = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, _FEW)), 1)
        j = gl.expand_dims(gl.arange(0, 8 * parts, gl.SliceLayout(0, _FEW)), 0)
        exponents = c.exponents + base * (64 * parts) + (i * (8 * parts) + j)
        _async_load(ring.exponents.index(slot).reshape([8, 8 * parts]), exponents)
    async_copy.commit_group()


@gluon.jit
def _locate(c, item, total):
    """Of work item `item`: first sorted row, number of rows, block of outputs, rows of x, first stage of weights."""
    item = gl.minimum(item, total - 1)
    tile = c.tiles + item // c.blocks * 3
    first, num_rows = gl.load(tile + 1), gl.load(tile + 2)
    block = gl.load(tile) * c.blocks + item % c.blocks
    layout: gl.constexpr = gl.SliceLayout(1, _ROWS_FP8 if c.FP8 else _ROWS)
    head: gl.constexpr = min(c.MAX_ROWS, 256)
    tail: gl.constexpr = max(c.MAX_ROWS - 256, 32)
    numbers = first + gl.minimum(gl.arange(0, head, layout), num_rows - 1)
    more = first + gl.minimum(256 + gl.arange(0, tail, layout), num_rows - 1)
    if c.UP:
        numbers, more = gl.load(c.tokens + numbers), gl.load(c.tokens + more)
    return first, num_rows, block, numbers, more, block * c.steps


@gluon.jit
def _prefetch(c, ring, slot, numbers, more, num_rows, at):
    for k in range(opaque(gl.to_tensor(c.STAGES - 1))):
        _fill(c, ring, slot, k, numbers, more, num_rows, at)
        slot = _next(slot, c)


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
        if N0 + N1 > 256:
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
def _tile(c, ring, slot, item, total, first, num_rows, block, numbers, more, at, N0: gl.constexpr, N1: gl.constexpr):
    """Compute the tile whose first stages are on their way, prefetch work item `item`, write the sums."""
    depth: gl.constexpr = 32 if c.FP8 else 16
    rest_rows: gl.constexpr = max(N1, 16)
    m0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N0, depth])
    m1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, rest_rows, depth])
    l0: gl.constexpr = gl.DotOperandLayout(0, m0, 4 if c.FP8 else 2)
    l1: gl.constexpr = gl.DotOperandLayout(0, m1, 4 if c.FP8 else 2)
    sums = gl.zeros([128, N0], gl.float32, m0)
    rest = gl.zeros([128, rest_rows], gl.float32, m1)
    async_copy.wait_group(c.STAGES - 2)
    words0, words1, exponents0, exponents1 = load_words(ring.words.index(slot), ring.exponents.index(slot), c.FP8)
    before = gl.where(slot == 0, c.STAGES - 1, slot - 1)
    for k in range(c.steps):
        # In flight: the second half of the step before.
        weights = decode(words0, exponents0, 0, c.FP8, l0)
        sums, rest = _multiply(c, ring, slot, weights, sums, rest, 0, N0, N1, l1)
        sums, rest = _wait(sums, rest, 1, N1)
        weights = decode(words1, exponents1, 1, c.FP8, l0)
        sums, rest = _multiply(c, ring, slot, weights, sums, rest, 1, N0, N1, l1)
        after = _next(slot, c)
        async_copy.wait_group(c.STAGES - 3)  # and a barrier: everyone is done with slot `before`
        words0, words1, exponents0, exponents1 = load_words(ring.words.index(after), ring.exponents.index(after), c.FP8)
        _fill(c, ring, before, k + (c.STAGES - 1), numbers, more, num_rows, at)
        sums, rest = _wait(sums, rest, 1, N1)
        before, slot = slot, after
    sums, rest = _wait(sums, rest, 0, N1)
    _barrier()
    row, end, done = first, first + num_rows, block
    first, num_rows, block, numbers, more, at = _locate(c, item, total)
    _prefetch(c, ring, slot, numbers, more, num_rows, at)
    store(c, sums, row, end, done)
    if N1 > 0:
        store(c, rest, row + N0, end, done)
    return slot, first, num_rows, block, numbers, more, at


@gluon.jit
def _count(tiles, max_tiles):
    """Tiles that have rows."""
    found = gl.to_tensor(0)
    for i in range(0, max_tiles, 256):
        place = i + gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
        rows = gl.load(tiles + place * 3 + 2, mask=place < max_tiles, other=0)
        found += gl.sum((rows > 0).to(gl.int32), 0)
    return found


@gluon.jit(do_not_specialize=["max_tiles", "steps", "blocks"])
def grouped_kernel(
    x, tokens, words, exponents, out, row_weights, x_scales, w_scales, tiles, max_tiles, limit, steps, blocks,
    WIDTH: gl.constexpr, OUT_WIDTH: gl.constexpr, MAX_ROWS: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    UP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Rows `[*, WIDTH]` of bfloat16 or e4m3 to `[R, OUT_WIDTH]`; `steps` stages of columns, `blocks` of outputs.

    `tokens`, `row_weights` and `limit` are read if UP, scales (one of a row of x, one of a row of weights) if FP8.
    """
    c = Call(
        x, tokens, words, exponents, out, row_weights, x_scales, w_scales, tiles, limit, steps, blocks,
        WIDTH, OUT_WIDTH, MAX_ROWS, STAGES, UP, FP8,
    )  # fmt: skip
    dtype: gl.constexpr = gl.float8e4nv if FP8 else gl.bfloat16
    columns: gl.constexpr = 128 if FP8 else 64
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8 if FP8 else 16, 2)
    plain4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    rows = gl.allocate_shared_memory(dtype, [STAGES, min(MAX_ROWS, 256), columns], swizzled)
    extra = gl.allocate_shared_memory(dtype, [STAGES, max(MAX_ROWS - 256, 8), columns], swizzled)
    stage_words = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8, 4, 8 if FP8 else 4], plain4)
    if FP8:
        plain3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        stage_exponents = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8, 2], plain3)
    else:
        plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        stage_exponents = gl.allocate_shared_memory(gl.int32, [STAGES, 8, 8], plain2)
    ring = Ring(rows, extra, stage_words, stage_exponents)
    total = _count(tiles, max_tiles) * blocks
    start = gl.program_id(0)
    if start < total:
        slot = gl.to_tensor(0)
        first, num_rows, block, numbers, more, at = _locate(c, start, total)
        _prefetch(c, ring, slot, numbers, more, num_rows, at)
        for item in range(start, total, gl.num_programs(0)):
            present = num_rows
            for i in gl.static_range(11):
                if TILES >> i & 1:  # noqa: SIM102  the outer one is decided when compiling
                    if (present > _below(i, TILES)) & (present <= _size(i)[0] + _size(i)[1]):
                        slot, first, num_rows, block, numbers, more, at = _tile(
                            c, ring, slot, item + gl.num_programs(0), total,
                            first, num_rows, block, numbers, more, at, _size(i)[0], _size(i)[1],
                        )  # fmt: skip
        async_copy.wait_group(0)
