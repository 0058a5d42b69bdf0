"""Consumer side of `kernels.gluon`: two warpgroups turn tiles in shared memory into one query's output.

A block of 64 keys is owned by one warpgroup (even blocks by 0, odd by 1). The owner computes scores and softmax weights
and publishes weights and running maximum; both warpgroups then add the block into their own half of the channels. The
running maximum passes from block to block, so it is the same in both, and so is the order of every sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minideepinfer_attention.kernels.gluon_common import HEADS, LOG2_E, ROPE, fresh_zero, unrotated

BLOCK = gl.constexpr(64)
HALF = gl.constexpr(256)
"""Channels of one warpgroup."""
NO_MAXIMUM = gl.constexpr(-1e20)
"""Where a running maximum starts: finite, and above what a masked key scores."""

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SCORES_ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
OUTPUT_ROW = gl.constexpr(gl.SliceLayout(1, OUTPUT.value))


@gluon.jit
def _scores(tiles, bars, phase, q_phase, first, wg: gl.constexpr):
    """Start the scores `[H, 64]` of the own block, half of the channels after the other, as they arrive."""
    zero = fresh_zero()
    s = gl.zeros([HEADS, BLOCK], gl.float32, SCORES)
    if first:
        mbarrier.wait(bars.q_full[0], q_phase)
    mbarrier.wait(bars.full[2 * wg], phase)
    fence_async_shared()
    keys = tiles.kv[2 * wg].index(zero).permute((1, 0))
    s = warpgroup_mma(tiles.q[0].index(zero), keys, s, use_acc=False, is_async=True)
    if first:
        mbarrier.wait(bars.q_full[1], q_phase)
    mbarrier.wait(bars.full[2 * wg + 1], phase)
    fence_async_shared()
    keys = tiles.kv[2 * wg + 1].index(zero).permute((1, 0))
    return warpgroup_mma(tiles.q[1].index(zero), keys, s, is_async=True)


@gluon.jit
def _publish(s, bias, m, scale, tiles, bars, wg: gl.constexpr):
    """Weights of the own block against the new running maximum, for both warpgroups."""
    s = gl.where(bias[None, :] < 0, bias[None, :], s * scale)  # q may be NaN where there is no key
    new_m = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s - new_m[:, None])
    tiles.maximum[wg].store(new_m)
    weights = p.to(gl.bfloat16)
    tiles.weights[wg].index(0).store(weights)
    fence_async_shared()
    mbarrier.arrive(bars.ready[wg])
    return p, weights, new_m


@gluon.jit
def _add_own(o, m, total, s, bias, scale, tiles, bars, wg: gl.constexpr):
    """Publish and add the own block, whose scores `s` are complete."""
    p, weights, new_m = _publish(s, bias, m, scale, tiles, bars, wg)
    alpha = gl.exp2(m - new_m)
    o = o * gl.convert_layout(alpha, OUTPUT_ROW)[:, None]
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, OUTPUT, 2))
    o = warpgroup_mma(weights, tiles.kv[3 * wg].index(fresh_zero()), o, is_async=True)
    total = total * alpha + gl.sum(p, 1)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(bars.empty[3 * wg])
    return o, new_m, total


@gluon.jit
def _add_other(o, m, total, phase, tiles, bars, wg: gl.constexpr):
    """Start adding the other warpgroup's block."""
    zero = fresh_zero()
    mbarrier.wait(bars.ready[1 - wg], phase)
    new_m = tiles.maximum[1 - wg].load(SCORES_ROW)
    alpha = gl.exp2(m - new_m)
    o = o * gl.convert_layout(alpha, OUTPUT_ROW)[:, None]
    o = warpgroup_mma(tiles.weights[1 - wg].index(zero), tiles.kv[2 - wg].index(zero), o, is_async=True)
    return o, new_m, total * alpha


