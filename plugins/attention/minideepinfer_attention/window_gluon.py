"""Window-only attention on Hopper, in Gluon: 2 tokens x 64 heads against the 129 rows that they share; 64 heads x 512.

Tiling: that of `kernels.window`, its twin. A program takes a run of tiles and stays on its SM. Shared memory holds all
keys of a tile (8 chunks of 64 channels, 128 + 16 rows, 144 KiB) and four such chunks of q (64 KiB), filled by TMA:
keys of the next tile come while this one's output is computed, chunk for chunk, its q as soon as a buffer is free.
Registers hold the logits of 128 rows, then the weights and two chunks of output.
Floor at T = 4096: 0.13 ms (q and output).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minideepinfer_attention.tiles import LOG2E
from minideepinfer_attention.window import WindowTiles

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton renamed it after 3.6

HEADS = gl.constexpr(64)
DIM = gl.constexpr(512)
ROPE = gl.constexpr(64)
ROWS = gl.constexpr(128)
"""Rows in M: two tokens."""
KEYS = gl.constexpr(128)
EXTRA = gl.constexpr(16)
CHUNK = gl.constexpr(64)
CHUNKS = gl.constexpr(8)
STAGES = gl.constexpr(4)
"""Buffers of q; half of the chunks, so that a buffer is filled twice a tile."""
NO_KEY = gl.constexpr(-1e30)
LOG2_E = gl.constexpr(LOG2E)

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))
MORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 16, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
LOGITS_ROW = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
MORE_ROW = gl.constexpr(gl.SliceLayout(1, MORE.value))
OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 64],
    )
)
"""A lane holds 16 bytes, a warp's store full sectors; what the output's lanes exchange stays in a warp."""


@gluon.jit
def _copy_q(desc, first, chunk: gl.constexpr, q, full, pred):
    """Start copying a chunk of q."""
    slot: gl.constexpr = chunk % STAGES
    mbarrier.expect(full.index(slot), ROWS * CHUNK * 2, pred=pred)
    tma.async_copy_global_to_shared(desc, [first * HEADS, chunk * CHUNK], full.index(slot), q.index(slot), pred=pred)


@gluon.jit
def _copy_keys(desc, extra_desc, row, chunk: gl.constexpr, keys, extra, full, pred):
    """Start copying a chunk of the keys of a tile."""
    bar = full.index(chunk)
    mbarrier.expect(bar, (KEYS + EXTRA) * CHUNK * 2, pred=pred)
    tma.async_copy_global_to_shared(desc, [row, chunk * CHUNK], bar, keys.index(chunk), pred=pred)
    tma.async_copy_global_to_shared(extra_desc, [row + KEYS, chunk * CHUNK], bar, extra.index(chunk), pred=pred)


@gluon.jit
def _weights(logits, more, first, stop, hidden_ptr, sink, window):
    """Weights of both products as operands, and the factor on the output of each row."""
    row = gl.arange(0, ROWS, LOGITS_ROW)
    shift = row // HEADS
    hidden = shift + gl.load(hidden_ptr + first + shift, mask=first + shift < stop, other=window)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))
    seen = (key[None, :] >= hidden[:, None]) & (key[None, :] - shift[:, None] < window)
    logits = gl.where(seen, logits, float("-inf"))
    its_row = gl.arange(0, ROWS, MORE_ROW)
    its_shift = its_row // HEADS
    its_hidden = gl.convert_layout(hidden, MORE_ROW)
    extra = KEYS + gl.arange(0, EXTRA, gl.SliceLayout(0, MORE))
    seen = (extra[None, :] >= its_hidden[:, None]) & (extra[None, :] - its_shift[:, None] < window)
    more = gl.where(seen, more, float("-inf"))
    peak = gl.maximum(gl.max(logits, 1), gl.convert_layout(gl.max(more, 1), LOGITS_ROW))
    peak = gl.maximum(peak, NO_KEY)
    logits = gl.exp2(logits - peak[:, None])
    more = gl.exp2(more - gl.convert_layout(peak, MORE_ROW)[:, None])
    total = gl.sum(logits, 1) + gl.convert_layout(gl.sum(more, 1), LOGITS_ROW)
    factor = gl.where(total == 0, 0.0, 1 / (total + gl.exp2(sink - peak)))
    weights = gl.convert_layout(logits.to(gl.bfloat16), WEIGHTS)
    more_weights = gl.convert_layout(more.to(gl.bfloat16), WEIGHTS)
    return weights, more_weights, gl.convert_layout(factor, OUTPUT_ROW)


@gluon.jit
def _fresh_zero():
    """Zero, unknown to the compiler: an index through it keeps the matrix descriptors from being hoisted and spilled."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _product(weights, more, keys, extra, chunk: gl.constexpr):
    """Start a chunk of the output."""
    index = chunk + _fresh_zero()
    o = gl.zeros([ROWS, CHUNK], gl.float32, OUTPUT)
    o = warpgroup_mma(weights, keys.index(index), o, use_acc=False, is_async=True)
    return warpgroup_mma(more, extra.index(index), o, is_async=True)


