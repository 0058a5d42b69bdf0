"""Routed experts in the order in which `grouped_kernel` reads them: as many bytes as released, every bit kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from minideepinfer.operators import PackedExperts
from torch import Tensor

BLOCK = 128
"""Rows of weights that a program multiplies with."""
STAGE_BYTES = 128
"""Bytes of an activation row in one stage."""
_BF16_BIAS = 126
"""A decoded pair is its value times 2^-126; an E8M0 byte e means 2^(e - 127): bfloat16's exponent is e + 126."""
_TOP_SHIFT, _LOW_SHIFT = 6, -5
"""Powers of two by which e4m3 holds all e2m1 values exactly, as normal numbers: 6 * 2^6 = 384, 0.5 * 2^-5 = 2^-6."""
LARGEST_EXPONENT = 254 - _BF16_BIAS
"""The largest E8M0 byte that decodes exactly in bfloat16, 2^1."""
WIDEST_ROW = _TOP_SHIFT - _LOW_SHIFT
"""By how much exponents of a row may differ to decode exactly in FP8."""
# Bits of a word for sign, two exponent bits and mantissa bit of its 8 codes.
_BF16_BITS = [
    tuple(bit + 16 * k1 for bit in bits)
    for bits in ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
    for k1 in range(2)
]
_FP8_BITS = [
    (8 * k1 + (3 if k16 else 7), 16 * k16 + 4 * k1 + 2, 16 * k16 + 4 * k1 + 1, 16 * k16 + 4 * k1)
    for k16 in range(2)
    for k1 in range(4)
]


@dataclass(frozen=True, eq=False)
class GroupedMatrix:
    """One matrix of every expert, `[E, N, K]`, N a multiple of 128.

    Attributes:
        words: int32 `[E, N / 128, stages, 8 warps, 8 rows, 4 quarters, groups, 2 rows]`, 8 codes in each.
        exponents: uint8 `[E, N / 128, stages, 8 warps, 8 rows, groups, 2 rows]`, as `grouped_decode` wants them.
        row_scales: float32 `[E, N]` for FP8, what an output is to be multiplied by; empty for bfloat16.
    """

    words: Tensor
    exponents: Tensor
    row_scales: Tensor

    @cached_property
    def boxes(self) -> tuple[Any, Any]:
        """Descriptors of words and exponents for the copy engine, in boxes of one stage, as they lie."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        parts, plain = self.words.shape[-2] // 2, gl.NVMMASharedLayout(0, 32, 2)
        exponents = self.exponents.flatten().view(torch.int32).view(-1, 64 * parts)
        return (
            TensorDescriptor.from_tensor(self.words.view(-1, 256), [4 * parts, 256], plain),
            TensorDescriptor.from_tensor(exponents, [1, 64 * parts], plain),
        )


@dataclass(frozen=True, eq=False)
class GroupedExperts:
    """The routed experts of one rank, for `grouped`.

    Attributes:
        w13: rows of gate and up in turn.
        w2: down.
        fp8: whether products are FP8.
        hidden: H.
        inner: I.
    """

    w13: GroupedMatrix
    w2: GroupedMatrix
    fp8: bool
    hidden: int
    inner: int


def _tables(fp8: bool, device: torch.device) -> Tensor:
    """What each byte, at its place among the four of a word, contributes to it: int32 `[4, 256]`."""
    values = torch.arange(256, dtype=torch.int32)
    tables = torch.zeros(4, 256, dtype=torch.int32)
    for i, bits in enumerate(_FP8_BITS if fp8 else _BF16_BITS):
        code = values >> 4 * (i % 2)  # the low nibble is the first column
        for source, bit in zip((3, 2, 1, 0), bits, strict=True):
            tables[i // 2] |= (code >> source & 1) << bit
    return tables.to(device)


def _pack_expert(packed: Tensor, tables: Tensor, fp8: bool) -> Tensor:
    """uint8 `[N, K / 2]` -> words of one expert."""
    blocks, groups = packed.shape[0] // BLOCK, 4 if fp8 else 2
    # Of a group's 16 bytes a quarter has, in a row: FP8 two runs of two, bfloat16 four single ones.
    split = (2, 4, 2) if fp8 else (4, 4, 1)
    ordered = packed.view(blocks, 8, 8, 2, -1, groups, *split).permute(0, 4, 1, 2, 7, 5, 3, 6, 8)
    first, *others = ordered.reshape(*ordered.shape[:-2], 4).int().unbind(-1)
    words = tables[0][first]
    for table, codes in zip(tables[1:], others, strict=True):
        words |= table[codes]
    return words


def _pack_matrix(packed: Tensor, scales: Tensor, fp8: bool) -> GroupedMatrix:
    """uint8 `[E, N, K / 2]` and E8M0 `[E, N, K / 32]`."""
    tables = _tables(fp8, packed.device)
    words = torch.stack([_pack_expert(expert, tables, fp8) for expert in packed])
    exponents, row_scales = scales.int(), scales.new_empty(0, dtype=torch.float32)
    if fp8:
        top = exponents.amax(-1, keepdim=True)
        row_scales = torch.exp2((top[..., 0] - 127 - _TOP_SHIFT).float())
        exponents = 8 * (exponents - top + _TOP_SHIFT - _LOW_SHIFT)
    else:
        exponents = exponents + _BF16_BIAS
    experts, rows, _ = scales.shape
    exponents = exponents.to(torch.uint8).view(experts, rows // BLOCK, 8, 8, 2, -1, 4 if fp8 else 2)
    return GroupedMatrix(words, exponents.permute(0, 1, 5, 2, 3, 6, 4).contiguous(), row_scales)


def pack_grouped(experts: PackedExperts, fp8: bool) -> GroupedExperts:
    """Reorder the weights; once, when they are loaded.

    Args:
        experts: H and I multiples of 128; exponents up to `LARGEST_EXPONENT`, or for FP8 no more than `WIDEST_ROW`
            apart in a row; none is NaN.
        fp8: whether products are to be FP8.
    """
    w13, scales = experts.w13.transpose(1, 2).flatten(1, 2), experts.w13_scale.transpose(1, 2).flatten(1, 2)
    w2 = _pack_matrix(experts.w2, experts.w2_scale, fp8)
    return GroupedExperts(
        _pack_matrix(w13, scales, fp8), w2, fp8, hidden=experts.w2.shape[1], inner=experts.w13.shape[2]
    )
