"""Sparse prefill attention on Hopper, in Gluon."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HEADS = gl.constexpr(64)
HALF = gl.constexpr(256)
BLOCK = gl.constexpr(64)
MASKED = gl.constexpr(-1e30)
NO_MAXIMUM = gl.constexpr(-1e20)


@gluon.jit
def _opaque(index: gl.constexpr):
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [gl.to_tensor(index)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _rows_pointer(window_rows, pool_rows, t, pair, num_selected, T):
    if pair == 0:
        pointer = window_rows + t.to(gl.int64) * 128
    else:
        pointer = pool_rows + (t.to(gl.int64) * num_selected + (pair - 1) * 128)
    return pointer


@gluon.jit
def _copy_half(base, row, smem, half: gl.constexpr, full, layout: gl.constexpr):
    columns = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    offsets = row.to(gl.int64) * (2 * HALF) + half * HALF
    pointers = base + (offsets[:, None] + columns[None, :])
    mask = (row >= 0)[:, None] & (columns >= 0)[None, :]
    async_copy.async_copy_global_to_shared(smem, pointers, mask=mask)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _load_rows(window_rows, pool_rows, t, pair, slot: gl.constexpr, num_selected, T, layout: gl.constexpr):
    pointer = _rows_pointer(window_rows, pool_rows, t, pair, num_selected, T)
    lane = slot * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    limit = gl.where(pair == 0, 128, num_selected - (pair - 1) * 128)
    limit = gl.where(t < T, limit, 0)
    return gl.load(pointer + lane, mask=lane < limit, other=-1)


@gluon.jit
def _produce(q, window, window_rows, pool, pool_rows, T, num_selected, num_pairs, q_smem, kv_smem, row_smem, full, empty, q_full, q_empty):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first, step = gl.program_id(0), gl.num_programs(0)
    row0 = _load_rows(window_rows, pool_rows, first, 0, 0, num_selected, T, layout)
    row1 = _load_rows(window_rows, pool_rows, first, 0, 1, num_selected, T, layout)
    phase = 1
    q_phase = 1
    for t in range(first, T, step):
        for pair in range(num_pairs):
            if pair == 0:
                base = window
            else:
                base = pool
            last = pair == num_pairs - 1
            next_pair = gl.where(last, 0, pair + 1)
            next_t = gl.where(last, t + step, t)
            next0 = _load_rows(window_rows, pool_rows, next_t, next_pair, 0, num_selected, T, layout)
            next1 = _load_rows(window_rows, pool_rows, next_t, next_pair, 1, num_selected, T, layout)
            mbarrier.wait(empty.index(0), phase)
            _copy_half(base, row0, kv_smem.index(0), 0, full.index(0), layout)
            mbarrier.wait(empty.index(1), phase)
            row_smem.index(0).store(row0)
            mbarrier.arrive(full.index(1))
            _copy_half(base, row0, kv_smem.index(1), 1, full.index(1), layout)
            if pair == 0:
                mbarrier.wait(q_empty, q_phase)
                q_row = t * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, layout))
                _copy_half(q, q_row, q_smem.index(0), 0, q_full, layout)
                _copy_half(q, q_row, q_smem.index(1), 1, q_full, layout)
                q_phase ^= 1
            mbarrier.wait(empty.index(2), phase)
            _copy_half(base, row1, kv_smem.index(2), 0, full.index(2), layout)
            mbarrier.wait(empty.index(3), phase)
            row_smem.index(1).store(row1)
            mbarrier.arrive(full.index(3))
            _copy_half(base, row1, kv_smem.index(3), 1, full.index(3), layout)
            row0 = next0
            row1 = next1
            phase ^= 1


@gluon.jit
def _share(T, contiguous: gl.constexpr):
    """The queries of this program: every n-th, or a run of neighbours."""
    program, count = gl.program_id(0), gl.num_programs(0)
    if contiguous:
        first = (program.to(gl.int64) * T // count).to(gl.int32)
        end = ((program + 1).to(gl.int64) * T // count).to(gl.int32)
        step = 1
    else:
        first = program
        end = T
        step = count
    return first, end, step


@gluon.jit
def _copy_changed(window, plan_smem, changed, slot: gl.constexpr, half: gl.constexpr, smem, full, layout: gl.constexpr):
    columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    for group in gl.static_range(4):
        if (changed >> (slot * 4 + group)) & 1 != 0:
            row = plan_smem.slice(slot * BLOCK + group * 16, 16).load(gl.SliceLayout(1, layout))
            pointers = window + (row.to(gl.int64)[:, None] * (2 * HALF) + columns[None, :])
            mask = (row >= 0)[:, None] & (columns >= 0)[None, :]
            async_copy.async_copy_global_to_shared(smem.slice(group * 16, 16), pointers, mask=mask)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _load_ring(window_rows, positions, t, end, layout: gl.constexpr):
    slot = gl.arange(0, 128, layout)
    inside = t < end
    position = gl.load(positions + gl.where(inside, t, 0)).to(gl.int32)
    entry = (slot - position - 1) & 127
    return gl.load(window_rows + t.to(gl.int64) * 128 + entry, mask=(slot >= 0) & inside, other=-1)


@gluon.jit
def _produce_ring(q, window, window_rows, positions, T, q_smem, kv_smem, row_smem, plan_smem, full, empty, q_full, q_empty):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    first, end, step = _share(T, True)
    before = gl.full([128], -2, gl.int32, flat)
    row = _load_ring(window_rows, positions, first, end, flat)
    group = gl.arange(0, 128, flat) // 16
    phase = 1
    for t in range(first, end):
        changed = gl.reduce_or(gl.where(row != before, 1 << group, 0), 0)
        before = row
        row = _load_ring(window_rows, positions, t + 1, end, flat)
        plan_smem.store(before)
        mbarrier.wait(q_empty, phase)
        q_row = t * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, layout))
        _copy_half(q, q_row, q_smem.index(0), 0, q_full, layout)
        _copy_half(q, q_row, q_smem.index(1), 1, q_full, layout)
        for slot in gl.static_range(2):
            mbarrier.wait(empty.index(2 * slot), phase)
            _copy_changed(window, plan_smem, changed, slot, 0, kv_smem.index(2 * slot), full.index(2 * slot), layout)
            mbarrier.wait(empty.index(2 * slot + 1), phase)
            row_smem.index(slot).store(plan_smem.slice(slot * BLOCK, BLOCK).load(flat))
            mbarrier.arrive(full.index(2 * slot + 1))
            _copy_changed(window, plan_smem, changed, slot, 1, kv_smem.index(2 * slot + 1), full.index(2 * slot + 1), layout)
        phase ^= 1


@gluon.jit
def _own(o, m, l, wg: gl.constexpr, phase, scale, last, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_empty):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    zero = _opaque(0)
    s = gl.zeros([HEADS, BLOCK], gl.float32, s_layout)
    mbarrier.wait(full.index(2 * wg), phase)
    fence_async_shared()
    s = warpgroup_mma(q_smem.index(zero), kv_smem.index(zero + 2 * wg).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(full.index(2 * wg + 1), phase)
    fence_async_shared()
    s = warpgroup_mma(q_smem.index(zero + 1), kv_smem.index(zero + 2 * wg + 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(q_empty, pred=last)
    row = row_smem.index(wg).load(gl.SliceLayout(0, s_layout))
    s = gl.where((row >= 0)[None, :], s * scale, MASKED)
    new_m = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s - new_m[:, None])
    alpha = gl.exp2(m - new_m)
    row_sum = gl.sum(p, 1)
    stat_smem.index(2 * wg).store(new_m)
    stat_smem.index(2 * wg + 1).store(row_sum)
    p = p.to(gl.bfloat16)
    p_smem.index(wg).store(p)
    fence_async_shared()
    mbarrier.arrive(ready.index(wg))
    o = o * gl.convert_layout(alpha, o_row)[:, None]
    p = gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))
    o = warpgroup_mma(p, kv_smem.index(zero + 2 * wg + wg), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(empty.index(2 * wg + wg))
    return o, new_m, l * alpha + row_sum


@gluon.jit
def _other(o, m, l, wg: gl.constexpr, phase, kv_smem, p_smem, stat_smem, empty, ready):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = _opaque(0)
    mbarrier.wait(ready.index(1 - wg), phase)
    fence_async_shared()
    new_m = stat_smem.index(2 * (1 - wg)).load(s_row)
    row_sum = stat_smem.index(2 * (1 - wg) + 1).load(s_row)
    alpha = gl.exp2(m - new_m)
    o = o * gl.convert_layout(alpha, o_row)[:, None]
    o = warpgroup_mma(p_smem.index(zero + 1 - wg), kv_smem.index(zero + 2 * (1 - wg) + wg), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(empty.index(2 * (1 - wg) + wg))
    return o, new_m, l * alpha + row_sum


@gluon.jit
def _consume(wg: gl.constexpr, contiguous: gl.constexpr, scale, sink, cos, sin, out, T, num_pairs, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_full, q_empty):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    phase = 0
    q_phase = 0
    first, end, step = _share(T, contiguous)
    for t in range(first, end, step):
        o = gl.zeros([HEADS, HALF], gl.float32, o_layout)
        m = gl.full([HEADS], NO_MAXIMUM, gl.float32, s_row)
        l = gl.zeros([HEADS], gl.float32, s_row)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for pair in range(num_pairs):
            last = pair == num_pairs - 1
            if wg == 1:
                o, m, l = _other(o, m, l, wg, phase, kv_smem, p_smem, stat_smem, empty, ready)
            o, m, l = _own(o, m, l, wg, phase, scale, last, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_empty)
            if wg == 0:
                o, m, l = _other(o, m, l, wg, phase, kv_smem, p_smem, stat_smem, empty, ready)
            phase ^= 1
        if sink is not None:
            head = gl.arange(0, HEADS, s_row)
            denominator = l + gl.exp2(gl.load(sink + head) * 1.4426950408889634 - m)
        else:
            denominator = l
        factor = gl.where(l > 0, 1 / denominator, 0.0)
        o = (o * gl.convert_layout(factor, o_row)[:, None]).to(gl.bfloat16)
        if wg == 1 and cos is not None:
            pairs = o.to(gl.float32).reshape([HEADS, HALF // 2, 2])
            a, b = pairs.split()
            p_layout: gl.constexpr = a.type.layout
            c = gl.arange(0, HALF // 2, gl.SliceLayout(0, p_layout)) - (HALF // 2 - 32)
            cosine = gl.load(cos + t * 32 + c, mask=c >= 0, other=1.0)[None, :]
            sine = gl.load(sin + t * 32 + c, mask=c >= 0, other=0.0)[None, :]
            turned = gl.join(a * cosine + b * sine, b * cosine - a * sine)
            o = gl.convert_layout(turned.reshape([HEADS, HALF]).to(gl.bfloat16), o_layout)
        store_layout: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 256])
        o = gl.convert_layout(o, store_layout)
        row = gl.arange(0, HEADS, gl.SliceLayout(1, store_layout))
        column = wg * HALF + gl.arange(0, HALF, gl.SliceLayout(0, store_layout))
        gl.store(out + t.to(gl.int64) * (2 * HALF * HEADS) + (row[:, None] * (2 * HALF) + column[None, :]), o)


@gluon.jit
def sparse_prefill_kernel(q, window, window_rows, pool, pool_rows, sink, cos, sin, out, T, num_selected, scale):
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], tile)
    kv_smem = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK, HALF], tile)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, BLOCK], tile)
    row_smem = gl.allocate_shared_memory(gl.int32, [2, BLOCK], flat)
    stat_smem = gl.allocate_shared_memory(gl.float32, [4, HEADS], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=128 + i % 2)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(q_full, count=256)
    mbarrier.init(q_empty, count=2)
    contiguous: gl.constexpr = False
    num_pairs = 1 + (num_selected + 127) // 128
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), contiguous, scale, sink, cos, sin, out, T, num_pairs, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_full, q_empty)),
            (_consume, (gl.constexpr(1), contiguous, scale, sink, cos, sin, out, T, num_pairs, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_full, q_empty)),
            (_produce, (q, window, window_rows, pool, pool_rows, T, num_selected, num_pairs, q_smem, kv_smem, row_smem, full, empty, q_full, q_empty)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[216, 72],
    )


@gluon.jit
def window_prefill_kernel(q, window, window_rows, positions, sink, cos, sin, out, T, scale):
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], tile)
    kv_smem = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK, HALF], tile)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, BLOCK], tile)
    row_smem = gl.allocate_shared_memory(gl.int32, [2, BLOCK], flat)
    stat_smem = gl.allocate_shared_memory(gl.float32, [4, HEADS], flat)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=128 + i % 2)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(q_full, count=256)
    mbarrier.init(q_empty, count=2)
    plan_smem = gl.allocate_shared_memory(gl.int32, [128], flat)
    contiguous: gl.constexpr = True
    num_pairs = 1
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), contiguous, scale, sink, cos, sin, out, T, num_pairs, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_full, q_empty)),
            (_consume, (gl.constexpr(1), contiguous, scale, sink, cos, sin, out, T, num_pairs, q_smem, kv_smem, row_smem, p_smem, stat_smem, full, empty, ready, q_full, q_empty)),
            (_produce_ring, (q, window, window_rows, positions, T, q_smem, kv_smem, row_smem, plan_smem, full, empty, q_full, q_empty)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[216, 72],
    )


def sparse_prefill(q, window, window_rows, pool, pool_rows, sink, scale, cos, sin, out):
    num_tokens = q.shape[0]
    if num_tokens:
        grid = (min(num_tokens, torch.cuda.get_device_properties(q.device).multi_processor_count),)
        sparse_prefill_kernel[grid](
            q, window, window_rows, pool, pool_rows, sink, cos, sin, out,
            num_tokens, pool_rows.shape[1], scale * 1.4426950408889634, num_warps=4,
        )
    return out


def window_prefill(q, window, window_rows, positions, sink, scale, cos, sin, out):
    num_tokens = q.shape[0]
    if num_tokens:
        grid = (min(num_tokens, torch.cuda.get_device_properties(q.device).multi_processor_count),)
        window_prefill_kernel[grid](
            q, window, window_rows, positions, sink, cos, sin, out,
            num_tokens, scale * 1.4426950408889634, num_warps=4,
        )
    return out
