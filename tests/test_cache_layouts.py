"""Storage layouts: the bytes of `released` by a scalar reading of the spec, and that they lose nothing that QDQ gives.

Scale and codes of a group follow from its largest magnitude, and each code from its own number and that scale. So it is
enough to see every scale with every largest code that can come with it, and beside that every smaller code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.cache.entry_bytes import ENTRY_KINDS, PACKINGS, EntryKind, entry_bytes
from minideepinfer.cache.layouts import LAYOUTS, EntryFormat, allocate, cache_layout
from minideepinfer.config import EngineConfig
from minideepinfer.errors import ConfigError
from minideepinfer.quantization import E2M1_VALUES, encode_nvfp4, qdq_fp8, qdq_mxfp4, qdq_nvfp4
from minideepinfer.testing.tensors import same_bits
from test_quantization import e2m1, e4m3, e8m0, random_bytes, seeds
from torch import Tensor

RELEASED = LAYOUTS["released"]
E4M3 = torch.tensor([e4m3(byte) for byte in range(127)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dataclass(frozen=True)
class Kind:
    """A kind of entry: its rounding, its group, and the scalar meaning of a row of bytes."""

    name: EntryKind
    qdq: Callable[[Tensor], Tensor]
    group: int
    scale: Callable[[int], float]

    @property
    def entries(self) -> EntryFormat:
        return getattr(RELEASED, self.name)  # type: ignore[no-any-return]

    def value(self, row: list[int], width: int, channel: int) -> float:
        """Channel of a row, as the spec says it: codes first, low nibble = even channel, then the scales."""
        if self.name == "window":
            code, scales = e4m3(row[channel]), row[width:]
        else:
            byte, scales = row[channel // 2], row[width // 2 :]
            code = e2m1(byte >> 4 if channel % 2 else byte & 15)
        return code * self.scale(scales[channel // self.group])


KINDS = (
    Kind("window", qdq_fp8, 32, e8m0),
    Kind("main", qdq_nvfp4, 16, e4m3),
    Kind("index", qdq_mxfp4, 32, e8m0),
)
ALL_KINDS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def kept(kind: Kind, values: Tensor) -> Tensor:
    return kind.entries.decode(kind.entries.encode(values), values.dtype)


def test_sizes_are_the_released_ones() -> None:
    """Spec 5: 528, 288 and 68 bytes, and 890 bytes a token with 2.5 entries to it."""
    sizes = {
        kind: entry_bytes("released", kind, width) for kind, width in zip(ENTRY_KINDS, (512, 512, 128), strict=True)
    }
    assert sizes == {"window": 528, "main": 288, "index": 68}
    assert 2.5 * (sizes["main"] + sizes["index"]) == 890
    assert set(PACKINGS) == set(LAYOUTS) == {"float32", "bf16", "released"}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ENTRY_KINDS)
def test_a_pool_has_as_many_bytes_as_are_counted(name: str, kind: EntryKind) -> None:
    entries: EntryFormat = getattr(cache_layout(name), kind)
    pool = allocate(entries, 3, 4, 96, torch.device("cpu"))
    assert pool.shape == (3, 4, entries.row_size(96)) and pool.nbytes == 12 * entry_bytes(name, kind, 96)
    values = torch.randn(5, 96)
    rows = entries.encode(values)
    assert (rows.shape, rows.dtype) == ((5, pool.shape[2]), pool.dtype)
    assert entries.decode(rows, torch.bfloat16).dtype == torch.bfloat16
    assert entries.decode(rows[:0], torch.float32).shape == (0, 96)


@ALL_KINDS
@given(seed=seeds, groups=st.integers(1, 4), rows=st.integers(1, 3))
def test_bytes_mean_what_the_spec_says(kind: Kind, seed: int, groups: int, rows: int) -> None:
    """Any bytes at all; NaN where the spec has NaN."""
    width = kind.group * groups
    table = random_bytes(seed, rows, kind.entries.row_size(width))
    expected = [kind.value(row, width, channel) for row in table.tolist() for channel in range(width)]
    found = kind.entries.decode(table, torch.float32).flatten()
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(np.array(expected).astype(np.float32))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert same_bits(found[~found.isnan()], wanted[~wanted.isnan()])


def fp8_groups() -> Iterator[Tensor]:
    """Every exponent that QDQ-FP8 can have (amax from 1e-4 to the largest number) x every largest code x every code."""
    for exponent in range(-22, 121):
        for largest in range(127):
            codes = E4M3[: largest + 1]
            signed = torch.cat([codes, -codes])
            padded = torch.nn.functional.pad(signed, (0, -len(signed) % 31)).view(-1, 31)
            group = torch.cat([padded, codes[-1].expand(len(padded), 1)], 1)
            yield group * 2.0**exponent


def mxfp4_groups() -> Iterator[Tensor]:
    """Every exponent x every largest code x every code."""
    for exponent in range(-126, 127):
        for largest in range(8):
            codes = torch.tensor(E2M1_VALUES[: largest + 1])
            signed = torch.nn.functional.pad(torch.cat([codes, -codes]), (0, 32 - 2 * len(codes)))
            yield signed.unsqueeze(0) * 2.0**exponent


def nvfp4_largest_codes() -> dict[int, set[float]]:
    """By scale byte, the largest codes that come with it: at both ends of the largest magnitudes that choose it.

    The largest code grows with the largest magnitude, so that the ends are all there is.
    """
    found: dict[int, set[float]] = {byte: set() for byte in range(1, 127)}
    for byte in found:
        lower, upper = (e4m3(byte - 1) + e4m3(byte)) / 2, (e4m3(byte) + e4m3(byte + 1 if byte < 126 else byte)) / 2
        for end in (lower, upper) if byte > 1 else (0.0, upper):
            amax = np.float32(end * 6)
            for step in (-2, -1, 0, 1, 2):
                group = torch.zeros(16)
                group[3] = float(amax + step * np.spacing(amax)) if amax else abs(step) * 1e-3
                packed, scale = encode_nvfp4(group)
                chosen = int(scale.view(torch.uint8))
                found[chosen].add(E2M1_VALUES[int(packed[1]) >> 4])
    return found


def nvfp4_groups() -> Iterator[Tensor]:
    """Every scale x every largest code that comes with it x every code."""
    for byte, most in nvfp4_largest_codes().items():
        for largest in E2M1_VALUES if byte == 1 else most:
            codes = torch.tensor([value for value in E2M1_VALUES if value <= largest])
            signed = torch.nn.functional.pad(torch.cat([codes, -codes]), (0, 16 - 2 * len(codes)))
            yield signed.unsqueeze(0) * e4m3(byte)


@DTYPES
@pytest.mark.parametrize(
    ("kind", "groups"),
    list(zip(KINDS, (fp8_groups, nvfp4_groups, mxfp4_groups), strict=True)),
    ids=["window", "main", "index"],
)
def test_every_group_that_rounding_gives_is_kept(
    kind: Kind, groups: Callable[[], Iterator[Tensor]], dtype: torch.dtype
) -> None:
    """Exhaustive, signs of zero included; 448 times 2^120 is infinite, and comes back so."""
    values = torch.cat(list(groups())).to(dtype)
    assert len(values) > 126
    assert same_bits(kept(kind, values), values)


def test_rounding_main_entries_again_would_not_keep_them() -> None:
    """Why scales are rounded up: 4 x 2·2⁻⁹ would become 6 x 2⁻⁹."""
    assert nvfp4_largest_codes()[2] == {4.0, 6.0}
    assert all(most == {6.0} for byte, most in nvfp4_largest_codes().items() if byte > 2)
    group = torch.zeros(1, 16)
    group[0, 3] = 6 * 1.5 * 2.0**-9
    once = qdq_nvfp4(group)
    assert once[0, 3] == 4 * 2 * 2.0**-9 and qdq_nvfp4(once)[0, 3] == 6 * 2.0**-9
    assert same_bits(kept(KINDS[1], once), once)


@DTYPES
@ALL_KINDS
@given(seed=seeds, magnitude=st.integers(-150, 128), spread=st.integers(0, 40))
def test_whatever_is_rounded_is_kept(kind: Kind, dtype: torch.dtype, seed: int, magnitude: int, spread: int) -> None:
    """Random groups of every size, down to subnormals and up to infinity, with zeros of both signs and maxima."""
    generator = np.random.default_rng(seed)
    exponents = magnitude - generator.integers(0, spread + 1, (4, 96))
    with np.errstate(over="ignore", under="ignore"):
        numbers = (generator.uniform(-2, 2, (4, 96)) * 2.0**exponents).astype(np.float32)
    x = torch.from_numpy(numbers).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    x[0, :48] = 0.0
    x[1, ::3] *= 0.0  # both signs
    x[2, 5], x[2, 50] = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    values = kind.qdq(x)
    assert same_bits(kept(kind, values), values)
    assert kind.entries.stored(values) is values


@DTYPES
def test_what_is_no_number(dtype: torch.dtype) -> None:
    """FP8 keeps NaN and infinities beside numbers, MXFP4 infinities; else their group becomes NaN, and no other."""
    for kind in KINDS:
        for odd in (math.nan, math.inf, -math.inf):
            x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
            values = kind.qdq(x)
            values[1, 40] = odd
            found, at = (
                kept(kind, values),
                slice(40 // kind.group * kind.group, 40 // kind.group * kind.group + kind.group),
            )
            others = torch.ones_like(values, dtype=torch.bool)
            others[1, at] = False
            assert same_bits(found[others], values[others])
            assert found[1, 40].isnan() if math.isnan(odd) or kind.name == "main" else found[1, 40] == odd
            if kind.name == "window" and math.isnan(odd):
                assert torch.equal(found.nan_to_num(7.0), values.nan_to_num(7.0))
            if found[1, 40].isnan() and kind.name != "window":
                assert found[1, at].isnan().all()


def test_plain_layouts_round() -> None:
    entries = cache_layout("bf16").window
    assert entries.stored(torch.tensor([1.0, 1.001])).tolist() == [1.0, 1.0]
    assert entries.encode(torch.tensor([1.001])).dtype == torch.bfloat16


def test_an_unknown_layout() -> None:
    known = r"\['bf16', 'float32', 'released'\]"
    with pytest.raises(ConfigError, match=rf"cache\.layout: 'int3' is unknown; known layouts are {known}"):
        cache_layout("int3")


def test_the_layout_needs_quantised_values() -> None:
    for quantization in ("released", "none"):
        EngineConfig(kv_quantization=quantization, cache={"layout": "bf16"})
    EngineConfig(cache={"layout": "released"})
    with pytest.raises(
        ConfigError, match=r"cache\.layout is released and kv_quantization is none.*set kv_quantization"
    ):
        EngineConfig(kv_quantization="none", cache={"layout": "released"})
