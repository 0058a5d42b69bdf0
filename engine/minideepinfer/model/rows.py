"""The packed rows of a step, and where their cache entries lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minideepinfer.model.rope import Angles, RotaryTable
from minideepinfer.operators import Batch, Phase
from minideepinfer.transfer import upload


class _Positioned:
    """Things with positions, whose angles are worked out once."""

    positions: Tensor
    _angles: dict[RotaryTable, Angles]

    def angles(self, rope: RotaryTable) -> Angles:
        """Those of the positions, the same for all layers of a table."""
        if rope not in self._angles:
            self._angles[rope] = rope.angles(self.positions)
        return self._angles[rope]


@dataclass(frozen=True, eq=False)
class EntryRows(_Positioned):
    """The global entries that a step completes at one ratio: N entries, request after request, ascending.

    Attributes:
        rows: int64 `[N]`, row of an entry's last token.
        rings: int64 `[N]`, ring of its request, and `slots` int64 `[N]`: where the first half of its pair is kept.
        pending: bool `[N]`, its first token was processed in an earlier step.
        positions: int64 `[N]`, position of its first token.
        request_ids: int64 `[N]`.
        pages: int64 `[N]` and `places` int64 `[N]`: where it is stored.
        half_rows: int64 `[M]`, the last first tokens of pairs, which are kept in case their partner comes in another
            step, be it because tokens were taken back; `half_rings` and `half_slots` int64 `[M]` say where.
    """

    rows: Tensor
    rings: Tensor
    slots: Tensor
    pending: Tensor
    positions: Tensor
    request_ids: Tensor
    pages: Tensor
    places: Tensor
    half_rows: Tensor
    half_rings: Tensor
    half_slots: Tensor
    _angles: dict[RotaryTable, Angles] = field(default_factory=dict, init=False)


class RingPlaces(NamedTuple):
    """Rows whose window entries rings hold after the step, int64 `[N]`, and their slots, counted over all rings."""

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True, eq=False)
class Rows(_Positioned):
    """T packed rows of R requests, decode requests first; `batches` are the same rows by phase.

    Attributes are those of `Batch`, over all phases, and one more.

    Attributes:
        shared_lens: first tokens of each request whose global entries are there already and are not written again.
    """

    seqlens: tuple[int, ...]
    context_lens: tuple[int, ...]
    positions: Tensor
    request_ids: Tensor
    ring_table: Tensor
    block_table: Tensor
    page_tokens: int
    batches: tuple[Batch, ...]
    shared_lens: tuple[int, ...]
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
        shared_lens: Sequence[int] = (),
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
            shared_lens: see `Rows`, multiples of every ratio; empty = none.
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
                cu_seqlens=upload(cu_seqlens, device),
                positions=upload(positions[rows], device),
                request_ids=upload(request_ids[rows] - begin, device),
                ring_table=ring_table[part],
                window_start=upload(floors[part], device),
                block_table=block_table[part],
                page_tokens=page_tokens,
            )
            batches.append(batch)
            begin += count
        return cls(
            seqlens=tuple(seqlens),
            context_lens=tuple(context_lens),
            positions=upload(positions, device),
            request_ids=upload(request_ids, device),
            ring_table=ring_table,
            block_table=block_table,
            page_tokens=page_tokens,
            batches=tuple(batches),
            shared_lens=tuple(shared_lens) or (0,) * len(seqlens),
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
        if len(self.batches) == 1:
            return (packed,)
        parts: tuple[Tensor, ...] = packed.split([batch.num_tokens for batch in self.batches])
        return parts

    def ring_places(self, ring_size: int) -> RingPlaces:
        """Where the window entries of these rows go in rings of a size; of a request with more rows, the last ones."""
        if ring_size not in self._ring_places:
            parts, begin = [torch.empty(0, dtype=torch.int64)], 0
            for length in self.seqlens:
                parts.append(torch.arange(begin + max(0, length - ring_size), begin + length))
                begin += length
            rows = upload(torch.cat(parts), self.positions.device)
            rings = self.ring_table[self.request_ids[rows]]
            self._ring_places[ring_size] = RingPlaces(rows, rings * ring_size + self.positions[rows] % ring_size)
        return self._ring_places[ring_size]

    def entries(self, ratio: int, pair_slots: int) -> EntryRows:
        """The entries these rows complete at a ratio, and the halves of pairs to keep.

        Args:
            ratio: tokens of an entry, 1 or 2.
            pair_slots: halves that a request keeps.
        """
        if ratio not in self._entries:
            self._entries[ratio] = self._find_entries(ratio, pair_slots)
        return self._entries[ratio]

    def _find_entries(self, ratio: int, pair_slots: int) -> EntryRows:
        lens, starts = (torch.tensor(x, dtype=torch.int64) for x in (self.seqlens, self.context_lens))
        ends, first = starts + lens, torch.maximum(starts, torch.tensor(self.shared_lens, dtype=torch.int64)) // ratio
        counts = (ends // ratio - first).clamp(min=0)
        owner, entry = _ranges(first, counts)
        row_of_position_0 = lens.cumsum(0) - ends
        halves_end = -(-ends // ratio)
        halves = torch.maximum(-(-starts // ratio), halves_end - pair_slots)
        half_owner, half = _ranges(halves, (halves_end - halves).clamp(min=0) * (ratio > 1))
        per_page, device = self.page_tokens // ratio, self.positions.device
        host = {
            "rows": row_of_position_0[owner] + (entry + 1) * ratio - 1,
            "pending": entry * ratio < starts[owner],
            "positions": entry * ratio,
            "request_ids": owner,
            "places": entry % per_page,
            "slots": entry % pair_slots,
            "half_rows": row_of_position_0[half_owner] + half * ratio,
            "half_slots": half % pair_slots,
        }
        owner, page, half_owner = (upload(each, device) for each in (owner, entry // per_page, half_owner))
        return EntryRows(
            **{name: upload(value, device) for name, value in host.items()},
            pages=self.block_table[owner, page].long(),
            rings=self.ring_table[owner],
            half_rings=self.ring_table[half_owner],
        )


def _ranges(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of `range(start, start + count)` of each request, one after the other: the request, and the number."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts - starts)[owner]
