"""Number formats against a scalar oracle written from the spec (2.2, 3.11), bit by bit. Cases M2, M3 and L1."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.quantization import (
    decode_e2m1,
    decode_e8m0,
    decode_fp8_blocks,
    decode_fp8_rows,
    decode_mxfp4,
    encode_e2m1,
    encode_mxfp4,
    pack_e2m1,
    qdq_fp8,
    qdq_mxfp4,
    qdq_nvfp4,
    unpack_e2m1,
)
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
seeds = st.integers(0, 2**31 - 1)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


def e2m1(code: int) -> float:
    return -E2M1[code - 8] if code & 8 else E2M1[code]


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)


def float32(values: list[float]) -> Tensor:
    """Rounded from Python's doubles; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(values, dtype=np.float64).astype(np.float32))


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Bitwise equality, signs of zeros included; any NaN equals any other."""
    assert found.shape == expected.shape
    nan = expected.isnan()
    return bool((found.isnan() == nan).all()) and found[~nan].view(torch.int32).equal(expected[~nan].view(torch.int32))


def random_bytes(seed: int, *shape: int, high: int = 256) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8))


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0, 2.0**-127), (1, 2.0**-126), (126, 0.5), (127, 1.0), (134, 128.0), (254, 2.0**127), (255, math.nan)],
)
def test_e8m0_at_its_edges(byte: int, value: float) -> None:
    """Case M2: a subnormal, not 0; NaN, not infinity."""
    one = torch.full((16,), 0x22, dtype=torch.uint8)
    exponent = torch.tensor([byte], dtype=torch.uint8)
    assert same_bits(decode_e8m0(exponent), float32([value]))
    assert same_bits(decode_mxfp4(one, exponent, torch.float32), float32([value] * 32))


def test_all_codes_times_all_exponents() -> None:
    """Case M2: 16 codes x 256 bytes; -0.0 keeps its sign."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 2)
    exponents = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    found = decode_mxfp4(pack_e2m1(codes), exponents, torch.float32)
    expected = float32([e2m1(code) * e8m0(byte) for byte in range(256) for code in [*range(16)] * 2])
    assert same_bits(found.flatten(), expected)
    assert found[127, 8].item() == 0 and torch.signbit(found[127, 8])


def test_all_fp8_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = decode_fp8_rows(codes, torch.full((8,), 127, dtype=torch.uint8), torch.float32)
    assert same_bits(found, float32([e4m3(byte) for byte in range(256)]))


