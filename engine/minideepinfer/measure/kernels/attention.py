"""Attention: rows that see a window and selected entries, or a window alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.measure.costs.attention import DistinctKeys, attention_cost
from minideepinfer.measure.kernels.batches import batch_on, decode, prefill, single_rows, some_rows
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators import Batch, Selection
from minideepinfer.operators.cost import Cost
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.recipes.attention import AttentionCase, AttentionRecipe
from minideepinfer.testing.recipes.batch import num_pages
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import map_tensors

JUDGED_ROWS = 8


def make(recipe: AttentionRecipe, device: torch.device) -> AttentionCase:
    """Normal numbers everywhere; every row selects entries at random, each once, as many as it sees or may name."""
    numbers, ratio = torch.Generator(device).manual_seed(recipe.seed), recipe.compress_ratio
    batch, dtype = batch_on(recipe.batch, recipe.seed, device), getattr(torch, recipe.dtype)
    tokens, dim = batch.num_tokens, recipe.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device=device, dtype=dtype)

    angles = torch.rand(tokens, recipe.rope_dim // 2, generator=numbers, device=device) * 6.3
    sink = torch.randn(recipe.num_heads, generator=numbers, device=device)
    return AttentionCase(
        problem=recipe.problem(batch),
        batch=batch,
        q=normal(tokens, recipe.num_heads, dim),
        window_new=normal(tokens, dim),
        window_ring=normal(batch.num_requests + 1, recipe.sliding_window + recipe.spare_slots, dim),
        global_kv=normal(num_pages(batch), batch.page_tokens // ratio, dim) if ratio else None,
        selection=_random_selection(batch, ratio, recipe.index_topk, numbers) if ratio else None,
        sink=None if recipe.sink is None else sink * recipe.sink,
        cos=angles.cos(),
        sin=angles.sin(),
        scale=dim**-0.5,
    )


def _random_selection(batch: Batch, ratio: int, topk: int, numbers: torch.Generator) -> Selection:
    visible = batch.visible_entries(ratio)[:, None]
    most = int(visible.max())
    drawn = torch.rand(batch.num_tokens, most, generator=numbers, device=visible.device)
    drawn = drawn.masked_fill_(torch.arange(most, device=visible.device) >= visible, -1.0)
    best = drawn.topk(min(topk, most), dim=1)
    indices = best.indices.where(best.values >= 0, -1).int()
    return Selection(F.pad(indices, (0, topk - indices.shape[1]), value=-1))


def bind(subject: Subject, operator: Any, case: AttentionCase) -> Call:
    """One layer's call."""
    metadata = operator.prepare(case.batch)
    inputs = (case.q, case.window_new, case.window_ring, case.global_kv, case.selection, case.sink, case.cos, case.sin)
    return lambda: operator.run(*inputs, case.scale, metadata)


def outputs(case: AttentionCase, result: Tensor) -> Outputs:
    """Heads."""
    return {"heads": result}


def cost(case: AttentionCase) -> Cost:
    """Counts the keys that rows see, and the distinct ones among them."""
    batch, window = case.batch, case.problem.sliding_window
    start = batch.window_start[batch.request_ids].clamp(min=0)
    seen = (batch.positions + 1 - start).clamp(0, window)
    context = torch.tensor(batch.context_lens, dtype=torch.int64, device=start.device)
    oldest = torch.maximum(batch.window_start, context - window + 1)  # of the first row, which sees the most of a ring
    is_real = torch.zeros_like(context).index_add(0, batch.request_ids, (seen > 0).long()) > 0
    in_rings = (context - oldest.clamp(min=0)).clamp(min=0)[is_real]
    num_keys, selected = int(seen.sum()), 0
    if case.selection is not None:
        named, requests = _named(case)
        num_keys += len(named)
        selected = len((requests * (1 + int(case.selection.indices.max())) + named).unique())
    distinct = DistinctKeys(int((seen > 0).sum()), int(in_rings.sum()), selected)
    return attention_cost(case.problem, batch.num_tokens, num_keys, distinct)


