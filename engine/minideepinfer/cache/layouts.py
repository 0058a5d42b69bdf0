"""Named storage layouts. The allocator multiplies bytes per entry and knows no format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.errors import ConfigError


@dataclass(frozen=True)
class CacheLayout:
    """Entries stored as plain numbers of one dtype.

    Attributes:
        name: layout name that operators accept or refuse.
        dtype: of a stored channel.
    """

    name: str
    dtype: torch.dtype

    def entry_bytes(self, width: int) -> int:
        """Bytes of one entry of `width` channels."""
        return width * self.dtype.itemsize

    def stored(self, values: Tensor) -> Tensor:
        """Values as they will be read back, in the dtype they came in."""
        return values.to(self.dtype).to(values.dtype)

    def allocate(self, blocks: int, entries: int, width: int, device: torch.device) -> Tensor:
        """An uninitialised pool `[blocks, entries, width]`; what was not written is never read."""
        return torch.empty(blocks, entries, width, dtype=self.dtype, device=device)


LAYOUTS = {
    layout.name: layout for layout in (CacheLayout("float32", torch.float32), CacheLayout("bf16", torch.bfloat16))
}


def cache_layout(name: str) -> CacheLayout:
    """Look a layout up.

    Raises:
        ConfigError: no layout has this name.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"cache.layout: {name!r} is unknown; known layouts are {sorted(LAYOUTS)}")
    return LAYOUTS[name]
