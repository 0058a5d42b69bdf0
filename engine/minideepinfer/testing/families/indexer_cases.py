"""Indexer: edge cases tried first, and cases I1 and I2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.recipes.batch import BatchRecipe, locate
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe
from minideepinfer.testing.subject import Subject

DIMS = ((1, 16), (1, 64), (1, 128), (8, 128), (32, 128))
"""Index heads and head_dim that a case may run at, the wanted ones first."""

_THREE = BatchRecipe(seqlens=(3, 0, 4), context_lens=(12, 5, 0))
_LONG = BatchRecipe(seqlens=(4,), context_lens=(30,))
_FAR = BatchRecipe(seqlens=(6,), context_lens=(500,), page_tokens=64)

EDGES = (
    IndexerRecipe(),
    IndexerRecipe(BatchRecipe((1,), (0,)), compress_ratio=2),
    IndexerRecipe(BatchRecipe((0, 0), (3, 0))),
    IndexerRecipe(BatchRecipe((2, 2), (4, 9), padding=(0,))),
    IndexerRecipe(_THREE, topk=12, numbers="few", num_heads=2),
    IndexerRecipe(_THREE, numbers="zero", topk=4, compress_ratio=2),
    IndexerRecipe(_LONG, numbers="few", num_heads=3, positive_weights=True, topk=6),
    IndexerRecipe(_LONG, num_heads=3, head_dim=16),
    IndexerRecipe(_FAR, num_heads=2, head_dim=16, topk=64, positive_weights=True),
    IndexerRecipe(_LONG, role="source", numbers="few", candidate_block_size=3, candidate_topk_blocks=3),
    IndexerRecipe(_LONG, role="source", numbers="zero", candidate_block_size=3, candidate_topk_blocks=2),
    IndexerRecipe(_THREE, role="source", candidate_block_size=4, candidate_topk_blocks=6, compress_ratio=2),
    IndexerRecipe(_LONG, role="reindex", numbers="few", candidate_block_size=4, candidate_topk_blocks=3, topk=9),
    IndexerRecipe(_THREE, role="reindex", candidate_block_size=2, candidate_topk_blocks=6, compress_ratio=2),
    IndexerRecipe(BatchRecipe((7,), (9,), page_tokens=16), compress_ratio=2, role="source", candidate_block_size=2),
    IndexerRecipe(BatchRecipe((1, 2, 1), (7, 15, 8)), num_heads=2, topk=6),  # ends of pages
    IndexerRecipe(BatchRecipe((2, 3), (5, 8)), compress_ratio=2, num_heads=2, head_dim=5, topk=4),
    IndexerRecipe(_LONG, role="reindex", named="none"),
    IndexerRecipe(_LONG, role="reindex", named="all", candidate_topk_blocks=20, topk=9, numbers="few", num_heads=2),
    IndexerRecipe(_LONG, num_heads=3, topk=6, q_amplitude=1e15, key_amplitude=1e15),
    IndexerRecipe(_LONG, num_heads=3, topk=6, q_amplitude=1e30, key_amplitude=1e-39),  # subnormal keys
    IndexerRecipe(_LONG, num_heads=3, topk=6, q_amplitude=1e-20, key_amplitude=1e-20),  # subnormal scores
)


def given_keys(
    batch: BatchRecipe, q: Tensor, keys: Tensor, dims: tuple[int, int], *, dtype: str, ratio: int, topk: int
) -> IndexerCase:
    """All requests have the same logical keys `[N, d]`; head 0 has weight 1, others 0; narrow vectors are filled up."""
    heads, head_dim = dims
    recipe = IndexerRecipe(batch, dtype, heads, head_dim, ratio, topk, numbers="few")
    case = recipe.build()
    pool, queries = torch.full_like(case.index_keys, torch.nan), torch.zeros_like(case.q)
    for request in range(case.batch.num_requests):
        for entry in range(len(keys)):
            place = locate(case.batch, request, entry, ratio)
            pool[place] = 0.0
            pool[place][: keys.shape[1]] = keys[entry]
    queries[:, 0, : q.shape[1]] = q
    weights = torch.zeros_like(case.head_weights)
    weights[:, 0] = 1.0
    return replace(case, q=queries, head_weights=weights, index_keys=pool)


def _expect(row: Tensor, wanted: Sequence[int], what: str) -> None:
    numbers = row.tolist()
    if sorted(numbers[: len(wanted)]) != sorted(wanted) or numbers[len(wanted) :] != [-1] * (
        len(numbers) - len(wanted)
    ):
        raise Violation(f"{what}: {numbers}, needed {sorted(wanted)} and -1 behind them")


def i1(subject: Subject) -> None:
    """Entry e is visible from position p if and only if e < (p + 1) // ratio, whatever the chunks."""
    for dtype in subject.dtypes:
        for ratio in (2, 1):
            scores = torch.ones(7, 8)
            scores[torch.arange(7), torch.arange(7) // ratio] = 100.0
            for topk in (2, 7):
                for chunks in ((7,), (3, 4), (1, 6)):
                    _check_i1(subject, scores, dtype, ratio, topk, chunks)


def _check_i1(subject: Subject, scores: Tensor, dtype: str, ratio: int, topk: int, chunks: tuple[int, ...]) -> None:
    start, keys = 0, torch.eye(8)[: 7 // ratio]
    for chunk in chunks:
        batch = BatchRecipe((chunk,), (start,), page_tokens=16)
        q = scores[start : start + chunk]
        cases = (given_keys(batch, q, keys, dims, dtype=dtype, ratio=ratio, topk=topk) for dims in DIMS)
        indices = subject.run(subject.nearest(cases))["indices"]
        for position in range(start, start + chunk):
            visible = range((position + 1) // ratio)
            ranked = sorted(visible, key=lambda e: (-scores[position, e].item(), e))
            if topk < 7 and not subject.properties.deterministic:
                ranked = ranked[:1]
                _holds(indices[position - start], ranked, f"ratio {ratio}, position {position}")
            else:
                _expect(
                    indices[position - start], ranked[:topk], f"ratio {ratio}, position {position}, chunks {chunks}"
                )
        start += chunk


def _holds(row: Tensor, wanted: Sequence[int], what: str) -> None:
    if not set(wanted) <= set(row.tolist()):
        raise Violation(f"{what}: {row.tolist()} lacks {list(wanted)}")


def i2(subject: Subject) -> None:
    """Ties take the lower index, in one batch of eight rows, in two of four, and row by row."""
    if not subject.properties.deterministic:
        return
    tables = (
        ((), 4, range(4)),
        ((2, 5, 7, 11, 13), 4, (2, 5, 7, 11)),
        ((9,), 4, (9, 0, 1, 2)),
        ((), 16, range(16)),
        ((), 20, range(16)),
    )
    for dtype in subject.dtypes:
        for high, topk, wanted in tables:
            keys = torch.full((16, 4), -1.0)  # ReLU makes the score 0
            keys[list(high)] = torch.tensor([1.0, 0.0, 0.0, 0.0])
            q = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(8, 1)
            batch = BatchRecipe((1,) * 8, (15,) * 8, page_tokens=64)
            cases = (given_keys(batch, q, keys, dims, dtype=dtype, ratio=1, topk=topk) for dims in DIMS)
            case = subject.nearest(cases)
            for size in (8, 4, 1):
                for start in range(0, 8, size):
                    taken, _ = case.take(range(start, start + size))
                    for row in subject.run(taken)["indices"]:
                        _expect(row, list(wanted), f"score 1 at {high}, else 0, k = {topk}, {size} rows at once")


CASES = (
    ExplicitCase("I1", "the group that a query stands inside: visible before its last token", i1),
    ExplicitCase("I2", "ties broken by tile, thread or batch", i2),
)
