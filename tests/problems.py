"""Operator-level problems for tests: packed ragged batches over shuffled pages and rings, everything unread poisoned.

Structure is drawn by hypothesis; numbers come from a seeded generator. Memory that no row may read holds NaN, and so
does what a padding row brings along, so an operator that reads too much cannot agree with an oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from minideepinfer.operators import (
    TOKEN_INDICES,
    AttentionProblem,
    Batch,
    BuildContext,
    IndexerProblem,
    MoeProblem,
    MoeWeights,
    OperatorOptions,
    PackedExperts,
    Phase,
    Selection,
    SharedExpert,
)
from torch import Tensor

CPU = torch.device("cpu")
GARBAGE = 2_147_480_000
NAN = float("nan")
CACHE_LAYOUTS = {torch.float32: "float32", torch.bfloat16: "bf16"}


def context(problem: Any) -> BuildContext:
    """What `build` gets on the CPU."""
    return BuildContext(problem, OperatorOptions(), CPU)


def facts(dtype: torch.dtype, phase: Phase = Phase.PREFILL, activation_quantization: str = "none") -> dict[str, Any]:
    """The fields every problem shares."""
    return {
        "phase": phase,
        "device": "cpu",
        "capability": None,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_quantization": "none",
        "activation_quantization": activation_quantization,
    }


def make_batch(
    seqlens: Sequence[int],
    context_lens: Sequence[int],
    *,
    page_tokens: int = 16,
    phase: Phase = Phase.PREFILL,
    window_start: Sequence[int] | None = None,
    padding: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Batch:
    """Pack requests; pages and rings are handed out in random order, two pages and one ring stay nobody's.

    Args:
        seqlens: new rows of each request.
        context_lens: position of each request's first row.
        page_tokens: tokens per page.
        phase: of all rows.
        window_start: default 0 everywhere.
        padding: requests whose rows all have position -1; they own no page.
        generator: for the order.
    """
    num_requests = len(seqlens)
    counts = [0 if r in padding else -(-(context_lens[r] + seqlens[r]) // page_tokens) for r in range(num_requests)]
    free = iter(torch.randperm(sum(counts) + 2, generator=generator).tolist())
    block_table = torch.full((num_requests, max([*counts, 0]) + 1), GARBAGE, dtype=torch.int32)
    for r, count in enumerate(counts):
        block_table[r, :count] = torch.tensor([next(free) for _ in range(count)], dtype=torch.int32)
    positions = [-1 if r in padding else context_lens[r] + i for r in range(num_requests) for i in range(seqlens[r])]
    return Batch(
        phase=phase,
        seqlens=tuple(seqlens),
        context_lens=tuple(context_lens),
        cu_seqlens=torch.tensor([sum(seqlens[:r]) for r in range(num_requests + 1)], dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int64),
        request_ids=torch.tensor([r for r in range(num_requests) for _ in range(seqlens[r])], dtype=torch.int64),
        ring_table=torch.randperm(num_requests + 1, generator=generator)[:num_requests],
        window_start=torch.tensor(window_start or [0] * num_requests, dtype=torch.int64),
        block_table=block_table,
        page_tokens=page_tokens,
    )


def num_pages(batch: Batch) -> int:
    """Pages of a pool that fits `make_batch`'s block table."""
    return int((batch.block_table != GARBAGE).sum()) + 2


