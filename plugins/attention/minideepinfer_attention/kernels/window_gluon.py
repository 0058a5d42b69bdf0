"""Window-only attention in Gluon, for Hopper: `window` with its parts in warps of their own; 64 heads x 512.

Tiling: a program stays on its SM and takes every n-th pair of neighbouring tokens, n the number of programs, so that
all are near each other in memory at any time. The two tokens share 129 rows of the window buffer.
Each token has a warpgroup (M is its 64 heads): q k^T over all channels, softmax, then 64 channels of output at a time.
The two run apart as far as the keys let them, so that one's softmax falls into the other's products. A warp for each
token's q and one for the keys feed the copy engine, which writes the output, too.
Shared memory, 224 KiB: 8 chunks (64 channels) of 128 keys 128, the same of the 129th row with 15 more 16, 4 chunks of
q for each token 64, a chunk of output each 16. Registers: 64 logits, then 36 of weights and two chunks of sums, 64.
Floor at T = 4096: 0.130 ms (q and output). Measured on one H200: 0.172 ms, where plain Triton took 0.213 and cuBLAS
8192^3 1.42; what binds it is in docs/findings.md.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minideepinfer_attention.kernels.gluon_common import DIM, HEADS, LOG2_E, ROPE, barrier, fresh_zero, unrotated

# Names of Triton 3.9, else of 3.6.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
wait_for_warps = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

WINDOW = gl.constexpr(128)
EXTRA = gl.constexpr(16)
CHUNK = gl.constexpr(64)
CHUNKS = gl.constexpr(DIM.value // CHUNK.value)
SLOTS = gl.constexpr(4)
NO_KEY = gl.constexpr(-1e30)
"""The maximum of no logits; finite, so that nothing is inf minus inf."""
CONSUMER_REGISTERS = gl.constexpr(208)
PRODUCER_REGISTERS = gl.constexpr(24)

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
MORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LOGITS_ROW = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
MORE_ROW = gl.constexpr(gl.SliceLayout(1, MORE.value))
OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))


class Work(NamedTuple):
    """Which tokens there are, see `window_prefill_kernel`."""

    ranges: gl.tensor
    first_rows: gl.tensor
    hidden: gl.tensor
    num_tiles: gl.tensor


class Tiles(NamedTuple):
    """Shared memory; `q` and `out` are of the first and of the second token."""

    q: tuple
    keys: gl.shared_memory_descriptor
    extra: gl.shared_memory_descriptor
    out: tuple


class Barriers(NamedTuple):
    """Of each token's slots of q, and of the chunks of keys."""

    q_full: tuple
    q_empty: tuple
    full: tuple
    empty: tuple


@gluon.jit
def _four(count: gl.constexpr):
    return (barrier(count), barrier(count), barrier(count), barrier(count))


@gluon.jit
def _allocate():
    q_shape: gl.constexpr = [SLOTS, HEADS, CHUNK]
    out_shape: gl.constexpr = [HEADS, CHUNK]
    tiles = Tiles(
        q=(
            gl.allocate_shared_memory(gl.bfloat16, q_shape, TILE),
            gl.allocate_shared_memory(gl.bfloat16, q_shape, TILE),
        ),
        keys=gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, WINDOW, CHUNK], TILE),
        extra=gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, EXTRA, CHUNK], TILE),
        out=(
            gl.allocate_shared_memory(gl.bfloat16, out_shape, TILE),
            gl.allocate_shared_memory(gl.bfloat16, out_shape, TILE),
        ),
    )
    bars = Barriers(
        q_full=(_four(1), _four(1)), q_empty=(_four(1), _four(1)), full=_four(1) + _four(1), empty=_four(2) + _four(2)
    )
    fence_async_shared()
    return tiles, bars


@gluon.jit
def _first(work, tile):
    """A tile's first token; past the end, that of the last tile."""
    return gl.load(work.ranges + 2 * gl.minimum(tile, work.num_tiles - 1))


