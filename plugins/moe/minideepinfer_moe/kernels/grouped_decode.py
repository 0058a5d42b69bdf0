"""MXFP4 words from shared memory to the left operand of `wgmma`, in registers; see `grouped_assembly`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minideepinfer_moe.kernels.grouped_assembly import bf16_assembly, fp8_assembly

_BF16 = gl.constexpr((bf16_assembly(0), bf16_assembly(1)))
_BF16_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
_BF16_RESULTS = gl.constexpr((gl.bfloat16,) * 8)
_FP8 = gl.constexpr(fp8_assembly())
_FP8_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
_FP8_RESULTS = gl.constexpr((gl.int8,) * 8)
# [warp, row of 8, quarter, word]: a thread's words are neighbours.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
_WORDS_FP8 = gl.constexpr(gl.BlockedLayout([1, 1, 1, 8], [1, 8, 4, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
_HALF = gl.constexpr(gl.BlockedLayout([1, 1, 1, 2], [1, 8, 4, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
# [warp, row of 8, half]: a quad's threads hold the same exponents.
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1]],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        block_bases=[],
        shape=[8, 8, 2],
    )
)


@gluon.jit
def load_words(words, exponents, FP8: gl.constexpr):
    """Both halves of a stage's words and of its exponents, from shared memory."""
    layout: gl.constexpr = _WORDS_FP8 if FP8 else _WORDS
    half: gl.constexpr = _WORDS if FP8 else _HALF
    per_half: gl.constexpr = 4 if FP8 else 2
    rows: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, half))
    pairs = gl.reshape(words.load(layout), [8, 8, 4, 2, per_half])
    first, second = gl.split(gl.permute(pairs, [0, 1, 2, 4, 3]))
    first = gl.convert_layout(first, half, assert_trivial=True)
    second = gl.convert_layout(second, half, assert_trivial=True)
    if FP8:
        a, b = gl.split(exponents.load(_PAIRS))
        a, b = gl.convert_layout(a, rows, assert_trivial=True), gl.convert_layout(b, rows, assert_trivial=True)
    else:
        a = exponents.load(rows)
        b = a
    return first, second, a, b


@gluon.jit
def decode(words, exponents, HALF: gl.constexpr, FP8: gl.constexpr, layout: gl.constexpr):
    """Half a stage: `[128, 32]` bfloat16 or `[128, 64]` e4m3 in the operand's layout."""
    exponents = gl.expand_dims(gl.expand_dims(exponents, 2), 3)
    if FP8:
        o = gl.inline_asm_elementwise(_FP8, _FP8_OPERANDS, [words, exponents], _FP8_RESULTS, is_pure=True, pack=4)
    else:
        o = gl.inline_asm_elementwise(
            _BF16[HALF], _BF16_OPERANDS, [words, exponents], _BF16_RESULTS, is_pure=True, pack=2
        )
    quads = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])), gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    x = gl.join(quads[0], quads[1])
    if FP8:  # warp, row, quarter, k1, k16, r8, group -> warp, r8, row, group, k16, quarter, k1
        operand = gl.reshape(gl.permute(x, [0, 5, 1, 6, 4, 2, 3]), [128, 64]).to(gl.float8e4nv, bitcast=True)
    else:  # warp, row, quarter, k1, k8, k16, r8 -> warp, r8, row, k16, k8, quarter, k1
        operand = gl.reshape(gl.permute(x, [0, 6, 1, 5, 4, 2, 3]), [128, 32])
    return gl.convert_layout(operand, layout, assert_trivial=True)
