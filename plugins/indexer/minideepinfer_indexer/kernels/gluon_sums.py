"""The warpgroups of `scoring_gluon` that multiply, sum heads and store; its docstring has tiling, memory and times."""

# ruff: noqa: RUF005 (Triton knows no starred tuples)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import PropagateNan

KEEP_NAN = gl.constexpr(PropagateNan.ALL)
PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # Triton 3.6 has it with an underscore


@gluon.jit
def consume(
    number: gl.constexpr,
    key_layout: gl.constexpr,
    start,
    stop,
    rows,
    inputs,
    outputs,
    shared,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK: gl.constexpr,
    TOP: gl.constexpr,
    WITH_TOPS: gl.constexpr,
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Every other tile of keys, beginning with the `number`-th.

    With two PARTS heads of the first rows are summed while the other rows' products run.
    """
    head_weights, num_heads, lengths, table, key_scales = inputs
    key_smem, q_smem, q_full, full, empty = shared
    row0, num_rows, _local = rows
    PART: gl.constexpr = ROWS // PARTS
    product: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, PART * HEADS, 256 // key_smem.dtype.primitive_bitwidth]
    )
    OWN: gl.constexpr = 4 if PART > 4 else 2  # consecutive entries of a thread
    summed: gl.constexpr = gl.BlockedLayout([OWN, 1, 4], [ENTRIES // OWN, OWN // 2, 1], [1, 4, 1], [2, 0, 1])
    slot = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(2, summed)))
    its_lengths = ()
    weights = ()
    for part in gl.static_range(PARTS):
        here = part * PART + slot
        its_lengths = its_lengths + (gl.load(lengths + row0 + here, mask=here < num_rows, other=0),)
        weights = weights + (_weights(head_weights, num_heads, row0, num_rows, part * PART, PART, HEADS, product),)
    if SCALED:
        key_scales += gl.load(table) * ENTRIES  # the request's pages follow each other: no look-up before each product
    mbarrier.wait(q_full, 0)

    stage = number
    phase = 0
    for begin in range(start + number * ENTRIES, stop, 2 * ENTRIES):
        key_scale = 1.0
        if SCALED:
            place = gl.arange(0, ENTRIES, gl.SliceLayout(1, gl.SliceLayout(2, summed)))
            key_scale = gl.load(key_scales + begin + place)
        mbarrier.wait(full.index(stage), phase)
        started = ()
        for part in gl.static_range(PARTS):
            started = started + (
                _multiply(key_smem, q_smem, stage, part * PART * HEADS, key_layout, product, ENTRIES, PART * HEADS),
            )
        for part in gl.static_range(PARTS):
            products = warpgroup_mma_wait(PARTS - 1 - part, deps=[started[part]])
            if part == PARTS - 1:
                mbarrier.arrive(empty.index(stage))
            _finish(
                products,
                weights[part],
                key_scale,
                begin,
                its_lengths[part],
                part * PART,
                rows,
                outputs,
                summed,
                PART,
                HEADS,
                BLOCK,
                TOP,
                WITH_TOPS,
                SCALED,
            )
        stage += 2
        if stage >= STAGES:
            stage -= STAGES
            phase ^= 1


@gluon.jit
def _weights(
    head_weights,
    num_heads,
    row0,
    num_rows,
    begin: gl.constexpr,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    product: gl.constexpr,
):
    """Weights of the columns of a product, float32."""
    column = gl.arange(0, PART * HEADS, layout=gl.SliceLayout(0, product))
    slot = begin + column // HEADS
    head = column % HEADS
    mask = (slot < num_rows) & (head < num_heads)
    return gl.load(head_weights + (row0 + slot) * num_heads + head, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _multiply(
    key_smem,
    q_smem,
    stage,
    begin: gl.constexpr,
    key_layout: gl.constexpr,
    product: gl.constexpr,
    ENTRIES: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Start the products of a tile of keys with COLUMNS of the queries."""
    SLAB: gl.constexpr = key_smem.shape[2]
    SLABS: gl.constexpr = q_smem.shape[0]
    ALL: gl.constexpr = q_smem.shape[1] * q_smem.shape[2]
    products = gl.zeros([ENTRIES, COLUMNS], gl.float32, layout=product)
    for slab in gl.static_range(SLABS):
        left = key_smem.index(stage * SLABS + slab)
        right = view(q_smem.index(slab), [ALL, SLAB], key_layout).slice(begin, COLUMNS)
        products = warpgroup_mma(left, right.permute((1, 0)), products, use_acc=slab > 0, is_async=True)
    return products


@gluon.jit
def view(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape."""
    if PUBLIC:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:  # noqa: RET505 (a branch for the compiler)
        return memory._reinterpret(memory.dtype, shape, layout)


@gluon.jit
def _finish(
    products,
    weight,
    key_scale,
    begin,
    length,
    first_slot: gl.constexpr,
    rows,
    outputs,
    summed: gl.constexpr,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK: gl.constexpr,
    TOP: gl.constexpr,
    WITH_TOPS: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Sum the heads of PART rows; store scores and maxima."""
    _row0, num_rows, local = rows
    scores, maxima, tops, width = outputs
    ENTRIES: gl.constexpr = products.shape[0]
    weighted = gl.maximum(products, 0.0, propagate_nan=KEEP_NAN) * weight[None, :]
    # A thread holds two of every eight heads: they are summed in registers, the other threads' through memory.
    own = gl.permute(gl.reshape(weighted, [ENTRIES, PART, HEADS // 8, 4, 2]), (0, 1, 3, 2, 4))
    quarters = gl.sum(gl.reshape(own, [ENTRIES, PART, 4, HEADS // 4]), 3)
    total = gl.sum(gl.convert_layout(quarters, summed), 2)
    if SCALED:
        total *= key_scale[:, None]
    place = begin + gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, gl.SliceLayout(2, summed)))
    _store(scores, total, begin, width, local, first_slot, num_rows)
    seen = gl.where(place[:, None] < length[None, :], total, float("-inf"))
    best = gl.max(gl.reshape(seen, [ENTRIES // BLOCK, BLOCK, PART]), 1)
    _store(maxima, best, begin // BLOCK, width // BLOCK, local, first_slot, num_rows)
    if WITH_TOPS:
        top = gl.max(gl.reshape(best, [ENTRIES // TOP, TOP // BLOCK, PART]), 1)
        _store(tops, top, begin // TOP, width // TOP, local, first_slot, num_rows)


@gluon.jit
def _store(target, values, number, width, local, first_slot: gl.constexpr, num_rows):
    """`values` `[places, rows]` into rows of `target` that are `width` long."""
    layout: gl.constexpr = values.type.layout
    slot = first_slot + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    place = number + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    offsets = (local + slot).to(gl.int64)[None, :] * width + place[:, None]
    gl.store(target + offsets, values, mask=(slot < num_rows)[None, :])
