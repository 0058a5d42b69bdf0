"""MXFP4 words to the left operand of `wgmma`, in registers (inline assembly; `grouped_twin` says the same in Triton).

A thread of a warpgroup owns two rows (r8 = 0, 1) of its warp's 16 and, of every group of 32 columns, eight in each row:
one 32-bit word. `grouped.pack` has put a word's bits where decoding is cheapest and the words of a thread side by side,
so nothing moves between threads: the instructions below give the operand's registers in order.

bfloat16: a word is four pairs. A pair's bits (sign at 15 and 31, code at 8..6 and 24..22) are that pair times 2^-126,
subnormals included; a shift and a mask bring each of three pairs there (three shifts and merges the fourth), and one
packed product with 2^(126 + exponent) ends it: 19 instructions for 8 weights.

FP8: a word is two selectors. A byte permutation looks four codes up in a table of eight e4m3 numbers, made for the
group's exponent by two multiplications; signs are merged in: 10 instructions for 8 weights. The exponent's byte is
8 (shift + 5), with shift -5..6 relative to the row: over that range all eight magnitudes are exact in e4m3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PAIR = 0x81C081C0


def _bf16_word(word: str, scale: str, out: list[str]) -> str:
    return f"""
    and.b32 {out[0]}, {word}, {_PAIR:#x};
    shl.b32 a, {word}, 3;
    and.b32 {out[1]}, a, {_PAIR:#x};
    shl.b32 a, {word}, 6;
    and.b32 {out[2]}, a, {_PAIR:#x};
    shl.b32 a, {word}, 1;
    shr.u32 b, {word}, 3;
    lop3.b32 a, a, b, 0x80008000, 0xE4;
    shr.u32 b, {word}, 7;
    lop3.b32 a, a, b, 0x00400040, 0xD8;
    and.b32 {out[3]}, a, {_PAIR:#x};
    """ + "".join(f"mul.rn.bf16x2 {register}, {register}, {scale};\n" for register in out)


def _bf16_assembly(half: int) -> str:
    """Two words (r8), and the word of exponents of which this half takes two bytes -> 8 registers (r8, k16, k8)."""
    lines = ["{ .reg .b32 a, b, scale, zero; mov.b32 zero, 0;"]
    for r8 in range(2):
        byte = 2 * half + r8
        lines.append(f"prmt.b32 scale, $10, zero, {0x4040 + 0x0101 * byte:#x}; shl.b32 scale, scale, 7;")
        lines.append(_bf16_word(f"${8 + r8}", "scale", [f"${4 * r8 + pair}" for pair in range(4)]))
    return "\n".join([*lines, "}"])


def _fp8_assembly() -> str:
    """Four words (group, r8) and the word of their exponents -> 8 registers (group, r8, k16)."""
    lines = ["{ .reg .b32 low, high, a;"]
    for j in range(4):
        word, first, second = f"${8 + j}", f"${2 * j}", f"${2 * j + 1}"
        lines.append(f"""
        bfe.u32 a, $12, {8 * j}, 8;
        mad.lo.u32 low, a, 0x01010100, 0x14100800;
        mad.lo.u32 high, a, 0x01010101, 0x24201C18;
        and.b32 a, {word}, 0x77777777;
        prmt.b32 {first}, low, high, a;
        shr.u32 a, a, 16;
        prmt.b32 {second}, low, high, a;
        lop3.b32 {first}, {word}, 0x80808080, {first}, 0xEA;
        shl.b32 a, {word}, 4;
        lop3.b32 {second}, a, 0x80808080, {second}, 0xEA;""")
    return "\n".join([*lines, "}"])


_BF16 = gl.constexpr((_bf16_assembly(0), _bf16_assembly(1)))
_BF16_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
_BF16_RESULTS = gl.constexpr((gl.bfloat16,) * 8)
_FP8 = gl.constexpr(_fp8_assembly())
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
