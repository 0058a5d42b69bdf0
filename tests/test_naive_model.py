"""Rotary table, norm and products that the model and the naive operators share (spec 3.4 and conventions)."""

from __future__ import annotations

import math
from pathlib import Path

import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from minideepinfer.config import ModelConfig
from minideepinfer.model.linear import quantized_linear, rms_norm, wide_linear
from minideepinfer.model.rope import RotaryTable, apply_rope, undo_rope, yarn_range
from minideepinfer.quantization import qdq_fp8
from minideepinfer.testing.rounding import FLOAT32, UNIT

DATA = Path(__file__).parent / "data"
RELEASED = ModelConfig.from_file(DATA / "config.full.json").text_config
TINY = ModelConfig.from_file(DATA / "config.tiny.json").text_config


def test_yarn_ranges_are_those_of_the_specification() -> None:
    assert yarn_range(64, RELEASED.compress_rope_theta, RELEASED.rope_scaling) == (15, 25)
    assert yarn_range(16, TINY.compress_rope_theta, TINY.rope_scaling) == (0, 3)


def test_layers_without_compression_have_plain_frequencies() -> None:
    expected = [10000 ** (-2 * i / 64) for i in range(32)]
    assert RotaryTable.for_ratio(RELEASED, 0).frequencies.tolist() == pytest.approx(expected, rel=2**-23)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressed_layers_scale_slow_pairs_only(ratio: int) -> None:
    frequencies = RotaryTable.for_ratio(RELEASED, ratio).frequencies.tolist()
    base = [160000 ** (-2 * i / 64) for i in range(32)]
    assert frequencies[:16] == pytest.approx(base[:16], rel=2**-23)
    assert frequencies[25:] == pytest.approx([g / 16 for g in base[25:]], rel=2**-23)
    assert frequencies[20] == pytest.approx(base[20] / 16 * 0.5 + base[20] * 0.5, rel=2**-23)


def test_angles_are_float32_products() -> None:
    table = RotaryTable.for_ratio(RELEASED, 1)
    positions = torch.tensor([0, 1, 131071, 1048575])
    cos, sin = table.angles(positions)
    assert cos.dtype is sin.dtype is torch.float32
    angles = positions.float()[:, None] * table.frequencies
    torch.testing.assert_close(cos, angles.double().cos().float(), rtol=0, atol=2**-22)
    torch.testing.assert_close(sin, angles.double().sin().float(), rtol=0, atol=2**-22)
    assert (cos[0] == 1).all() and (sin[0] == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_rotation_is_that_of_the_oracle(seed: int, dtype: torch.dtype, heads: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((5, 2, 24) if heads else (5, 24), generator=generator).to(dtype)
    cos, sin = RotaryTable.for_ratio(TINY, 2).angles(torch.randint(0, 5000, (5,), generator=generator))
    rotated, undone = apply_rope(x, cos, sin), undo_rope(x, cos, sin)
    assert rotated.dtype is dtype and rotated.shape == x.shape
    # Two products and a sum of values up to |x| in float32, then one rounding of up to sqrt(2) |x|.
    bound = float(x.abs().max()) * math.sqrt(2) * (3 * FLOAT32 + UNIT[dtype])
    for row in range(5):
        for head in range(2 if heads else 1):
            index = (row, head) if heads else (row,)
            for result, sign in ((rotated, 1.0), (undone, -1.0)):
                expected = oracles.rope(x[index].double(), cos[row], sin[row], sign)
                assert (result[index].double() - expected).abs().max() <= bound


def test_position_0_is_the_identity_and_undo_inverts() -> None:
    table, x = RotaryTable.for_ratio(TINY, 0), torch.randn(4, 3, 64)
    assert torch.equal(apply_rope(x, *table.angles(torch.zeros(4, dtype=torch.int64))), x)
    cos, sin = table.angles(torch.tensor([1, 7, 100, 4095]))
    rotated = apply_rope(x, cos, sin)
    assert (rotated[..., 48:] - x[..., 48:]).abs().max() > 0.1
    assert torch.equal(rotated[..., :48], x[..., :48])
    torch.testing.assert_close(undo_rope(rotated, cos, sin), x, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


def test_pairs_are_neighbours_never_halves() -> None:
    cos, sin = RotaryTable.for_ratio(TINY, 0).angles(torch.tensor([3]))
    x = torch.zeros(1, 64)
    x[0, 48] = 1.0
    rotated = apply_rope(x, cos, sin)[0]
    assert rotated.nonzero().flatten().tolist() == [48, 49]
    assert rotated[48].item() == pytest.approx(math.cos(3.0), rel=1e-6)
    assert rotated[49].item() == pytest.approx(math.sin(3.0), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(6, 32, generator=generator).to(dtype), torch.randn(32, generator=generator).bfloat16()
    x[2], x[3] = 0.0, x[3] * 1e-12
    y = rms_norm(x, weight, 1e-20)
    assert y.dtype is dtype
    assert (y[2] == 0).all()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    # A mean of 32 squares, its inverse root, two products in float32; one rounding at the end, of a rounded number.
    bound = exact.abs() * (40 * FLOAT32 + 1.01 * UNIT[dtype])
    assert ((y.double() - exact).abs() <= bound).all()


def test_quantized_linear_rounds_its_input_only_when_asked() -> None:
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    assert torch.equal(quantized_linear(x, weight, "none"), F.linear(x, weight))
    assert torch.equal(quantized_linear(x, weight, "released"), F.linear(qdq_fp8(x), weight))
    assert not torch.equal(quantized_linear(x, weight, "released"), F.linear(x, weight))
    assert quantized_linear(x[:0], weight, "none").shape == (0, 8)


def test_a_wide_product_is_not_rounded() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    assert torch.equal(wide_linear(x, weight), F.linear(x.float(), weight.float()))
    assert wide_linear(x[:0], weight).shape == (0, 8)
