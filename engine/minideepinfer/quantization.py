"""The number formats of the release (spec 2.2 and 3.11): encode, decode, and quantise-dequantise.

Groups run along the last axis. Codes and scales are raw bytes (uint8); float8 tensors are views of them. Every decoded
value is exact in bfloat16, so `dtype` never loses anything.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbouring E2M1 values; a tie goes to the even code (0, 2, 4, 6).
_E2M1_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_TIES_UP = (0.75, 1.75, 3.5)


@cache
def _e8m0_table(device: torch.device) -> Tensor:
    bits = torch.arange(256, dtype=torch.int32) << 23
    bits[0] = 1 << 22  # 2^-127 is a float32 subnormal
    bits[255] = 0x7FC00000
    return bits.view(torch.float32).to(device)


@cache
def _e2m1_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    values = torch.tensor(E2M1_VALUES)
    return torch.cat([values, -values]).to(device, dtype)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """Byte b -> 2^(b-127) in float32; 0 gives the subnormal 2^-127, 255 gives NaN.

    Args:
        exponents: uint8, any shape.
    """
    return _e8m0_table(exponents.device)[exponents.long()]


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Split bytes into codes: byte k holds column 2k in its low and 2k + 1 in its high nibble.

    Args:
        packed: uint8 `[..., K]`.

    Returns:
        uint8 `[..., 2K]`, codes 0..15.
    """
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack_e2m1(codes: Tensor) -> Tensor:
    """The inverse of `unpack_e2m1`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes 0..15 -> values; 8 is -0.0."""
    return _e2m1_table(codes.device, dtype)[codes.long()]


def _grouped(values: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    grouped: Tensor = values.unflatten(-1, (-1, group)) * scales.unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)


def decode_mxfp4(packed: Tensor, exponents: Tensor, dtype: torch.dtype, group: int = 32) -> Tensor:
    """MXFP4 rows, as routed experts are stored.

    Args:
        packed: uint8 `[..., K / 2]`.
        exponents: uint8 `[..., K / group]`.
        dtype: of the result.
        group: logical columns per exponent.

    Returns:
        `[..., K]`.
    """
    return _grouped(decode_e2m1(unpack_e2m1(packed)), decode_e8m0(exponents), group, dtype)


def decode_nvfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype, group: int = 16) -> Tensor:
    """NVFP4 rows without a second-level scale, as main entries are stored.

    Args:
        packed: uint8 `[..., K / 2]`.
        scales: float8_e4m3fn (or its bytes) `[..., K / group]`.
        dtype: of the result.
        group: logical columns per scale.

    Returns:
        `[..., K]`.
    """
    return _grouped(decode_e2m1(unpack_e2m1(packed)), scales.view(torch.float8_e4m3fn).float(), group, dtype)


def decode_fp8_rows(codes: Tensor, exponents: Tensor, dtype: torch.dtype, group: int = 32) -> Tensor:
    """FP8 with one E8M0 per row and group, as Engram tables are stored.

    Args:
        codes: float8_e4m3fn (or its bytes) `[..., K]`.
        exponents: uint8 `[..., K / group]`.
    """
    # Torch multiplies bfloat16 numbers in float32 and rounds once: the same numbers from half the memory.
    return _grouped(codes.view(torch.float8_e4m3fn).to(dtype), decode_e8m0(exponents).to(dtype), group, dtype)


def decode_fp8_blocks(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: tuple[int, int] = (32, 32)
) -> Tensor:
    """Dense FP8 with one E8M0 per block of rows x columns; blocks at the edges may be ragged.

    Args:
        codes: float8_e4m3fn (or its bytes) `[O, K]`.
        exponents: uint8 `[ceil(O / block[0]), ceil(K / block[1])]`.
        block: rows and columns per exponent.
    """
    rows, columns = codes.shape
    scales = decode_e8m0(exponents)
    scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (codes.view(torch.float8_e4m3fn).float() * scales).to(dtype)


def _ceil_exponent(ratio: Tensor) -> Tensor:
    """E8M0 byte of the smallest power of two >= ratio, from the bits: exponent, plus one if the mantissa is not 0."""
    bits = ratio.contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).clamp(0, 254).to(torch.uint8)


def _groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    grouped = x.float().unflatten(-1, (-1, group))
    return grouped, grouped.abs().amax(-1)


