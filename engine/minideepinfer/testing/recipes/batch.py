"""Packed ragged batches: shuffled pages and rings, empty and padding requests, and what is done to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.cache.layouts import EntryFormat
from minideepinfer.operators import Batch, BuildContext, OperatorOptions, Phase

CPU = torch.device("cpu")
GARBAGE = 2_147_480_000
NAN = float("nan")
PLAIN = "plain"
"""In recipes: the cache layout that holds numbers in the compute dtype."""
PACKED = "released"
"""In recipes: the cache layout of packed bytes."""


def context(problem: Any) -> BuildContext:
    """What `build` gets on the CPU."""
    return BuildContext(problem, OperatorOptions(), CPU)


def layout_name(layout: str, dtype: torch.dtype) -> str:
    """What problems call a recipe's cache layout."""
    return {torch.float32: "float32", torch.bfloat16: "bf16"}[dtype] if layout == PLAIN else layout


def without_nan(pool: Tensor, entries: EntryFormat, number: float) -> Tensor:
    """A pool with a number wherever a channel of an entry is NaN."""
    return entries.encode(entries.decode(pool, torch.float32).nan_to_num(number))


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


def renumber_pages(batch: Batch, offset: int) -> Batch:
    """The batch with every page that a request owns renumbered."""
    owned = batch.block_table != GARBAGE
    return replace(batch, block_table=(batch.block_table + offset).where(owned, batch.block_table))


def split_requests(batch: Batch) -> tuple[tuple[Batch, Tensor], tuple[Batch, Tensor]]:
    """The first half of each request's rows and the rest, as two steps, each with its rows' numbers in the batch."""
    cuts = [length // 2 for length in batch.seqlens]
    return _part(batch, [0] * len(cuts), cuts), _part(batch, cuts, list(batch.seqlens))


def _part(batch: Batch, starts: Sequence[int], stops: Sequence[int]) -> tuple[Batch, Tensor]:
    offsets = batch.cu_seqlens.tolist()
    pairs = list(zip(starts, stops, strict=True))
    rows = torch.tensor([offsets[r] + i for r, pair in enumerate(pairs) for i in range(*pair)], dtype=torch.int64)
    seqlens = tuple(stop - start for start, stop in pairs)
    part = replace(
        batch,
        seqlens=seqlens,
        context_lens=tuple(c + start for c, start in zip(batch.context_lens, starts, strict=True)),
        cu_seqlens=torch.tensor([sum(seqlens[:r]) for r in range(len(seqlens) + 1)], dtype=torch.int32),
        positions=batch.positions[rows],
        request_ids=batch.request_ids[rows],
    )
    return part, rows


@dataclass(frozen=True)
class BatchRecipe:
    """The structure of a packed batch; lengths one per request.

    Attributes:
        seqlens: new rows.
        context_lens: position of the first row.
        window_start: first position whose window entry exists; empty = 0 everywhere.
        padding: requests whose rows are all padding.
        page_tokens: tokens per page.
        decode: phase of the rows.
    """

    seqlens: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = ()
    window_start: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    page_tokens: int = 8
    decode: bool = False

    def build(self, generator: torch.Generator) -> Batch:
        """Pack it, pages and rings in random order."""
        return make_batch(
            self.seqlens,
            self.context_lens,
            page_tokens=self.page_tokens,
            phase=Phase.DECODE if self.decode else Phase.PREFILL,
            window_start=self.window_start,
            padding=self.padding,
            generator=generator,
        )


NO_REQUESTS = BatchRecipe()
"""A batch of nothing."""
