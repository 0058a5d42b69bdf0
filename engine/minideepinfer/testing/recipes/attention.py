"""Attention calls over shuffled pages and rings; memory that no row may read holds NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.cache.layouts import CacheLayout, cache_layout
from minideepinfer.operators import TOKEN_INDICES, AttentionProblem, Batch, Selection
from minideepinfer.quantization import qdq_fp8, qdq_nvfp4
from minideepinfer.testing.recipes.batch import (
    GARBAGE,
    NAN,
    NO_REQUESTS,
    PACKED,
    PLAIN,
    BatchRecipe,
    facts,
    layout_name,
    locate,
    num_pages,
    split_requests,
    take_requests,
)

ROW_TENSORS = ("q", "window_new", "cos", "sin")
PATTERNS = ("mixed", "valid", "front", "behind", "none", "newest", "one")
"""Where valid entries stand among the invalid ones; `newest` names the window's own entries, `one` one entry only."""


@dataclass(frozen=True)
class AttentionCase:
    """One attention call; rings and pool are in the problem's cache layout."""

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

    @property
    def units(self) -> int:
        """Requests."""
        return self.batch.num_requests

    @property
    def layout(self) -> CacheLayout:
        """Of rings and pool."""
        return cache_layout(self.problem.cache_layout)

    def run(self, operator: Any) -> Tensor:
        """Call an operator."""
        metadata = operator.prepare(self.batch)
        output: Tensor = operator.run(
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
        return output

    def take(self, order: Sequence[int]) -> tuple[AttentionCase, Tensor]:
        """Some requests in another order, and which old row each new row is."""
        batch, rows = take_requests(self.batch, order)
        return self._rows(batch, rows), rows

    def split(self) -> tuple[tuple[AttentionCase, Tensor], tuple[AttentionCase, Tensor]]:
        """Two steps instead of one: the first rows of each request, written to the rings before the rest follows."""
        (head, first), (tail, rest) = split_requests(self.batch)
        ring, entries = self.window_ring.clone(), self.layout.window.encode(self.window_new)
        for row in first.tolist():
            if (position := int(self.batch.positions[row])) >= 0:
                request = int(self.batch.request_ids[row])
                ring[self.batch.ring_table[request], position % ring.shape[1]] = entries[row]
        return (self._rows(head, first), first), (replace(self._rows(tail, rest), window_ring=ring), rest)

    def _rows(self, batch: Batch, rows: Tensor) -> AttentionCase:
        selection = self.selection
        if selection is not None:
            lens = None if selection.lens is None else selection.lens[rows]
            selection = Selection(selection.indices[rows], lens)
        return replace(
            self, batch=batch, selection=selection, **{name: getattr(self, name)[rows] for name in ROW_TENSORS}
        )

    def keys(self, row: int) -> Tensor:
        """All keys of a row, window first, in float64 `[N, D]`."""
        batch, problem = self.batch, self.problem
        request = int(batch.request_ids[row])
        context, ring = batch.context_lens[request], self.window_ring[int(batch.ring_table[request])]
        window = window_positions(batch, problem.sliding_window, row)
        slots = [position % len(ring) for position in window if position < context]
        new = [int(batch.cu_seqlens[request]) + position - context for position in window if position >= context]
        keys = [self.layout.window.decode(ring[slots], torch.float32), self.window_new[new]]
        if self.selection is not None and self.global_kv is not None:
            entries = selected_entries(batch, self.selection, problem.compress_ratio, row)
            rows = [self.global_kv[locate(batch, request, entry, problem.compress_ratio)] for entry in entries]
            keys += [self.layout.main.decode(torch.stack(rows), torch.float32)] if rows else []
        return torch.cat([part.double() for part in keys])


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


def fill_readable(case: AttentionCase, generator: torch.Generator, amplitude: float = 1.0) -> None:
    """Put numbers, in place, into exactly the window and global memory that some row reads."""
    batch, problem = case.batch, case.problem
    ring_size, starts = case.window_ring.shape[1], batch.cu_seqlens.tolist()
    for row, request in enumerate(batch.request_ids.tolist()):
        for position in window_positions(batch, problem.sliding_window, row):
            values = torch.randn(problem.head_dim, generator=generator) * amplitude
            offset = position - batch.context_lens[request]
            if offset >= 0:
                case.window_new[starts[request] + offset] = values
            else:
                case.window_ring[batch.ring_table[request], position % ring_size] = values
        if case.selection is not None and case.global_kv is not None:
            for entry in selected_entries(batch, case.selection, problem.compress_ratio, row):
                place = locate(batch, request, entry, problem.compress_ratio)
                case.global_kv[place] = torch.randn(problem.head_dim, generator=generator) * amplitude


def _packed(case: AttentionCase) -> AttentionCase:
    """The call with its keys rounded and packed; NaN stays NaN."""
    layout, pool = case.layout, case.global_kv
    return replace(
        case,
        window_new=qdq_fp8(case.window_new),
        window_ring=layout.window.encode(qdq_fp8(case.window_ring)),
        global_kv=None if pool is None else layout.main.encode(qdq_nvfp4(pool)),
    )


@dataclass(frozen=True)
class AttentionRecipe:
    """Makes an attention call; the field names are those of `AttentionProblem` where it has them.

    Attributes:
        batch: the packed rows.
        spare_slots: slots of a ring beyond the window.
        pattern: one of `PATTERNS`.
        with_lens: whether the selection has `lens`; what lies behind them is left over from another call.
        sink: size of the sink logits; None = no sink.
        q_amplitude: standard deviation of q.
        kv_amplitude: standard deviation of the keys.
        cache_layout: `plain`; or `released`: keys are rounded as the model was trained (head_dim a multiple of 32).
        seed: of all numbers.
    """

    batch: BatchRecipe = NO_REQUESTS
    dtype: str = "float32"
    num_heads: int = 1
    head_dim: int = 32
    rope_dim: int = 8
    sliding_window: int = 4
    compress_ratio: int = 1
    index_topk: int = 4
    spare_slots: int = 2
    pattern: str = "mixed"
    with_lens: bool = False
    sink: float | None = None
    q_amplitude: float = 1.0
    kv_amplitude: float = 1.0
    cache_layout: str = PLAIN
    seed: int = 0

    def build(self) -> AttentionCase:
        """The call."""
        generator = torch.Generator().manual_seed(self.seed)
        batch, dtype, ratio = self.batch.build(generator), getattr(torch, self.dtype), self.compress_ratio
        tokens, per_page = batch.num_tokens, self.batch.page_tokens // max(ratio, 1)
        angles = torch.rand(tokens, self.rope_dim // 2, generator=generator) * 6.3
        q = torch.randn(tokens, self.num_heads, self.head_dim, generator=generator) * self.q_amplitude
        q[batch.positions < 0] = NAN
        ring_size = self.sliding_window + self.spare_slots
        case = AttentionCase(
            problem=self.problem(batch),
            batch=batch,
            q=q.to(dtype),
            window_new=torch.full((tokens, self.head_dim), NAN, dtype=dtype),
            window_ring=torch.full((len(batch.seqlens) + 1, ring_size, self.head_dim), NAN, dtype=dtype),
            global_kv=torch.full((num_pages(batch), per_page, self.head_dim), NAN, dtype=dtype) if ratio else None,
            selection=self._selection(batch, generator) if ratio else None,
            sink=None if self.sink is None else torch.randn(self.num_heads, generator=generator) * self.sink,
            cos=angles.cos(),
            sin=angles.sin(),
            scale=self.head_dim**-0.5,
        )
        fill_readable(case, generator, self.kv_amplitude)
        return case if self.cache_layout == PLAIN else _packed(case)

    def packed(self) -> AttentionRecipe:
        """The recipe with pools of bytes, if its dims allow that."""
        return self if self.head_dim % 32 else replace(self, cache_layout=PACKED)

    def problem(self, batch: Batch) -> AttentionProblem:
        """What the operator is told of a batch of this recipe."""
        dtype = getattr(torch, self.dtype)
        names = ("num_heads", "head_dim", "rope_dim", "sliding_window", "compress_ratio", "index_topk")
        return AttentionProblem(
            **facts(dtype, batch.phase) | {"kv_quantization": "none" if self.cache_layout == PLAIN else "released"},
            **{name: getattr(self, name) for name in names},
            page_tokens=batch.page_tokens,
            cache_layout=layout_name(self.cache_layout, dtype),
            selection_layout=TOKEN_INDICES,
        )

    def _selection(self, batch: Batch, generator: torch.Generator) -> Selection:
        rows = [
            list(self._slots(visible, generator)) for visible in batch.visible_entries(self.compress_ratio).tolist()
        ]
        indices = torch.tensor(rows, dtype=torch.int32).view(-1, self.index_topk)
        if not self.with_lens:
            return Selection(indices)
        return Selection(indices, torch.randint(0, self.index_topk + 1, (len(rows),), generator=generator).int())

    def _slots(self, visible: int, generator: torch.Generator) -> Iterator[int]:
        """One row: valid entries where the pattern has them, and every kind of invalid one elsewhere."""
        topk, pattern = self.index_topk, self.pattern
        kinds = torch.randint(0, 6, (topk,), generator=generator).tolist()
        valid = torch.randint(0, max(1, visible), (topk,), generator=generator).tolist()
        invalid = {0: -1, 1: -7, 2: GARBAGE, 3: visible}
        for slot in range(topk):
            is_valid = {
                "mixed": kinds[slot] > 3,
                "front": slot >= topk - (topk + 1) // 2,
                "behind": slot < (topk + 1) // 2,
                "none": False,
            }.get(pattern, True)
            if not is_valid:
                yield invalid.get(kinds[slot], -1)
            elif pattern in ("newest", "one"):
                yield visible - 1 - (slot if pattern == "newest" else 0)
            else:
                yield valid[slot] if visible else -1