@gluon.jit
def _store(o, out, first, stop, cos, sin, chunk: gl.constexpr):
    """Write a chunk of heads; the last one is rotated back in float32, rounded before and after."""
    o = o.to(gl.bfloat16)
    if chunk == CHUNKS - 1:
        a, b = o.to(gl.float32).reshape([ROWS, ROPE // 2, 2]).split()
        row = gl.arange(0, ROWS, gl.SliceLayout(1, a.type.layout))
        pair = gl.arange(0, ROPE // 2, gl.SliceLayout(0, a.type.layout))
        token = first + row // HEADS
        angle = token[:, None] * (ROPE // 2) + pair[None, :]
        real = (token < stop)[:, None] & (pair >= 0)[None, :]
        c, s = gl.load(cos + angle, mask=real, other=1.0), gl.load(sin + angle, mask=real, other=0.0)
        o = gl.join(a * c + b * s, b * c - a * s).reshape([ROWS, ROPE]).to(gl.bfloat16)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    channel = chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, STORE))
    place = out + first.to(gl.int64) * (HEADS * DIM)
    real = (first + row // HEADS < stop)[:, None] & (channel >= 0)[None, :]
    gl.store(place + (row[:, None] * DIM + channel[None, :]), gl.convert_layout(o, STORE), mask=real)


@gluon.jit
def _range(ranges, first_rows, tile, num_tiles):
    """Tokens of a tile, and its first row of the buffer."""
    tile = gl.minimum(tile, num_tiles - 1)
    first = gl.load(ranges + 2 * tile)
    return first, gl.load(ranges + 2 * tile + 1), gl.load(first_rows + first)


@gluon.jit(do_not_specialize=["num_tiles", "window"])
def window_kernel(
    q_desc, key_desc, extra_desc, ranges, first_rows, hidden, sink_ptr, cos, sin, out, scale, num_tiles, window
):
    q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, CHUNK], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, KEYS, CHUNK], TILE)
    extra = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, EXTRA, CHUNK], TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(CHUNKS):
        mbarrier.init(full.index(i), count=1)
    thread_barrier()

    program, count = gl.program_id(0), gl.num_programs(0)
    begin = (program.to(gl.int64) * num_tiles // count).to(gl.int32)
    end = ((program + 1).to(gl.int64) * num_tiles // count).to(gl.int32)
    sink = gl.load(sink_ptr + gl.arange(0, ROWS, LOGITS_ROW) % HEADS) * LOG2_E
    first, stop, row = _range(ranges, first_rows, begin, num_tiles)
    some = begin < end
    for c in gl.static_range(STAGES):
        _copy_q(q_desc, first, c, q, q_full, some)
    for c in gl.static_range(CHUNKS):
        _copy_keys(key_desc, extra_desc, row, c, keys, extra, full, some)

    phase = 0
    for tile in range(begin, end):
        more_tiles = tile + 1 < end
        next_first, next_stop, next_row = _range(ranges, first_rows, tile + 1, num_tiles)
        logits = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
        more = gl.zeros([ROWS, EXTRA], gl.float32, MORE)
        for c in gl.static_range(CHUNKS):
            mbarrier.wait(q_full.index(c % STAGES), c // STAGES)
            mbarrier.wait(full.index(c), phase)
            zero = _fresh_zero()
            its_q = q.index(c % STAGES + zero)
            logits = warpgroup_mma(its_q, keys.index(c + zero).permute((1, 0)), logits, use_acc=c > 0, is_async=True)
            more = warpgroup_mma(its_q, extra.index(c + zero).permute((1, 0)), more, use_acc=c > 0, is_async=True)
            if c > 0:
                logits, more = warpgroup_mma_wait(2, deps=[logits, more])
                thread_barrier()  # everyone has read chunk c - 1
                if c + STAGES <= CHUNKS:
                    _copy_q(q_desc, first, c + STAGES - 1, q, q_full, True)
                else:
                    _copy_q(q_desc, next_first, c + STAGES - 1 - CHUNKS, q, q_full, more_tiles)
        logits, more = warpgroup_mma_wait(0, deps=[logits, more])
        thread_barrier()
        _copy_q(q_desc, next_first, STAGES - 1, q, q_full, more_tiles)

        weights, more_weights, factor = _weights(
            logits * scale, more * scale, first, stop, hidden, sink, window
        )
        o = _product(weights, more_weights, keys, extra, 0)
        for c in gl.static_range(CHUNKS):
            if c < CHUNKS - 1:
                ahead = _product(weights, more_weights, keys, extra, c + 1)
                done = warpgroup_mma_wait(2, deps=[o])
            else:
                done = warpgroup_mma_wait(0, deps=[o])
            thread_barrier()  # everyone has read chunk c
            _copy_keys(key_desc, extra_desc, next_row, c, keys, extra, full, more_tiles)
            _store(done * factor[:, None], out, first, stop, cos, sin, c)
            if c < CHUNKS - 1:
                o = ahead
        first, stop, row = next_first, next_stop, next_row
        phase ^= 1


def window_prefill(
    q: Tensor, buffer: Tensor, tiles: WindowTiles, sink: Tensor, scale: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """What `window_attention` does, for `[T, 64, 512]` in bfloat16 and windows of 128."""
    out, num_tiles = torch.empty_like(q), len(tiles.ranges)
    if num_tiles:
        programs = min(num_tiles, torch.cuda.get_device_properties(q.device).multi_processor_count)
        window_kernel[(programs,)](
            TensorDescriptor.from_tensor(q.flatten(0, 1), [ROWS.value, CHUNK.value], TILE.value),
            TensorDescriptor.from_tensor(buffer, [KEYS.value, CHUNK.value], TILE.value),
            TensorDescriptor.from_tensor(buffer, [EXTRA.value, CHUNK.value], TILE.value),
            tiles.ranges,
            tiles.layout.first,
            tiles.layout.hidden,
            sink,
            cos,
            sin,
            out,
            scale * LOG2E,
            num_tiles,
            tiles.window,
            num_warps=8,
        )
    return out
