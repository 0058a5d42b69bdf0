"""The instructions that turn MXFP4 words into the left operand of `wgmma`, as PTX for one thread.

A thread of a warpgroup owns two rows (r8 = 0, 1) of its warp's 16 and, of every group of 32 columns, eight in each row:
one 32-bit word. `grouped_pack` has put a word's bits where decoding is cheapest and the words of a thread side by side,
so nothing moves between threads: the instructions give the operand's registers in order.

bfloat16: a word is four pairs. A pair's bits (sign at 15 and 31, code at 8..6 and 24..22) are that pair times 2^-126,
subnormals included; a shift and a mask bring each of three pairs there (three shifts and merges the fourth), and one
packed product with 2^(126 + exponent) ends it: 15 instructions for 8 weights.

FP8: a word is two selectors. A byte permutation looks four codes up in a table of eight e4m3 numbers, made for the
group's exponent by two multiplications; signs are merged in: 10 instructions for 8 weights. The exponent's byte is
8 (shift + 5), with shift -5..6 relative to the row: over that range all eight magnitudes are exact in e4m3.
"""

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


def bf16_assembly(half: int) -> str:
    """Two words (r8), and the word of exponents of which this half takes two bytes -> 8 registers (r8, k16, k8)."""
    lines = ["{ .reg .b32 a, b, scale, zero; mov.b32 zero, 0;"]
    for r8 in range(2):
        byte = 2 * half + r8
        lines.append(f"prmt.b32 scale, $10, zero, {0x4040 + 0x0101 * byte:#x}; shl.b32 scale, scale, 7;")
        lines.append(_bf16_word(f"${8 + r8}", "scale", [f"${4 * r8 + pair}" for pair in range(4)]))
    return "\n".join([*lines, "}"])


def fp8_assembly() -> str:
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
