"""The packed rows of a step, and where their cache entries lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minideepinfer.model.rope import Angles, RotaryTable
from minideepinfer.operators import Batch, Phase


@dataclass(frozen=True, eq=False)
class EntryRows:
    """The global entries that a step completes at one ratio: N entries, request after request, ascending.

    Attributes:
        rows: int64 `[N]`, row of an entry's last token.
        rings: int64 `[N]`, ring of its request (where a pending pair lies).
        pending: bool `[N]`, its first token was processed in an earlier step.
        positions: int64 `[N]`, position of its first token.
        request_ids: int64 `[N]`.
        pages: int64 `[N]` and `places` int64 `[N]`: where it is stored.
        open_rows: int64 `[M]`, last rows of requests that leave a pair unfinished, and `open_rings` int64 `[M]`.
    """

    rows: Tensor
    rings: Tensor
    pending: Tensor
    positions: Tensor
    request_ids: Tensor
    pages: Tensor
    places: Tensor
    open_rows: Tensor
    open_rings: Tensor
    _angles: dict[RotaryTable, Angles] = field(default_factory=dict, init=False)

    def angles(self, rope: RotaryTable) -> Angles:
        """Those of the entries' positions, the same for all layers of a table."""
        if rope not in self._angles:
            self._angles[rope] = rope.angles(self.positions)
        return self._angles[rope]


class RingPlaces(NamedTuple):
    """Rows whose window entries a ring still holds after the step, int64 `[N]`, and where: `rings`, `slots` `[N]`."""

    rows: Tensor
    rings: Tensor
    slots: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """T packed rows of R requests, decode requests first; `batches` are the same rows by phase.

    Attributes are those of `Batch`, over all phases.
    """

    seqlens: tuple[int, ...]
    context_lens: tuple[int, ...]
    positions: Tensor
    request_ids: Tensor
    ring_table: Tensor
    block_table: Tensor
    page_tokens: int
    batches: tuple[Batch, ...]
    _ring_places: dict[int, RingPlaces] = field(default_factory=dict)
    _entries: dict[int, EntryRows] = field(default_factory=dict)
    _angles: dict[RotaryTable, Angles] = field(default_factory=dict, init=False)

    @classmethod
    def pack(
        cls,
        seqlens: Sequence[int],
        context_lens: Sequence[int],
        phases: Sequence[Phase],
        window_start: Sequence[int],
        ring_table: Tensor,
        block_table: Tensor,
        page_tokens: int,
    ) -> Rows:
        """Pack requests; decode requests must come first.

        Args:
            seqlens: new rows per request.
            context_lens: tokens before them.
            phases: phase per request.
            window_start: first position whose window entry exists, per request.
            ring_table: int64 `[R]` on the compute device, as is all that follows.
            block_table: int32 `[R, max_pages]`.
            page_tokens: tokens per page.
        """
        assert list(phases) == sorted(phases), "decode requests come first"  # "decode" < "prefill"
        device = ring_table.device
        lens, starts = torch.tensor(seqlens, dtype=torch.int64), torch.tensor(context_lens, dtype=torch.int64)
        request_ids = torch.repeat_interleave(torch.arange(len(seqlens)), lens)
        first_row = lens.cumsum(0) - lens
        positions = torch.arange(int(lens.sum())) - (first_row - starts)[request_ids]
        floors = torch.tensor(window_start, dtype=torch.int64)
        batches, begin = [], 0
        for phase in (Phase.DECODE, Phase.PREFILL):
            count = sum(p == phase for p in phases)
            if not count:
                continue
            part, row = slice(begin, begin + count), int(lens[:begin].sum())
            rows = slice(row, row + int(lens[part].sum()))
            cu_seqlens = torch.zeros(count + 1, dtype=torch.int32)
            cu_seqlens[1:] = lens[part].cumsum(0)
            batch = Batch(
                phase=phase,
                seqlens=tuple(seqlens[part]),
                context_lens=tuple(context_lens[part]),
                cu_seqlens=cu_seqlens.to(device),
                positions=positions[rows].to(device),
                request_ids=(request_ids[rows] - begin).to(device),
                ring_table=ring_table[part],
                window_start=floors[part].to(device),
                block_table=block_table[part],
                page_tokens=page_tokens,
            )
            batches.append(batch)
            begin += count
        return cls(
            seqlens=tuple(seqlens),
            context_lens=tuple(context_lens),
            positions=positions.to(device),
            request_ids=request_ids.to(device),
            ring_table=ring_table,
            block_table=block_table,
            page_tokens=page_tokens,
            batches=tuple(batches),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.seqlens)

    @property
    def phase(self) -> Phase:
        """What once-a-step operators are called with: prefill if any row is."""
        return Phase.PREFILL if any(b.phase == Phase.PREFILL for b in self.batches) else Phase.DECODE

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Cut a packed tensor `[T, ...]` into those of the batches."""
        parts: tuple[Tensor, ...] = packed.split([batch.num_tokens for batch in self.batches])
        return parts

    def angles(self, rope: RotaryTable) -> Angles:
        """Those of the rows' positions, the same for all layers of a table."""
        if rope not in self._angles:
            self._angles[rope] = rope.angles(self.positions)
        return self._angles[rope]

    def ring_places(self, ring_size: int) -> RingPlaces:
        """Where the window entries of these rows go in rings of a size; of a request with more rows, the last ones."""
        if ring_size not in self._ring_places:
            parts, begin = [torch.empty(0, dtype=torch.int64)], 0
            for length in self.seqlens:
                parts.append(torch.arange(begin + max(0, length - ring_size), begin + length))
                begin += length
            rows = torch.cat(parts).to(self.positions.device)
            rings, slots = self.ring_table[self.request_ids[rows]], self.positions[rows] % ring_size
            self._ring_places[ring_size] = RingPlaces(rows, rings, slots)
        return self._ring_places[ring_size]

    def entries(self, ratio: int) -> EntryRows:
        """The entries these rows complete at a ratio, and the pairs they leave open."""
        if ratio not in self._entries:
            self._entries[ratio] = self._find_entries(ratio)
        return self._entries[ratio]

    def _find_entries(self, ratio: int) -> EntryRows:
        lens, starts = (torch.tensor(x, dtype=torch.int64) for x in (self.seqlens, self.context_lens))
        ends, first = starts + lens, starts // ratio
        counts = ends // ratio - first
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        entry = torch.arange(len(owner)) - (counts.cumsum(0) - counts - first)[owner]
        row_of_position_0 = lens.cumsum(0) - ends
        unpaired = torch.nonzero((lens > 0) & (ends % ratio != 0)).flatten()
        per_page, device = self.page_tokens // ratio, self.positions.device
        host = {
            "rows": row_of_position_0[owner] + (entry + 1) * ratio - 1,
            "pending": entry * ratio < starts[owner],
            "positions": entry * ratio,
            "request_ids": owner,
            "places": entry % per_page,
            "open_rows": lens.cumsum(0)[unpaired] - 1,
        }
        owner, page, unpaired = owner.to(device), (entry // per_page).to(device), unpaired.to(device)
        return EntryRows(
            **{name: value.to(device) for name, value in host.items()},
            pages=self.block_table[owner, page].long(),
            rings=self.ring_table[owner],
            open_rings=self.ring_table[unpaired],
        )
