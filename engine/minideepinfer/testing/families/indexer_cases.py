"""Indexer: edge cases tried first, and cases I1 and I2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minideepinfer.quantization import qdq_mxfp4
from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.families.moe_formats import AMAXES
from minideepinfer.testing.families.whole_model import WHOLE_MODEL
from minideepinfer.testing.recipes.batch import BatchRecipe, locate
from minideepinfer.testing.recipes.indexer import IndexerCase, IndexerRecipe
from minideepinfer.testing.subject import Subject

DIMS = ((1, 16), (1, 64), (1, 128), (8, 128), (32, 128))
"""Index heads and head_dim that a case may run at, the wanted ones first."""

CHUNKS = ((0, 7), (0, 3), (3, 4), (0, 1), (1, 6))
"""Position of the first row, and rows, of I1's steps: all at once, and in two chunks, twice."""

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
    IndexerRecipe(_LONG, num_heads=3, head_dim=32, topk=6, kv_quantization="released"),
    IndexerRecipe(_LONG, role="source", num_heads=2, head_dim=64, numbers="few", kv_quantization="released"),
    IndexerRecipe(_THREE, role="reindex", head_dim=32, candidate_topk_blocks=6, kv_quantization="released"),
    IndexerRecipe(_LONG, "float32", 3, 64, topk=6, kv_quantization="released", cache_layout="released"),
    IndexerRecipe(
        _THREE, "float32", 2, 32, 2, 4, "source", numbers="few", kv_quantization="released", cache_layout="released"
    ),
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


def grouped(
    dims: tuple[int, int], dtype: str, ratio: int, topk: int, start: int, count: int
) -> tuple[IndexerCase, BatchRecipe]:
    """I1's rows from a position on: score 100 for the group that a query stands inside, 1 for all others."""
    batch, positions = BatchRecipe((count,), (start,), page_tokens=16), torch.arange(start, start + count)
    q = torch.ones(count, 8)
    q[torch.arange(count), positions // ratio] = 100.0
    return given_keys(batch, q, torch.eye(8)[: 7 // ratio], dims, dtype=dtype, ratio=ratio, topk=topk), batch


def i1(subject: Subject) -> None:
    """Entry e is visible from position p if and only if e < (p + 1) // ratio, whatever the chunks."""
    for dtype in subject.dtypes:
        for ratio in (2, 1):
            for topk in (2, 7):
                for start, count in CHUNKS:
                    cases = (grouped(dims, dtype, ratio, topk, start, count)[0] for dims in DIMS)
                    _check_i1(subject, subject.nearest(cases))


def _check_i1(subject: Subject, case: IndexerCase) -> None:
    ratio, topk = case.problem.compress_ratio, case.problem.topk
    rows = zip(case.batch.positions.tolist(), subject.run(case)["indices"], strict=True)
    for position, indices in rows:
        own = position // ratio
        ranked = sorted(range((position + 1) // ratio), key=lambda e: (e != own, e))
        what = f"ratio {ratio}, position {position}, from {case.batch.context_lens[0]} on"
        if topk < 7 and not subject.properties.deterministic:
            _holds(indices, ranked[:1], what)
        else:
            _expect(indices, ranked[:topk], what)


def _holds(row: Tensor, wanted: Sequence[int], what: str) -> None:
    if not set(wanted) <= set(row.tolist()):
        raise Violation(f"{what}: {row.tolist()} lacks {list(wanted)}")


def tied(dims: tuple[int, int], dtype: str) -> list[tuple[IndexerCase, BatchRecipe, Sequence[int]]]:
    """I2's calls, with the entries that the tie rule selects in every row."""
    calls: list[tuple[IndexerCase, BatchRecipe, Sequence[int]]] = []
    for high, topk, wanted in (
        ((), 4, range(4)),
        ((2, 5, 7, 11, 13), 4, (2, 5, 7, 11)),
        ((9,), 4, (9, 0, 1, 2)),
        ((), 16, range(16)),
        ((), 20, range(16)),
    ):
        keys = torch.full((16, 4), -1.0)  # ReLU makes the score 0
        keys[list(high)] = torch.tensor([1.0, 0.0, 0.0, 0.0])
        q = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(8, 1)
        batch = BatchRecipe((1,) * 8, (15,) * 8, page_tokens=64)
        calls.append((given_keys(batch, q, keys, dims, dtype=dtype, ratio=1, topk=topk), batch, wanted))
    return calls


def i2(subject: Subject) -> None:
    """Ties take the lower index, in one batch of eight rows, in two of four, and row by row; ten times on a GPU.

    Without a promise of determinism, the selection is any that the scores allow.
    """
    repeats = 10 if subject.device.type == "cuda" else 1
    for dtype in subject.dtypes:
        for calls in zip(*(tied(dims, dtype) for dims in DIMS), strict=True):
            case, wanted = subject.nearest(case for case, _, _ in calls), calls[0][2]
            for size in repeats * (8, 4, 1):
                for start in range(0, 8, size):
                    taken, _ = case.take(range(start, start + size))
                    _check_i2(subject, taken, wanted)


def _check_i2(subject: Subject, case: IndexerCase, wanted: Sequence[int]) -> None:
    found = subject.run(case)
    if not subject.properties.deterministic:
        subject.family.compare(subject, case, found, subject.reference(case), 1.0)
        return
    for row in found["indices"]:
        _expect(row, wanted, f"k = {case.problem.topk}, {case.units} rows at once")


def m3(subject: Subject) -> None:
    """Queries and keys quantised to MXFP4 in blocks of every kind: an operator that computes in FP4 loses nothing."""
    for dtype in subject.dtypes:
        case = subject.nearest(_quantized(heads, head_dim, dtype) for heads, head_dim in DIMS if head_dim % 32 == 0)
        subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)


def _quantized(heads: int, head_dim: int, dtype: str) -> IndexerCase:
    case = IndexerRecipe(_LONG, dtype, heads, head_dim, topk=6, seed=3).build()
    generator, magnitudes = torch.Generator().manual_seed(4), torch.tensor([amax for amax, _ in AMAXES])

    def blocks(like: Tensor) -> Tensor:
        """Blocks of 32 whose largest magnitudes are those of the case, in turn."""
        values = torch.rand(like.numel() // 32, 32, generator=generator) * 2 - 1
        values[:, 7] = 1.0
        values = values * magnitudes[torch.arange(len(values)) % 6, None]
        return qdq_mxfp4(values).view(like.shape).to(like.dtype)

    problem = replace(case.problem, kv_quantization="released")
    return replace(case, problem=problem, q=blocks(case.q), index_keys=blocks(case.index_keys))


CASES = (
    ExplicitCase("I1", "the group that a query stands inside: visible before its last token", i1),
    ExplicitCase("I2", "ties broken by tile, thread or batch", i2),
    ExplicitCase("M3", "another scale, hence other codes, when what was quantised is quantised again", m3),
    *WHOLE_MODEL,
)
