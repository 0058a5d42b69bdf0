"""Operator-level problems for tests: packed ragged batches over shuffled pages and rings, everything unread poisoned.

Structure is drawn by hypothesis; numbers come from a seeded generator. Memory that no row may read holds NaN, and so
does what a padding row brings along, so an operator that reads too much cannot agree with an oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from batches import CACHE_LAYOUTS, GARBAGE, NAN, batches, facts, locate, num_pages, take_requests
from hypothesis import strategies as st
from minideepinfer.operators import (
    TOKEN_INDICES,
    AttentionProblem,
    Batch,
    IndexerProblem,
    Selection,
)
from torch import Tensor


@dataclass(frozen=True)
class AttentionCase:
    """One attention call."""

    problem: AttentionProblem
    batch: Batch
    q: Tensor
    window_new: Tensor
    window_ring: Tensor
    global_kv: Tensor | None
    selection: Selection | None
    sink: Tensor | None
    cos: Tensor
    sin: Tensor
    scale: float

    def run(self, operator: Any) -> Tensor:
        """Call an operator."""
        metadata = operator.prepare(self.batch)
        return operator.run(
            self.q,
            self.window_new,
            self.window_ring,
            self.global_kv,
            self.selection,
            self.sink,
            self.cos,
            self.sin,
            self.scale,
            metadata,
        )

    def take(self, order: Sequence[int]) -> tuple[AttentionCase, Tensor]:
        """Some requests in another order, and which old row each new row is."""
        batch, rows = take_requests(self.batch, order)
        selection = self.selection
        if selection is not None:
            lens = None if selection.lens is None else selection.lens[rows]
            selection = Selection(selection.indices[rows], lens)
        row_tensors = {name: getattr(self, name)[rows] for name in ("q", "window_new", "cos", "sin")}
        return replace(self, batch=batch, selection=selection, **row_tensors), rows


@dataclass(frozen=True)
class IndexerCase:
    """One indexer call."""

    problem: IndexerProblem
    batch: Batch
    q: Tensor
    head_weights: Tensor
    index_keys: Tensor
    candidates: Tensor | None

    def run(self, operator: Any) -> tuple[Tensor, Tensor | None]:
        """Call an operator: selected indices (-1 past `lens`) and candidates."""
        metadata = operator.prepare(self.batch)
        output = operator.run(self.q, self.head_weights, self.index_keys, self.candidates, metadata)
        indices, lens = output.selection.indices, output.selection.lens
        if lens is not None:
            indices = indices.where(torch.arange(indices.shape[1]) < lens[:, None], -1)
        return indices, output.candidates

    def take(self, order: Sequence[int]) -> tuple[IndexerCase, Tensor]:
        """Some requests in another order, and which old row each new row is."""
        batch, rows = take_requests(self.batch, order)
        candidates = None if self.candidates is None else self.candidates[rows]
        return replace(
            self, batch=batch, q=self.q[rows], head_weights=self.head_weights[rows], candidates=candidates
        ), rows


def _selection(batch: Batch, ratio: int, topk: int, with_lens: bool, generator: torch.Generator) -> Selection:
    """Valid entries and every kind of invalid one, scattered; past `lens` anything."""
    rows = []
    for visible in batch.visible_entries(ratio).tolist():
        kinds = torch.randint(0, 6, (topk,), generator=generator).tolist()
        valid = torch.randint(0, max(1, visible), (topk,), generator=generator).tolist()
        invalid = {0: -1, 1: -7, 2: GARBAGE, 3: visible}
        rows.append([invalid.get(kind, entry) for kind, entry in zip(kinds, valid, strict=True)])
    indices = torch.tensor(rows, dtype=torch.int32).view(-1, topk)
    lens = torch.randint(0, topk + 1, (len(rows),), generator=generator).int() if with_lens else None
    return Selection(indices, lens)


def selected_entries(batch: Batch, selection: Selection, ratio: int, row: int) -> list[int]:
    """What a selection means for one row (the words of `Selection`)."""
    visible = (int(batch.positions[row]) + 1) // ratio
    length = selection.indices.shape[1] if selection.lens is None else int(selection.lens[row])
    return [entry for entry in selection.indices[row, :length].tolist() if 0 <= entry < visible]


def window_positions(batch: Batch, window: int, row: int) -> range:
    """Positions whose window entries a row sees."""
    position = int(batch.positions[row])
    start = int(batch.window_start[batch.request_ids[row]])
    return range(max(start, position - window + 1), position + 1)


def fill_readable(case: AttentionCase, generator: torch.Generator) -> None:
    """Put numbers, in place, into exactly the window and global memory that some row reads."""
    batch, problem = case.batch, case.problem
    ring_size, starts = case.window_ring.shape[1], batch.cu_seqlens.tolist()
    for row, request in enumerate(batch.request_ids.tolist()):
        for position in window_positions(batch, problem.sliding_window, row):
            values = torch.randn(problem.head_dim, generator=generator)
            offset = position - batch.context_lens[request]
            if offset >= 0:
                case.window_new[starts[request] + offset] = values
            else:
                case.window_ring[batch.ring_table[request], position % ring_size] = values
        if case.selection is not None and case.global_kv is not None:
            for entry in selected_entries(batch, case.selection, problem.compress_ratio, row):
                place = locate(batch, request, entry, problem.compress_ratio)
                case.global_kv[place] = torch.randn(problem.head_dim, generator=generator)


@st.composite
def attention_cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> AttentionCase:
    """Any legal attention call, small."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    page_tokens, ratio = draw(st.sampled_from([8, 16])), draw(st.sampled_from([0, 1, 2]))
    batch = draw(batches(page_tokens, generator))
    heads, dim, window = draw(st.integers(1, 3)), draw(st.sampled_from([8, 32])), draw(st.integers(1, 9))
    rope_dim, topk = draw(st.sampled_from([4, 8])), draw(st.integers(1, 9))
    ring_size, tokens = window + draw(st.integers(0, 3)), batch.num_tokens
    angles = torch.rand(tokens, rope_dim // 2, generator=generator) * 6.3
    q = torch.randn(tokens, heads, dim, generator=generator) * draw(st.sampled_from([0.5, 4.0]))
    q[batch.positions < 0] = NAN
    case = AttentionCase(
        problem=AttentionProblem(
            **facts(dtype, batch.phase),
            num_heads=heads,
            head_dim=dim,
            rope_dim=rope_dim,
            sliding_window=window,
            compress_ratio=ratio,
            index_topk=topk,
            page_tokens=page_tokens,
            cache_layout=CACHE_LAYOUTS[dtype],
            selection_layout=TOKEN_INDICES,
        ),
        batch=batch,
        q=q.to(dtype),
        window_new=torch.full((tokens, dim), NAN, dtype=dtype),
        window_ring=torch.full((len(batch.seqlens) + 1, ring_size, dim), NAN, dtype=dtype),
        global_kv=torch.full((num_pages(batch), page_tokens // ratio, dim), NAN, dtype=dtype) if ratio else None,
        selection=_selection(batch, ratio, topk, draw(st.booleans()), generator) if ratio else None,
        sink=torch.randn(heads, generator=generator) if draw(st.booleans()) else None,
        cos=angles.cos(),
        sin=angles.sin(),
        scale=dim**-0.5,
    )
    fill_readable(case, generator)
    return case


@st.composite
def indexer_cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> IndexerCase:
    """Any legal indexer call, small; half of them made of so few different numbers that ties are everywhere."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    page_tokens, ratio = draw(st.sampled_from([8, 16])), draw(st.sampled_from([1, 2]))
    batch = draw(batches(page_tokens, generator))
    heads, dim, tied = draw(st.integers(1, 4)), draw(st.sampled_from([4, 16])), draw(st.booleans())
    role = draw(st.sampled_from(["plain", "source", "reindex"]))
    blocks, size = draw(st.integers(1, 6)), draw(st.sampled_from([2, 3, 4]))

    def numbers(*shape: int) -> Tensor:
        if tied:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    q = numbers(batch.num_tokens, heads, dim)
    q[batch.positions < 0] = NAN
    keys = torch.full((num_pages(batch), page_tokens // ratio, dim), NAN, dtype=dtype)
    visible = batch.visible_entries(ratio)
    for request, pages in enumerate(batch.block_table):
        seen = visible[batch.request_ids == request].tolist()
        for entry in range(max([*seen, 0])):
            keys[pages[entry // keys.shape[1]], entry % keys.shape[1]] = numbers(dim)
    candidates = torch.randint(-1, 26, (batch.num_tokens, blocks), generator=generator).int()
    return IndexerCase(
        problem=IndexerProblem(
            **facts(dtype, batch.phase),
            num_heads=heads,
            head_dim=dim,
            compress_ratio=ratio,
            topk=draw(st.integers(1, 12)),
            emits_candidates=role == "source",
            uses_candidates=role == "reindex",
            candidate_topk_blocks=blocks,
            candidate_block_size=size,
            page_tokens=page_tokens,
            cache_layout=CACHE_LAYOUTS[dtype],
            selection_layout=TOKEN_INDICES,
        ),
        batch=batch,
        q=q,
        head_weights=numbers(batch.num_tokens, heads),
        index_keys=keys,
        candidates=candidates if role == "reindex" else None,
    )
