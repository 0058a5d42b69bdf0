"""Packed batches on a device, and single rows of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.operators import Batch
from minideepinfer.testing.recipes.batch import BatchRecipe
from minideepinfer.testing.tensors import map_tensors

PAGE_TOKENS = 64


def prefill(new_tokens: int, context: int, page_tokens: int = PAGE_TOKENS) -> BatchRecipe:
    """One request that ends at `context`."""
    return BatchRecipe((new_tokens,), (context - new_tokens,), page_tokens=page_tokens)


def decode(requests: int, context: int, page_tokens: int = PAGE_TOKENS) -> BatchRecipe:
    """Requests of one row each, the last token of a context."""
    return BatchRecipe((1,) * requests, (context - 1,) * requests, page_tokens=page_tokens, decode=True)


def batch_on(recipe: BatchRecipe, seed: int, device: torch.device) -> Batch:
    """The batch of a recipe."""
    batch = recipe.build(torch.Generator().manual_seed(seed))
    return map_tensors(batch, lambda tensor: tensor.to(device))


def some_rows(num_rows: int, most: int, device: torch.device) -> Tensor:
    """At most `most` rows, evenly, the first and the last among them."""
    return torch.linspace(0, num_rows - 1, min(most, num_rows), device=device).round().long()


def single_rows(batch: Batch, rows: Tensor) -> Batch:
    """Each row as a request of its own, in a ring of its own."""
    count, requests = len(rows), batch.request_ids[rows]
    numbers = torch.arange(count, device=rows.device)
    return replace(
        batch,
        seqlens=(1,) * count,
        context_lens=tuple(batch.positions[rows].tolist()),
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
        positions=batch.positions[rows],
        request_ids=numbers,
        ring_table=numbers,
        window_start=batch.window_start[requests],
        block_table=batch.block_table[requests],
    )