@gluon.jit
def _load_q(wg: gl.constexpr, desc, work, tiles, bars):
    """Bring q of the first or second token of each tile; a slot is filled twice a tile."""
    step = gl.num_programs(0)
    first = _first(work, gl.program_id(0))
    for tile in range(gl.program_id(0), work.num_tiles, step):
        following = _first(work, tile + step)
        for c in gl.static_range(CHUNKS):
            full = bars.q_full[wg][c % SLOTS]
            mbarrier.wait(bars.q_empty[wg][c % SLOTS], 1 - c // SLOTS)
            mbarrier.expect(full, HEADS * CHUNK * 2)
            load_box(desc, [(first + wg) * HEADS, c * CHUNK], full, tiles.q[wg].index(c % SLOTS))
        first = following


@gluon.jit
def _load_keys(keys, extra, work, tiles, bars):
    """Bring the rows that a tile's tokens share, a chunk as soon as both are done with the one before."""
    step = gl.num_programs(0)
    row = gl.load(work.first_rows + _first(work, gl.program_id(0)))
    phase = 1
    for tile in range(gl.program_id(0), work.num_tiles, step):
        following = gl.load(work.first_rows + _first(work, tile + step))
        for c in gl.static_range(CHUNKS):
            mbarrier.wait(bars.empty[c], phase)
            mbarrier.expect(bars.full[c], (WINDOW + EXTRA) * CHUNK * 2)
            load_box(keys, [row, c * CHUNK], bars.full[c], tiles.keys.index(c))
            load_box(extra, [row + WINDOW, c * CHUNK], bars.full[c], tiles.extra.index(c))
        row = following
        phase ^= 1


@gluon.jit
def _token(wg: gl.constexpr, work, tile):
    """The warpgroup's token in a tile, whether there is one, and how many keys of the tile it does not see."""
    tile = gl.minimum(tile, work.num_tiles - 1)
    token = gl.load(work.ranges + 2 * tile) + wg
    real = token < gl.load(work.ranges + 2 * tile + 1)
    return token, real, wg + gl.load(work.hidden + token, mask=real, other=WINDOW)


@gluon.jit
def _logits(wg: gl.constexpr, phase, tiles, bars):
    """q k^T with the first 128 rows, and for the second token with the next ones; q's slots are given back."""
    logits = gl.zeros([HEADS, WINDOW], gl.float32, LOGITS)
    more = gl.zeros([HEADS, EXTRA], gl.float32, MORE)
    for c in gl.static_range(CHUNKS):
        mbarrier.wait(bars.q_full[wg][c % SLOTS], c // SLOTS)
        mbarrier.wait(bars.full[c], phase)
        zero = fresh_zero()
        q = tiles.q[wg].index(c % SLOTS + zero)
        logits = warpgroup_mma(q, tiles.keys.index(c + zero).permute((1, 0)), logits, use_acc=c > 0, is_async=True)
        if wg == 1:
            more = warpgroup_mma(q, tiles.extra.index(c + zero).permute((1, 0)), more, use_acc=c > 0, is_async=True)
        if c > 0:
            if wg == 1:
                logits, more = warpgroup_mma_wait(2, deps=[logits, more])
            else:
                logits = warpgroup_mma_wait(1, deps=[logits])
            mbarrier.arrive(bars.q_empty[wg][(c - 1) % SLOTS])
    if wg == 1:
        logits, more = warpgroup_mma_wait(0, deps=[logits, more])
    else:
        logits = warpgroup_mma_wait(0, deps=[logits])
    mbarrier.arrive(bars.q_empty[wg][(CHUNKS - 1) % SLOTS])
    return logits, more


@gluon.jit
def _weights(wg: gl.constexpr, logits, more, hidden, sink):
    """Weights as operands, and the factor on the output of each head."""
    key = gl.arange(0, WINDOW, gl.SliceLayout(0, LOGITS))
    logits = gl.where((key >= hidden)[None, :], logits, float("-inf"))  # q may be NaN where there is no key
    peak = gl.maximum(gl.max(logits, 1), NO_KEY)
    if wg == 1:
        extra = WINDOW + gl.arange(0, EXTRA, gl.SliceLayout(0, MORE))
        more = gl.where(((extra >= hidden) & (extra <= WINDOW))[None, :], more, float("-inf"))
        peak = gl.maximum(peak, gl.convert_layout(gl.max(more, 1), LOGITS_ROW))
        more = gl.exp2(more - gl.convert_layout(peak, MORE_ROW)[:, None])
    logits = gl.exp2(logits - peak[:, None])
    total = gl.sum(logits, 1)
    if wg == 1:
        total += gl.convert_layout(gl.sum(more, 1), LOGITS_ROW)
    factor = gl.where(total == 0, 0.0, 1 / (total + gl.exp2(sink - peak)))
    weights = gl.convert_layout(logits.to(gl.bfloat16), WEIGHTS)
    more = gl.convert_layout(more.to(gl.bfloat16), WEIGHTS)
    return weights, more, gl.convert_layout(factor, OUTPUT_ROW)


@gluon.jit
def _product(wg: gl.constexpr, weights, more, tiles, chunk: gl.constexpr):
    """Start a chunk of the output."""
    index = chunk + fresh_zero()
    o = gl.zeros([HEADS, CHUNK], gl.float32, OUTPUT)
    o = warpgroup_mma(weights, tiles.keys.index(index), o, use_acc=False, is_async=True)
    if wg == 1:
        o = warpgroup_mma(more, tiles.extra.index(index), o, is_async=True)
    return o


@gluon.jit
def _store(wg: gl.constexpr, heads, desc, token, real, chunk: gl.constexpr, tiles):
    """Hand a chunk to the copy engine, once it has read the one before."""
    tma.store_wait(0)
    wait_for_warps()
    tiles.out[wg].store(heads)
    fence_async_shared()
    wait_for_warps()
    if real:
        store_box(desc, [token * HEADS, chunk * CHUNK], tiles.out[wg])


@gluon.jit
def _attend(wg: gl.constexpr, desc, work, sink_ptr, cos, sin, scale, tiles, bars):
    """The first or second token of each tile."""
    step = gl.num_programs(0)
    sink = gl.load(sink_ptr + gl.arange(0, HEADS, LOGITS_ROW)) * LOG2_E
    token, real, hidden = _token(wg, work, gl.program_id(0))
    phase = 0
    for tile in range(gl.program_id(0), work.num_tiles, step):
        next_token, next_real, next_hidden = _token(wg, work, tile + step)
        logits, more = _logits(wg, phase, tiles, bars)
        weights, more_weights, factor = _weights(wg, logits * scale, more * scale, hidden, sink)
        o = _product(wg, weights, more_weights, tiles, 0)
        for c in gl.static_range(CHUNKS):
            if c < CHUNKS - 1:
                ahead = _product(wg, weights, more_weights, tiles, c + 1)
                done = warpgroup_mma_wait(1 + wg, deps=[o])
            else:
                done = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(bars.empty[c])
            heads = (done * factor[:, None]).to(gl.bfloat16)
            if c == CHUNKS - 1:
                angle = gl.where(real, token, 0) * (ROPE // 2)
                heads = unrotated(heads, cos + angle, sin + angle)
            _store(wg, heads, desc, token, real, c, tiles)
            if c < CHUNKS - 1:
                o = ahead
        token = next_token
        real = next_real
        hidden = next_hidden
        phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def window_prefill_kernel(q, keys, extra, out, ranges, first_rows, hidden, sink, cos, sin, scale, num_tiles):
    """All tokens.

    Args:
        q: descriptor of `[T * 64, 512]` in boxes `[64, 64]`.
        keys: descriptor of the window buffer `[N, 512]` in boxes `[128, 64]`.
        extra: the same in boxes `[16, 64]`.
        out: like q.
        ranges: int32 `[num_tiles, 2]`, a tile's first token and the token behind its last.
        first_rows: int32 `[T]`, the row of the buffer where a token's window begins.
        hidden: int32 `[T]`, how many of its first rows the token does not see.
        sink: float32 `[64]`.
        cos: float32 `[T, 32]`.
        sin: float32 `[T, 32]`.
        scale: factor on the logits, times log2(e).
        num_tiles: how many.
    """
    tiles, bars = _allocate()
    work = Work(ranges, first_rows, hidden, num_tiles)
    gl.warp_specialize(
        [
            (_attend, (gl.constexpr(0), out, work, sink, cos, sin, scale, tiles, bars)),
            (_attend, (gl.constexpr(1), out, work, sink, cos, sin, scale, tiles, bars)),
            (_load_q, (gl.constexpr(0), q, work, tiles, bars)),
            (_load_q, (gl.constexpr(1), q, work, tiles, bars)),
            (_load_keys, (keys, extra, work, tiles, bars)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
