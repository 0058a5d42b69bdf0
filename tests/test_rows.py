"""Packed rows against loops: positions, batches by phase, entries at every chunk boundary, rows a ring holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.model.rows import EntryRows, Rows
from minideepinfer.operators import Phase
from torch import Tensor

PAGE_TOKENS = 8


def pack(lens: list[int], starts: list[int], decode: int, shared: list[int] | None = None) -> Rows:
    """Requests of which the first `decode` are decoding; page i of request r is number 100 r + i, its ring 7 r."""
    count = len(lens)
    phases = [Phase.DECODE] * decode + [Phase.PREFILL] * (count - decode)
    pages = torch.tensor([[100 * r + i for i in range(12)] for r in range(count)], dtype=torch.int32).view(count, 12)
    return Rows.pack(lens, starts, phases, [0] * count, torch.arange(count) * 7, pages, PAGE_TOKENS, shared or ())


requests = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=5)


@given(requests, st.data())
def test_rows_are_those_of_the_requests(items: list[tuple[int, int]], data: st.DataObject) -> None:
    decode = data.draw(st.integers(0, len(items)))
    rows = pack([n for n, _ in items], [start for _, start in items], decode)
    expected = [(r, start + i) for r, (n, start) in enumerate(items) for i in range(n)]
    assert list(zip(rows.request_ids.tolist(), rows.positions.tolist(), strict=True)) == expected
    assert rows.num_tokens == len(expected)
    assert rows.phase == (Phase.PREFILL if decode < len(items) else Phase.DECODE)
    rebuilt, first = [], 0
    for batch in rows.batches:
        assert batch.cu_seqlens.tolist() == [sum(batch.seqlens[:i]) for i in range(batch.num_requests + 1)]
        rebuilt += [(first + r, p) for r, p in zip(batch.request_ids.tolist(), batch.positions.tolist(), strict=True)]
        first += batch.num_requests
    assert rebuilt == expected
    assert [len(part) for part in rows.split(rows.positions)] == [batch.num_tokens for batch in rows.batches]


@given(requests, st.sampled_from([1, 2]), st.integers(1, 5), st.data())
def test_entries_are_those_whose_last_token_is_here(
    items: list[tuple[int, int]], ratio: int, slots: int, data: st.DataObject
) -> None:
    shared = [2 * data.draw(st.integers(0, 30)) for _ in items]
    rows = pack([n for n, _ in items], [start for _, start in items], 0, shared)
    found = rows.entries(ratio, slots)
    per_page = PAGE_TOKENS // ratio
    expected, halves, row = [], [], 0
    for request, (length, start) in enumerate(items):
        firsts = []
        for position in range(start, start + length):
            if ratio > 1 and position % ratio == 0:
                firsts.append((row, 7 * request, position // ratio % slots))
            if (position + 1) % ratio == 0 and position >= shared[request]:
                entry = (position + 1) // ratio - 1
                pending = entry * ratio < start
                place = (100 * request + entry // per_page, entry % per_page)
                expected.append((row, request, 7 * request, entry % slots, pending, entry * ratio, *place))
            row += 1
        halves += firsts[-slots:]
    fields = (
        *(found.rows, found.request_ids, found.rings, found.slots),
        *(found.pending, found.positions, found.pages, found.places),
    )
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
    fields = (found.half_rows, found.half_rings, found.half_slots)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == halves


@given(requests, st.integers(1, 9))
def test_a_ring_holds_the_last_rows(items: list[tuple[int, int]], size: int) -> None:
    rows = pack([n for n, _ in items], [start for _, start in items], 0)
    expected, row = [], 0
    for request, (length, start) in enumerate(items):
        last = range(max(0, length - size), length)
        expected += [(row + i, 7 * request * size + (start + i) % size) for i in last]
        row += length
    assert list(zip(*(each.tolist() for each in rows.ring_places(size)), strict=True)) == expected


def test_visible_entries() -> None:
    (batch,) = pack([7], [0], 0).batches
    assert batch.visible_entries(2).tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert batch.visible_entries(1).tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("ratio", [1, 2])
def test_chunks_complete_each_entry_once(ratio: int) -> None:
    """Whatever the cuts of 13 tokens, entries come out as from one chunk, and the last first halves are kept."""

    def step(context: int, length: int) -> EntryRows:
        return pack([length], [context], 0).entries(ratio, 2)

    def places(entries: EntryRows) -> list[tuple[int, int, int]]:
        parts: tuple[Tensor, ...] = (entries.positions, entries.pages, entries.places)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    whole = step(0, 13)
    assert len(whole.rows) == 13 // ratio
    assert whole.half_rows.tolist() == ([10, 12] if ratio == 2 else [])
    for first in range(14):
        for second in range(14 - first):
            cuts = [(0, first), (first, second), (first + second, 13 - first - second)]
            chunks = [step(context, length) for context, length in cuts]
            assert [place for chunk in chunks for place in places(chunk)] == places(whole)


def test_entries_by_hand() -> None:
    """Ratio 2, positions 3 to 6: pair (2, 3) has its first token pending, (4, 5) is new, 6 stays open."""
    entries = pack([4], [3], 0).entries(2, 4)
    assert entries.positions.tolist() == [2, 4]
    assert entries.rows.tolist() == [0, 2]
    assert entries.pending.tolist() == [True, False]
    assert entries.slots.tolist() == [1, 2]
    assert entries.half_rows.tolist() == [1, 3]
    assert entries.half_slots.tolist() == [2, 3]


def test_decode_behind_prefill_is_a_mistake_of_the_caller() -> None:
    rings, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="decode requests come first"):
        Rows.pack([1, 1], [0, 3], [Phase.PREFILL, Phase.DECODE], [0, 0], rings, table, PAGE_TOKENS)