@gluon.jit
def _add_pair(o, m, total, phase, q_phase, scale, first, last, tiles, bars, wg: gl.constexpr):
    """Add two blocks in order, the even one first. `first`, `last`: of this query."""
    s = _scores(tiles, bars, phase, q_phase, first, wg)
    bias = tiles.bias[wg].load(gl.SliceLayout(0, SCORES))
    if wg == 1:
        o, m, total = _add_other(o, m, total, phase, tiles, bars, wg)
        o, s = warpgroup_mma_wait(0, deps=[o, s])
        mbarrier.arrive(bars.empty[1])
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    if last:
        mbarrier.arrive(bars.q_empty)
    o, m, total = _add_own(o, m, total, s, bias, scale, tiles, bars, wg)
    if wg == 0:
        o, m, total = _add_other(o, m, total, phase, tiles, bars, wg)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(bars.empty[2])
    return o, m, total


@constexpr_function
def _register_bases(width):
    """Eight neighbouring channels, then every 32nd, then the row 8 below."""
    return [[0, 1], [0, 2], [0, 4], *([0, column] for column in (32, 64, 128) if column < width), [8, 0]]


@gluon.jit
def _store(o, out, wg: gl.constexpr, first: gl.constexpr, width: gl.constexpr):
    """Channels `first` to `first + width` of the half; a lane holds 16 bytes, a warp's store full sectors."""
    register_bases: gl.constexpr = _register_bases(width)
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=register_bases,
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )
    row = gl.arange(0, HEADS, gl.SliceLayout(1, layout))
    column = wg * HALF + first + gl.arange(0, width, gl.SliceLayout(0, layout))
    gl.store(out + (row[:, None] * (2 * HALF) + column[None, :]), gl.convert_layout(o, layout))


@gluon.jit
def _halves(o):
    """Left and right half of the columns."""
    return o.reshape([o.shape[0], 2, o.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _store_unrotated(o, out, cos, sin):
    """Store the right half, the last channels rotated back."""
    plain, rest = _halves(o)
    inner, turned = _halves(rest)
    turned = unrotated(turned, cos, sin)
    _store(plain, out, 1, 0, 128)
    _store(inner, out, 1, 128, 64)
    _store(turned, out, 1, 192, 64)


@gluon.jit
def attend(wg: gl.constexpr, task, tiles, bars):
    """The loop over queries of warpgroup `wg`: every n-th, n the number of programs."""
    scale, sink, cos, sin, out, num_tokens, num_pairs = task
    phase = 0
    q_phase = 0
    if sink is not None:
        sink_logit = gl.load(sink + gl.arange(0, HEADS, SCORES_ROW)) * LOG2_E
    for t in range(gl.program_id(0), num_tokens, gl.num_programs(0)):
        o = gl.zeros([HEADS, HALF], gl.float32, OUTPUT)
        m = gl.full([HEADS], NO_MAXIMUM, gl.float32, SCORES_ROW)
        total = gl.zeros([HEADS], gl.float32, SCORES_ROW)
        for pair in range(num_pairs):
            last = pair == num_pairs - 1
            o, m, total = _add_pair(o, m, total, phase, q_phase, scale, pair == 0, last, tiles, bars, wg)
            phase ^= 1
        tiles.total[wg].store(total)
        mbarrier.arrive(bars.summed[wg])
        mbarrier.wait(bars.summed[1 - wg], q_phase)
        total += tiles.total[1 - wg].load(SCORES_ROW)
        q_phase ^= 1
        denominator = total
        if sink is not None:
            denominator += gl.exp2(sink_logit - m)
        factor = gl.where(total > 0, 1 / denominator, 0.0)
        result = (o * gl.convert_layout(factor, OUTPUT_ROW)[:, None]).to(gl.bfloat16)
        row = out + t.to(gl.int64) * (2 * HALF * HEADS)
        if wg == 1 and cos is not None:
            _store_unrotated(result, row, cos + t * (ROPE // 2), sin + t * (ROPE // 2))
        else:
            _store(result, row, wg, 0, 256)
