"""Named storage layouts of the caches: how each kind of entry lies in its pool, written and read.

Whoever reads a pool takes the layout that its problem names, gathers whole rows and decodes them:

    layout = cache_layout(problem.cache_layout)
    values = layout.main.decode(pool.flatten(0, 1)[rows], torch.float32)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minideepinfer.cache.entry_bytes import PACKINGS, Packing
from minideepinfer.errors import ConfigError
from minideepinfer.quantization import (
    decode_fp8_rows,
    decode_mxfp4,
    decode_nvfp4,
    recode_fp8,
    recode_mxfp4,
    recode_nvfp4,
)


class EntryFormat(Protocol):
    """How entries of one kind lie in a pool `[blocks, entries, row]`, the row being `row_size(width)` numbers."""

    @property
    def dtype(self) -> torch.dtype:
        """Of a pool."""
        ...

    def row_size(self, width: int) -> int:
        """Numbers of a pool that hold one entry of `width` channels."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """Values `[..., width]` in any dtype -> rows `[..., row_size(width)]` of a pool."""
        ...

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[..., row_size(width)]` -> values `[..., width]`; the bytes of rows that were never written may be any.

        Args:
            rows: of a pool.
            dtype: of the result; float32 and bfloat16 hold what `encode` was given, if the layout does.
        """
        ...

    def stored(self, values: Tensor) -> Tensor:
        """Values as they will be read back, in the dtype they came in."""
        ...


@dataclass(frozen=True)
class PlainEntries:
    """Entries as plain numbers of one dtype."""

    dtype: torch.dtype

    def row_size(self, width: int) -> int:
        """See `EntryFormat`."""
        return width

    def encode(self, values: Tensor) -> Tensor:
        """See `EntryFormat`; rounds to nearest."""
        return values.to(self.dtype)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """See `EntryFormat`."""
        return rows.to(dtype)

    def stored(self, values: Tensor) -> Tensor:
        """See `EntryFormat`."""
        return values.to(self.dtype).to(values.dtype)


@dataclass(frozen=True)
class GroupedEntries:
    """Entries as bytes: the codes of all channels, then one scale for each group of channels.

    Values must be such as quantise-dequantise gives (spec 3.11): of these every bit is kept, the signs of zeros and
    infinities included, whatever scale they had. But FP4 has no code for NaN, nor can NVFP4 make an infinity: a group
    with one becomes NaN as a whole. FP8 keeps NaN where it is, though not its payload.

    Attributes:
        packing: of the channels.
        recode: values `[..., width]` -> codes and scales.
        decode_parts: codes, scales and a dtype -> values.
    """

    packing: Packing
    recode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode_parts: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    dtype: torch.dtype = torch.uint8

    def row_size(self, width: int) -> int:
        """See `EntryFormat`."""
        return self.packing.entry_bytes(width)

    def encode(self, values: Tensor) -> Tensor:
        """See `EntryFormat`."""
        codes, scales = self.recode(values)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """See `EntryFormat`."""
        code_bytes = self.packing.bits * self.packing.group // 8  # of a group, which has one byte of scale more
        num_codes = rows.shape[-1] * code_bytes // (code_bytes + 1)
        return self.decode_parts(rows[..., :num_codes], rows[..., num_codes:], dtype)

    def stored(self, values: Tensor) -> Tensor:
        """See `EntryFormat`."""
        return values


@dataclass(frozen=True)
class CacheLayout:
    """A layout of all pools.

    Attributes:
        name: operators accept or refuse it by this.
        window: entries of window rings.
        main: global entries.
        index: index keys.
    """

    name: str
    window: EntryFormat
    main: EntryFormat
    index: EntryFormat


def allocate(entries: EntryFormat, blocks: int, per_block: int, width: int, device: torch.device) -> Tensor:
    """An uninitialised pool `[blocks, per_block, row]`; what was not written is never read."""
    return torch.empty(blocks, per_block, entries.row_size(width), dtype=entries.dtype, device=device)


def _plain(name: str, dtype: torch.dtype) -> CacheLayout:
    entries = PlainEntries(dtype)
    return CacheLayout(name, entries, entries, entries)


_PACKED = PACKINGS["released"]

LAYOUTS = {
    layout.name: layout
    for layout in (
        _plain("float32", torch.float32),
        _plain("bf16", torch.bfloat16),
        CacheLayout(
            "released",
            window=GroupedEntries(_PACKED["window"], recode_fp8, decode_fp8_rows),
            main=GroupedEntries(_PACKED["main"], recode_nvfp4, decode_nvfp4),
            index=GroupedEntries(_PACKED["index"], recode_mxfp4, decode_mxfp4),
        ),
    )
}


def cache_layout(name: str) -> CacheLayout:
    """Look a layout up.

    Raises:
        ConfigError: no layout has this name.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"cache.layout: {name!r} is unknown; known layouts are {sorted(LAYOUTS)}")
    return LAYOUTS[name]