def encode_e2m1(x: Tensor) -> Tensor:
    """Round to E2M1, nearest, ties to the even code, saturating; -0.0 keeps its sign.

    Args:
        x: float32, already divided by its scale.

    Returns:
        uint8 codes 0..15.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for threshold in _E2M1_TIES_DOWN:
        code += magnitude > threshold
    for threshold in _E2M1_TIES_UP:
        code += magnitude >= threshold
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def encode_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """FP8 E4M3 with one power-of-two scale per group.

    Args:
        x: `[..., K]`.

    Returns:
        float8_e4m3fn `[..., K]` and uint8 exponents `[..., K / group]`.
    """
    grouped, amax = _groups(x, group)
    exponents = _ceil_exponent(amax.clamp(min=1e-4) / E4M3_MAX)
    scaled = grouped / decode_e8m0(exponents).unsqueeze(-1)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), exponents


def encode_mxfp4(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """MXFP4: packed E2M1 codes uint8 `[..., K / 2]` and exponents uint8 `[..., K / group]`."""
    grouped, amax = _groups(x, group)
    exponents = _ceil_exponent(amax.clamp(min=E2M1_MAX * 2.0**-126) / E2M1_MAX)
    codes = encode_e2m1(grouped / decode_e8m0(exponents).unsqueeze(-1))
    return pack_e2m1(codes.flatten(-2)), exponents


def encode_nvfp4(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """NVFP4 without a second-level scale: packed codes uint8 `[..., K / 2]` and float8_e4m3fn `[..., K / group]`."""
    grouped, amax = _groups(x, group)
    scales = (amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    codes = encode_e2m1(grouped / scales.float().unsqueeze(-1))
    return pack_e2m1(codes.flatten(-2)), scales


def qdq_fp8(x: Tensor, group: int = 32) -> Tensor:
    """QDQ-FP8 (spec 3.11), in x's dtype; NaN and infinities stay."""
    return decode_fp8_rows(*encode_fp8(x, group), dtype=x.dtype, group=group)


def qdq_mxfp4(x: Tensor, group: int = 32) -> Tensor:
    """QDQ-MXFP4 (spec 3.11), in x's dtype; NaN and infinities, for which E2M1 has no code, stay."""
    return torch.where(x.isfinite(), decode_mxfp4(*encode_mxfp4(x, group), dtype=x.dtype, group=group), x)


def qdq_nvfp4(x: Tensor, group: int = 16) -> Tensor:
    """QDQ-NVFP4 (spec 3.11), in x's dtype; NaN and infinities, for which E2M1 has no code, stay."""
    return torch.where(x.isfinite(), decode_nvfp4(*encode_nvfp4(x, group), dtype=x.dtype, group=group), x)


# Numbers that QDQ gave, as codes again. The scale may be another one than QDQ had, the numbers are the same. Infinities
# are taken for the largest numbers, which have no code either and come back as infinities.


def recode_fp8(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Codes and exponents, as of `encode_fp8`, of numbers that `qdq_fp8` gave: decoded they are x, bit by bit.

    NaN stays where it is, as a NaN; the scale of its group is that of the other numbers.
    """
    codes, exponents = encode_fp8(x.float().nan_to_num(0.0), group)
    return codes.view(torch.uint8).masked_fill(x.isnan(), 0x7F).view(torch.float8_e4m3fn), exponents


def recode_mxfp4(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """The same of what `qdq_mxfp4` gave, as of `encode_mxfp4`; a group with a NaN becomes NaN (exponent 255)."""
    packed, exponents = encode_mxfp4(x.float().nan_to_num(0.0), group)
    return packed, exponents.masked_fill(x.isnan().unflatten(-1, (-1, group)).any(-1), 255)


def recode_nvfp4(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """The same of what `qdq_nvfp4` gave, as of `encode_nvfp4`; a group with a NaN or an infinity becomes NaN.

    The scale is rounded up. To nearest, as QDQ does with other numbers, it may be too small where scales are subnormal:
    4 times the scale 2 * 2^-9 would be taken for 6 times 2^-9.
    """
    grouped, amax = _groups(x, group)
    least = (amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp(max=E4M3_MAX)
    nearest = least.to(torch.float8_e4m3fn)
    scales = nearest.view(torch.uint8) + (nearest.float() < least)
    scales = scales.masked_fill(~amax.isfinite(), 0x7F).view(torch.float8_e4m3fn)
    codes = encode_e2m1(grouped / scales.float().unsqueeze(-1))
    return pack_e2m1(codes.flatten(-2)), scales
