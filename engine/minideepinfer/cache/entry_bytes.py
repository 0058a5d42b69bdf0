"""How many bytes an entry takes in each cache layout (spec 5); without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EntryKind = Literal["window", "main", "index"]
"""Window entries, global entries, and the index keys of global entries."""
ENTRY_KINDS: tuple[EntryKind, ...] = ("window", "main", "index")


@dataclass(frozen=True)
class Packing:
    """How channels are packed.

    Attributes:
        bits: of a channel.
        group: channels that share a scale of one byte; 0 = there are no scales.
    """

    bits: int
    group: int = 0

    def entry_bytes(self, width: int) -> int:
        """Bytes of one entry of `width` channels, a multiple of `group`."""
        return width * self.bits // 8 + (width // self.group if self.group else 0)


PACKINGS: Mapping[str, Mapping[EntryKind, Packing]] = {
    "float32": dict.fromkeys(ENTRY_KINDS, Packing(32)),
    "bf16": dict.fromkeys(ENTRY_KINDS, Packing(16)),
    "released": {"window": Packing(8, 32), "main": Packing(4, 16), "index": Packing(4, 32)},
}
"""By layout and kind of entry."""


def entry_bytes(layout: str, kind: EntryKind, width: int) -> int:
    """Bytes of one entry of `width` channels in a layout."""
    return PACKINGS[layout][kind].entry_bytes(width)