def _named(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """Entries that rows select, one after the other, and the request of each: int64 `[N]`."""
    assert case.selection is not None
    entries, lens = case.selection.indices.long(), case.selection.lens
    valid = (entries >= 0) & (entries < case.batch.visible_entries(case.problem.compress_ratio)[:, None])
    if lens is not None:
        valid &= torch.arange(entries.shape[1], device=lens.device) < lens[:, None]
    return entries[valid], case.batch.request_ids[:, None].expand_as(entries)[valid]


def sample(case: AttentionCase) -> tuple[Tensor, AttentionCase]:
    """A few rows, each a request whose window lies in a ring, and whose selected entries lie on pages of its own."""
    rows = some_rows(case.batch.num_tokens, JUDGED_ROWS, case.q.device)
    batch = single_rows(case.batch, rows)
    few = replace(
        case,
        batch=batch,
        window_ring=_rings(case, rows),
        **{name: getattr(case, name)[rows] for name in ("q", "window_new", "cos", "sin")},
    )
    if case.selection is not None and case.global_kv is not None:
        few = _compacted(few, case.selection, case.global_kv, rows)
    return rows, map_tensors(few, lambda tensor: tensor.cpu())


def _rings(case: AttentionCase, rows: Tensor) -> Tensor:
    """For each row a ring that holds the window before it: `[n, ring_size, D]`."""
    batch, ring, window = case.batch, case.window_ring, case.problem.sliding_window
    requests, size = batch.request_ids[rows], ring.shape[1]
    context = torch.tensor(batch.context_lens, device=rows.device)[requests, None]
    positions = batch.positions[rows, None] - torch.arange(1, window, device=rows.device)
    there = positions >= batch.window_start[requests, None]
    from_step = (batch.cu_seqlens[requests, None] + positions - context).clamp(min=0)
    from_ring = ring[batch.ring_table[requests, None], positions % size]
    values = torch.where((positions >= context)[..., None], case.window_new[from_step], from_ring)
    rings = ring.new_full((len(rows), size, ring.shape[2]), torch.nan)
    owners = torch.arange(len(rows), device=rows.device)[:, None].expand_as(positions)
    rings[owners[there], (positions % size)[there]] = values[there]
    return rings


def _compacted(case: AttentionCase, selection: Selection, pool: Tensor, rows: Tensor) -> AttentionCase:
    """The selected entries of a case of single rows, valid ones first and renumbered: a pool of nothing else."""
    ratio, per_page, topk = case.problem.compress_ratio, pool.shape[1], selection.indices.shape[1]
    entries = selection.indices[rows].long()
    valid = (entries >= 0) & (entries < case.batch.visible_entries(ratio)[:, None])
    order = valid.int().argsort(dim=1, descending=True, stable=True)
    entries, valid = entries.where(valid, 0).gather(1, order), valid.gather(1, order)
    pages = case.batch.block_table.long().gather(1, entries // per_page)
    keys = F.pad(pool[pages, entries % per_page], (0, 0, 0, -topk % per_page))
    table = torch.arange(keys.shape[0] * keys.shape[1] // per_page, dtype=torch.int32, device=rows.device)
    numbers = torch.arange(topk, dtype=torch.int32, device=rows.device)
    return replace(
        case,
        batch=replace(case.batch, block_table=table.view(len(rows), -1)),
        global_kv=keys.view(len(table), per_page, -1),
        selection=Selection(numbers.where(valid, -1)),
    )


RUN = Kernel(bind, outputs, cost)
RELEASED = AttentionRecipe(
    dtype="bfloat16",
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    sliding_window=128,
    index_topk=512,
    spare_slots=6,
    sink=1.0,
)
TINY = AttentionRecipe(
    num_heads=8, head_dim=64, rope_dim=16, sliding_window=8, index_topk=8, spare_slots=6, sink=1.0
)  # fmt: skip


def _problem(recipe: AttentionRecipe, ratio: int, batch: Any) -> tuple[Kernel, AttentionRecipe]:
    return RUN, replace(recipe, batch=batch, compress_ratio=ratio)


FAMILY = KernelFamily(
    family="attention",
    problems={
        "v41-rank": {
            "ratio 2": _problem(RELEASED, 2, prefill(4096, 131_072)),
            "ratio 1": _problem(RELEASED, 1, prefill(4096, 131_072)),
            "window only": _problem(RELEASED, 0, prefill(4096, 131_072)),
        },
        "decode": {
            f"{name}, T={requests}, context {context}": _problem(RELEASED, ratio, decode(requests, context))
            for name, ratio, context in (
                ("ratio 2", 2, 4096),
                ("ratio 2", 2, 131_072),
                ("window only", 0, 131_072),
            )
            for requests in (1, 8, 64)
        },
        "tiny": {
            "ratio 2": _problem(TINY, 2, prefill(16, 96, page_tokens=16)),
            "ratio 1": _problem(TINY, 1, prefill(16, 96, page_tokens=16)),
            "window only": _problem(TINY, 0, prefill(16, 96, page_tokens=16)),
            "decode, ratio 2": _problem(TINY, 2, decode(4, 64, page_tokens=16)),
        },
    },
    make=make,
    sample=sample,
)
