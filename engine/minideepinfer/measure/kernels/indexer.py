"""Indexer: the three roles of an index-source layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.costs.indexer import indexer_cost
from minideepinfer.measure.kernels.batches import batch_on, decode, prefill, single_rows, some_rows
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators import IndexerOutput
from minideepinfer.operators.cost import Cost
from minideepinfer.quantization import qdq_mxfp4
from minideepinfer.testing.contract import Outputs, Violation
from minideepinfer.testing.recipes.batch import num_pages
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import map_tensors

JUDGED_ROWS = 4
ROUNDED_AT_ONCE = 1 << 24
"""Numbers; bounds the memory of quantising."""


def make(recipe: IndexerRecipe, device: torch.device) -> IndexerCase:
    """Normal numbers, rounded as the recipe says; candidate blocks at random, each once, as many as a row sees."""
    numbers = torch.Generator(device).manual_seed(recipe.seed)
    batch, dtype = batch_on(recipe.batch, recipe.seed, device), getattr(torch, recipe.dtype)
    heads, dim = recipe.num_heads, recipe.head_dim

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=numbers, device=device, dtype=dtype)
        if recipe.kv_quantization == "released" and shape[-1] == dim:
            for part in drawn.view(-1, dim).split(ROUNDED_AT_ONCE // dim):
                part.copy_(qdq_mxfp4(part))
        return drawn

    case = IndexerCase(
        problem=recipe.problem(batch),
        batch=batch,
        q=normal(batch.num_tokens, heads, dim),
        head_weights=torch.randn(batch.num_tokens, heads, generator=numbers, device=device, dtype=dtype),
        index_keys=normal(num_pages(batch), batch.page_tokens // recipe.compress_ratio, dim),
        candidates=None,
    )
    return replace(case, candidates=_random_blocks(case, numbers)) if recipe.role == "reindex" else case


def _random_blocks(case: IndexerCase, numbers: torch.Generator) -> Tensor:
    problem, device = case.problem, case.q.device
    blocks = -(-case.batch.visible_entries(problem.compress_ratio)[:, None] // problem.candidate_block_size)
    most, wanted = int(blocks.max()), problem.candidate_topk_blocks
    drawn = torch.rand(case.batch.num_tokens, most, generator=numbers, device=device)
    drawn = drawn.masked_fill_(torch.arange(most, device=device) >= blocks, -1.0)
    best = drawn.topk(min(wanted, most), dim=1)
    chosen = torch.full((len(drawn), wanted), -1, dtype=torch.int32, device=device)
    chosen[:, : best.indices.shape[1]] = best.indices.where(best.values >= 0, -1)
    return chosen


def bind(subject: Subject, operator: Any, case: IndexerCase) -> Call:
    """One layer's call."""
    metadata = operator.prepare(case.batch)
    return lambda: operator.run(case.q, case.head_weights, case.index_keys, case.candidates, metadata)


def outputs(case: IndexerCase, result: IndexerOutput) -> Outputs:
    """Entries, and blocks of the candidate source."""
    if (result.candidates is not None) != case.problem.emits_candidates:
        raise Violation(f"candidates are {result.candidates}, emits_candidates is {case.problem.emits_candidates}")
    indices, lens = result.selection.indices, result.selection.lens
    if lens is not None:
        indices = indices.where(torch.arange(indices.shape[1], device=lens.device) < lens[:, None], -1)
    return {"indices": indices} if result.candidates is None else {"indices": indices, "candidates": result.candidates}


def cost(case: IndexerCase) -> Cost:
    """Counts the entries that may be selected, and the distinct ones among them."""
    batch, problem = case.batch, case.problem
    visible = batch.visible_entries(problem.compress_ratio)
    if case.candidates is None:
        most = torch.zeros(batch.num_requests, dtype=visible.dtype, device=visible.device)
        most = most.scatter_reduce(0, batch.request_ids, visible, "amax")
        return indexer_cost(problem, batch.num_tokens, int(visible.sum()), int(most.sum()))
    size = problem.candidate_block_size
    blocks = case.candidates.long().sort(1).values
    again = torch.zeros_like(blocks, dtype=torch.bool)
    again[:, 1:] = blocks[:, 1:] == blocks[:, :-1]
    entries = (visible[:, None] - blocks * size).clamp(0, size).masked_fill(again | (blocks < 0), 0)
    num_blocks = int(blocks.max()) + 1 if blocks.numel() else 0
    keys = torch.zeros(batch.num_requests * num_blocks, dtype=entries.dtype, device=entries.device)
    place = batch.request_ids[:, None] * num_blocks + blocks.clamp(min=0)
    keys = keys.scatter_reduce(0, place.flatten(), entries.flatten(), "amax")
    return indexer_cost(problem, batch.num_tokens, int(entries.sum()), int(keys.sum()))


def sample(case: IndexerCase) -> tuple[Tensor, IndexerCase]:
    """A few rows as requests of their own, each with copies of its pages."""
    rows = some_rows(case.batch.num_tokens, JUDGED_ROWS, case.q.device)
    batch, pool = single_rows(case.batch, rows), case.index_keys
    used = -(-int(batch.visible_entries(case.problem.compress_ratio).max()) // pool.shape[1])
    pages = batch.block_table[:, :used].long().clamp(0, len(pool) - 1)  # behind a shorter request's last page
    table = torch.arange(pages.numel(), dtype=torch.int32, device=rows.device).view(pages.shape)
    few = replace(
        case,
        batch=replace(batch, block_table=table),
        q=case.q[rows],
        head_weights=case.head_weights[rows],
        index_keys=pool[pages.flatten()],
        candidates=None if case.candidates is None else case.candidates[rows],
    )
    return rows, map_tensors(few, lambda tensor: tensor.cpu())


RUN = Kernel(bind, outputs, cost)
RELEASED = IndexerRecipe(
    dtype="bfloat16",
    num_heads=32,
    head_dim=128,
    topk=512,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    kv_quantization="released",
)
TINY = IndexerRecipe(
    num_heads=16,
    head_dim=32,
    topk=8,
    candidate_topk_blocks=6,
    candidate_block_size=4,
    kv_quantization="released",
)
ROLES = (("plain", 2), ("source", 1), ("reindex", 1))
"""With the ratio of the layers that have each."""


def _problem(recipe: IndexerRecipe, role: str, ratio: int, batch: Any) -> tuple[Kernel, IndexerRecipe]:
    return RUN, replace(recipe, role=role, batch=batch, compress_ratio=ratio)


FAMILY = KernelFamily(
    family="indexer",
    problems={
        "v41-rank": {role: _problem(RELEASED, role, ratio, prefill(4096, 131_072)) for role, ratio in ROLES},
        "decode": {
            f"{role}, T={requests}, context {context}": _problem(RELEASED, role, ratio, decode(requests, context))
            for role, ratio, context in (("plain", 2, 4096), *((role, ratio, 131_072) for role, ratio in ROLES))
            for requests in (1, 8, 64)
        },
        "tiny": {
            **{role: _problem(TINY, role, ratio, prefill(16, 96, page_tokens=16)) for role, ratio in ROLES},
            "decode, plain": _problem(TINY, "plain", 2, decode(4, 64, page_tokens=16)),
        },
    },
    make=make,
    sample=sample,
)
