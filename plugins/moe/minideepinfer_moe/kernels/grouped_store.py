"""What becomes of the sums of `grouped_kernel`: scales, SwiGLU and routing weights, stores.

A thread's sums are two rows of weights (r8) times pairs of tokens; in memory the two are neighbouring outputs, or gate
and up of one. So a store is 4 bytes a thread, 32 in a row of 8 threads, or 2 and 16, and nothing is exchanged. Tokens
come 32 at a time, or registers would not do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# [output, token]: a thread's two outputs first.
_OUTPUTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [0, 1], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 32],
    )
)
_OUTPUTS_16 = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [0, 1], [0, 8]],
        lane_bases=[[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 16],
    )
)


@gluon.jit
def opaque(x):
    """x, so that the compiler does not compute what follows from it ahead of time and hold it in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store_chunk(c, sums, row, end, block):
    """Sums `[128, tokens]` of one block of outputs, for sorted rows from `row` on; from `end` on there are none."""
    if row < end:
        n: gl.constexpr = sums.shape[1]
        pairs = gl.reshape(sums, [8, 2, 8, n])
        if c.UP:
            gate, up = gl.split(gl.permute(pairs, [0, 2, 3, 1]))
            gate, up = gl.reshape(gate, [64, n]), gl.reshape(up, [64, n])
            layout: gl.constexpr = gate.type.layout
            outputs: gl.constexpr = 64
        else:
            layout: gl.constexpr = _OUTPUTS if n == 32 else _OUTPUTS_16
            outputs: gl.constexpr = 128
        rows = opaque(gl.arange(0, n, gl.SliceLayout(0, layout)))
        columns = gl.arange(0, outputs, gl.SliceLayout(1, layout))
        present = rows < end - row
        if c.UP:
            if c.FP8:
                x_scales = gl.expand_dims(gl.load(c.x_scales + row + rows, mask=present, other=0.0), 0)
                scales = c.w_scales + opaque(block) * 128 + columns * 2
                gate = gate * (x_scales * gl.expand_dims(gl.load(scales), 1))
                up = up * (x_scales * gl.expand_dims(gl.load(scales + 1), 1))
            gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
            gate = gl.where(gate > c.limit, c.limit, gate)  # NaN stays NaN, unlike in `gl.minimum`
            up = gl.where(up > c.limit, c.limit, gl.where(up < -c.limit, -c.limit, up))
            weights = gl.load(c.row_weights + row + rows, mask=present, other=0.0)
            y = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up * gl.expand_dims(weights, 0)
        else:
            y = gl.convert_layout(gl.reshape(gl.permute(pairs, [0, 2, 1, 3]), [128, n]), layout, assert_trivial=True)
            if c.FP8:
                x_scales = gl.expand_dims(gl.load(c.x_scales + row + rows, mask=present, other=0.0), 0)
                y = y * (x_scales * gl.expand_dims(gl.load(c.w_scales + opaque(block) * 128 + columns), 1))
        columns += opaque(block) % c.blocks * outputs
        place = gl.expand_dims(rows * c.OUT_WIDTH, 0) + gl.expand_dims(columns, 1)
        target = c.out + row.to(gl.int64) * c.OUT_WIDTH + place
        gl.store(target, y.to(gl.bfloat16), mask=gl.expand_dims(present, 0))


@gluon.jit
def _halves(sums):
    n: gl.constexpr = sums.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(sums, [128, 2, n]), [0, 2, 1]))


@gluon.jit
def _store_64(c, sums, row, end, block):
    a, b = _halves(sums)
    _store_chunk(c, a, row, end, block)
    _store_chunk(c, b, row + 32, end, block)


@gluon.jit
def _store_128(c, sums, row, end, block):
    a, b = _halves(sums)
    _store_64(c, a, row, end, block)
    _store_64(c, b, row + 64, end, block)


@gluon.jit
def store(c, sums, row, end, block):
    """Write one accumulator, `[128, 16..256]`."""
    if sums.shape[1] == 256:
        a, b = _halves(sums)
        _store_128(c, a, row, end, block)
        _store_128(c, b, row + 128, end, block)
    elif sums.shape[1] == 128:
        _store_128(c, sums, row, end, block)
    elif sums.shape[1] == 64:
        _store_64(c, sums, row, end, block)
    else:
        _store_chunk(c, sums, row, end, block)