def locate(batch: Batch, request: int, entry: int, ratio: int) -> tuple[int, int]:
    """Page and place of a logical entry."""
    per_page = batch.page_tokens // ratio
    return int(batch.block_table[request, entry // per_page]), entry % per_page


def take_requests(batch: Batch, order: Sequence[int]) -> tuple[Batch, Tensor]:
    """The batch of some requests in another order, and which old row each new row is."""
    starts = batch.cu_seqlens.tolist()
    rows = [row for r in order for row in range(starts[r], starts[r] + batch.seqlens[r])]
    seqlens = tuple(batch.seqlens[r] for r in order)
    picked, index = torch.tensor(rows, dtype=torch.int64), torch.tensor(list(order), dtype=torch.int64)
    taken = replace(
        batch,
        seqlens=seqlens,
        context_lens=tuple(batch.context_lens[r] for r in order),
        cu_seqlens=torch.tensor([sum(seqlens[:i]) for i in range(len(seqlens) + 1)], dtype=torch.int32),
        positions=batch.positions[picked],
        request_ids=torch.tensor([i for i, n in enumerate(seqlens) for _ in range(n)], dtype=torch.int64),
        ring_table=batch.ring_table[index],
        window_start=batch.window_start[index],
        block_table=batch.block_table[index],
    )
    return taken, picked


def move_pages(batch: Batch, pool: Tensor, generator: torch.Generator) -> tuple[Batch, Tensor]:
    """The same entries on other pages."""
    target = torch.randperm(len(pool), generator=generator)
    moved = torch.empty_like(pool)
    moved[target] = pool
    owned = batch.block_table != GARBAGE
    pages = target[batch.block_table.long().where(owned, 0)].int()
    return replace(batch, block_table=pages.where(owned, GARBAGE)), moved


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


@dataclass(frozen=True)
class MoeCase:
    """One MoE call, with routing given or not."""

    problem: MoeProblem
    x: Tensor
    weights: MoeWeights
    routing: tuple[Tensor, Tensor] | None

    def run(self, operator: Any, comm: Any) -> Tensor:
        """Call an operator."""
        return operator.run(self.x, operator.transform_weights(self.weights), comm, operator.prepare(()), self.routing)


@st.composite
def batches(draw: st.DrawFn, page_tokens: int, generator: torch.Generator) -> Batch:
    """0 to 4 requests: empty ones, padding ones, fresh ones and continued ones; T may be 0."""
    phase = draw(st.sampled_from([Phase.PREFILL, Phase.DECODE]))
    decode = phase is Phase.DECODE
    kinds = draw(st.lists(st.sampled_from(["real", "real", "real", "padding"]), max_size=4))
    seqlens = [draw(st.integers(0, 3 if decode else 7)) for _ in kinds]
    context_lens = [draw(st.integers(1 if decode else 0, 45)) for _ in kinds]
    window_start = [draw(st.sampled_from([0, 0, max(0, c - 2), c, c + 1])) for c in context_lens]
    padding = [r for r, kind in enumerate(kinds) if kind == "padding"]
    return make_batch(
        seqlens,
        context_lens,
        page_tokens=page_tokens,
        phase=phase,
        window_start=window_start,
        padding=padding,
        generator=generator,
    )


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


def random_experts(num: int, hidden: int, inner: int, generator: torch.Generator, start: int = 0) -> PackedExperts:
    """Random codes; exponents that keep values around 1."""

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def exponents(*shape: int) -> Tensor:
        return torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)

    return PackedExperts(
        w13=codes(num, 2, inner, hidden // 2),
        w13_scale=exponents(num, 2, inner, hidden // 32),
        w2=codes(num, hidden, inner // 2),
        w2_scale=exponents(num, hidden, inner // 32),
        expert_start=start,
    )


def moe_problem(hidden: int, inner: int, experts: int, local: int, topk: int, **shared_facts: Any) -> MoeProblem:
    """A MoE problem with the release's scaling and clamp."""
    return MoeProblem(
        **shared_facts,
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=experts,
        num_local_experts=local,
        topk=topk,
        num_shared_experts=1,
        routed_scaling=1.5,
        swiglu_limit=10.0,
        world_size=1,
    )


@st.composite
def moe_cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32, activation_quantization: str = "none") -> MoeCase:
    """Any legal MoE call of a rank that holds some of the experts; forced routing has -1 and duplicates."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hidden, inner = draw(st.sampled_from([32, 96])), draw(st.sampled_from([32, 96]))
    experts, tokens = draw(st.integers(2, 6)), draw(st.integers(0, 6))
    local = draw(st.integers(1, experts))
    start, topk = draw(st.integers(0, experts - local)), draw(st.integers(1, min(3, experts)))

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    shared = SharedExpert(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
    ids = torch.randint(-1, experts, (tokens, topk), generator=generator).int()
    routing = (ids, torch.rand(tokens, topk, generator=generator).masked_fill(ids < 0, NAN))
    return MoeCase(
        problem=moe_problem(
            hidden, inner, experts, local, topk, **facts(dtype, activation_quantization=activation_quantization)
        ),
        x=torch.randn(tokens, hidden, generator=generator).to(dtype),
        weights=MoeWeights(
            gate=torch.randn(experts, hidden, generator=generator).bfloat16(),
            gate_bias=torch.randn(experts, generator=generator),
            experts=random_experts(local, hidden, inner, generator, start),
            shared=shared if draw(st.booleans()) else None,
        ),
        routing=routing if draw(st.booleans()) else None,
    )