@given(seeds, st.integers(1, 4), st.sampled_from([1, 2, 3, 5]))
def test_mxfp4_rows(seed: int, rows: int, blocks: int) -> None:
    """Low nibble first, 32 logical columns per exponent, an odd number of blocks too."""
    packed, exponents = random_bytes(seed, rows, 16 * blocks), random_bytes(seed + 1, rows, blocks)
    expected = [
        e2m1(int(packed[r, c // 2]) >> 4 * (c % 2) & 15) * e8m0(int(exponents[r, c // 32]))
        for r in range(rows)
        for c in range(32 * blocks)
    ]
    assert same_bits(decode_mxfp4(packed, exponents, torch.float32).flatten(), float32(expected))
    assert pack_e2m1(unpack_e2m1(packed)).equal(packed)


@given(seeds, st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_engram_rows(seed: int, rows: int, groups: int) -> None:
    """The scale column is c // 32 of the same row, not of a block of rows."""
    codes, exponents = random_bytes(seed, rows, 32 * groups), random_bytes(seed + 1, rows, groups)
    expected = [
        e4m3(int(codes[r, c])) * e8m0(int(exponents[r, c // 32])) for r in range(rows) for c in range(32 * groups)
    ]
    assert same_bits(decode_fp8_rows(codes, exponents, torch.float32).flatten(), float32(expected))


@given(seeds, st.integers(1, 70), st.integers(1, 70), st.sampled_from([(32, 32), (16, 32), (32, 16), (128, 128)]))
def test_fp8_blocks(seed: int, rows: int, columns: int, block: tuple[int, int]) -> None:
    """Any shape, ragged edges included."""
    codes = random_bytes(seed, rows, columns)
    exponents = random_bytes(seed + 1, -(-rows // block[0]), -(-columns // block[1]))
    expected = [
        e4m3(int(codes[r, c])) * e8m0(int(exponents[r // block[0], c // block[1]]))
        for r in range(rows)
        for c in range(columns)
    ]
    assert same_bits(decode_fp8_blocks(codes, exponents, torch.float32, block).flatten(), float32(expected))


@pytest.mark.parametrize("shape", [(64, 96), (65, 97)])
def test_scales_that_are_all_different(shape: tuple[int, int]) -> None:
    """Case L1: every block its own power of two; the ragged edge has its own scales."""
    blocks = (-(-shape[0] // 32), -(-shape[1] // 32))
    exponents = (120 + torch.arange(blocks[0] * blocks[1])).to(torch.uint8).reshape(blocks)
    ones = torch.full(shape, 0x38, dtype=torch.uint8)
    found = decode_fp8_blocks(ones, exponents, torch.bfloat16)
    for r in range(shape[0]):
        for c in range(shape[1]):
            assert found[r, c].item() == 2.0 ** (int(exponents[r // 32, c // 32]) - 127)


def test_vector_of_the_release() -> None:
    """Spec 2.2: the first bytes of `layers.0.attn.wkv.weight`."""
    codes = torch.tensor([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], dtype=torch.uint8)
    found = decode_fp8_blocks(codes, torch.tensor([[0x73]], dtype=torch.uint8), torch.bfloat16)
    assert found.tolist() == [
        [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    ]


@given(seeds)
def test_decoded_values_are_exact_in_bfloat16(seed: int) -> None:
    exponents = 20 + random_bytes(seed, 4, 2, high=200)
    packed, codes = random_bytes(seed + 1, 4, 32), random_bytes(seed + 2, 4, 64)
    codes[(codes & 0x7F) == 0x7F] = 0
    assert decode_mxfp4(packed, exponents, torch.bfloat16).float().equal(decode_mxfp4(packed, exponents, torch.float32))
    assert (
        decode_fp8_rows(codes, exponents, torch.bfloat16)
        .float()
        .equal(decode_fp8_rows(codes, exponents, torch.float32))
    )


@pytest.mark.parametrize(("amax", "byte"), [(2.7, 126), (5.5, 127), (1.2, 125), (6.0, 127), (6.5, 128), (7.9, 128)])
def test_choosing_a_scale(amax: float, byte: int) -> None:
    """Case M3: the exponent is rounded up, so the block's maximum never saturates."""
    block = torch.linspace(-0.4, 0.4, 32) * amax
    block[7] = -amax
    packed, exponents = encode_mxfp4(block)
    assert exponents.tolist() == [byte]
    assert amax / e8m0(byte) <= 6
    found = decode_mxfp4(packed, exponents, torch.float32)[7].item()
    assert -found == pytest.approx(amax, abs=e8m0(byte))  # half the widest step of E2M1


def test_rounding_to_e2m1_is_to_the_even_code_and_saturates() -> None:
    """Spec 3.11's thresholds, their neighbours, and both signs."""
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for threshold, code in ties.items():
        below, above = np.nextafter(np.float32(threshold), np.float32([0, 9]))
        lower = max(c for c in range(8) if E2M1[c] < threshold)
        values = torch.tensor([threshold, below, above, -threshold])
        assert encode_e2m1(values).tolist() == [code, lower, lower + 1, code + 8]
    assert encode_e2m1(torch.tensor([100.0, -100.0, 0.0, -0.0])).tolist() == [7, 15, 0, 8]


@given(seeds, st.integers(-8, 8))
def test_quantising_again_changes_nothing(seed: int, magnitude: int) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((3, 96), dtype=np.float32)) * 2.0**magnitude
    for qdq in (qdq_fp8, qdq_mxfp4):
        once = qdq(x)
        assert same_bits(qdq(once), once)


def nearest(x: float, magnitudes: list[float]) -> float:
    """The nearest value, ties to the even code, saturating, sign kept."""
    code = min(range(len(magnitudes)), key=lambda c: (abs(magnitudes[c] - abs(x)), c % 2))
    return math.copysign(magnitudes[code], x)


def power_of_two_above(x: np.float32) -> float:
    mantissa, exponent = math.frexp(float(x))
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def scalar_qdq(group: list[np.float32], name: str) -> list[float]:
    """Spec 3.11, one group, one number at a time."""
    amax = max(abs(x) for x in group)
    fp8_values = [e4m3(byte) for byte in range(127)]
    if name == "fp8":
        scale, values = power_of_two_above(max(amax, np.float32(1e-4)) / np.float32(448)), fp8_values
    elif name == "mxfp4":
        scale, values = power_of_two_above(max(amax, np.float32(6 * 2.0**-126)) / np.float32(6)), list(E2M1)
    else:
        scale, values = nearest(float(max(amax, np.float32(6 * 2.0**-9)) / np.float32(6)), fp8_values), list(E2M1)
    return [nearest(float(x / np.float32(scale)), values) * scale for x in group]


@pytest.mark.parametrize(
    ("name", "qdq", "size"), [("fp8", qdq_fp8, 32), ("mxfp4", qdq_mxfp4, 32), ("nvfp4", qdq_nvfp4, 16)]
)
@given(seed=seeds, magnitude=st.integers(-14, 8))
def test_quantise_and_dequantise(
    name: str, qdq: Callable[[Tensor], Tensor], size: int, seed: int, magnitude: int
) -> None:
    generator = np.random.default_rng(seed)
    groups = generator.standard_normal((3, size), dtype=np.float32) * np.float32(2.0**magnitude)
    groups[0] = np.round(groups[0] * 2 ** (2 - magnitude)) * 2.0 ** (magnitude - 2)  # many ties
    expected = [scalar_qdq(list(group), name) for group in groups]
    assert same_bits(qdq(torch.from_numpy(groups)), float32([x for row in expected for x in row]).reshape(3, size))


def test_groups_of_zeros_stay_zero() -> None:
    x = torch.zeros(2, 64)
    for qdq in (qdq_fp8, qdq_mxfp4, qdq_nvfp4):
        assert same_bits(qdq(x), x)


def test_e4m3_oracle_agrees_with_known_bytes() -> None:
    """The oracle itself, against values that the format's definition names."""
    assert [e4m3(b) for b in (0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE)] == [0.0, 2**-9, 2**-6, 1.0, 448.0, -448.0]
    assert struct.pack("f", e4m3(0x80)) == struct.pack("f", -0.0)
    assert [e2m1(c) for c in (7, 15, 1)] == [6.0, -6.0, 0.5]
    assert decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [e2m1(c) for c in range(16)]
