"""Naive indexer against the loop oracle, and cases I1 and I2."""

from __future__ import annotations

from dataclasses import replace

import oracles
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minideepinfer.operators import TOKEN_INDICES, Batch, IndexerProblem
from minideepinfer.testing.recipes.batch import context, facts, locate, make_batch, move_pages, num_pages
from minideepinfer.testing.recipes.indexer import IndexerCase
from minideepinfer.testing.strategies import indexer_cases
from minideepinfer_indexer.naive import build
from torch import Tensor

PROFILE = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(case: IndexerCase) -> tuple[Tensor, Tensor | None]:
    return case.run(build(context(case.problem)))


def assert_padded_set(row: Tensor, expected: set[int]) -> None:
    """Each number once, -1 behind them."""
    numbers = row.tolist()
    assert sorted(numbers[: len(expected)]) == sorted(expected)
    assert numbers[len(expected) :] == [-1] * (len(numbers) - len(expected))


def check(case: IndexerCase) -> None:
    indices, candidates = run(case)
    assert indices.dtype is torch.int32
    assert indices.shape == (case.batch.num_tokens, case.problem.topk)
    assert (candidates is not None) == case.problem.emits_candidates
    if candidates is not None:
        assert candidates.dtype is torch.int32
        assert candidates.shape == (case.batch.num_tokens, case.problem.candidate_topk_blocks)
    for row in range(case.batch.num_tokens):
        entries, blocks = oracles.select(case, row)
        assert_padded_set(indices[row], entries)
        if candidates is not None:
            assert_padded_set(candidates[row], blocks)


@PROFILE
@given(indexer_cases(torch.float32))
def test_float32_selects_what_the_oracle_selects(case: IndexerCase) -> None:
    check(case)


@PROFILE
@given(indexer_cases(torch.bfloat16))
def test_bfloat16_selects_what_the_oracle_selects(case: IndexerCase) -> None:
    check(case)


@PROFILE
@given(indexer_cases(torch.bfloat16), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_other_requests(case: IndexerCase, random: object) -> None:
    order = list(range(len(case.batch.seqlens)))
    random.shuffle(order)  # type: ignore[attr-defined]
    indices, candidates = run(case)
    for requests in (order, *([request] for request in order)):
        taken, rows = case.take(requests)
        taken_indices, taken_candidates = run(taken)
        assert torch.equal(taken_indices, indices[rows])
        if candidates is not None and taken_candidates is not None:
            assert torch.equal(taken_candidates, candidates[rows])


@PROFILE
@given(indexer_cases(), st.integers(0, 1000))
def test_other_pages_give_the_same_bits(case: IndexerCase, seed: int) -> None:
    batch, pool = move_pages(case.batch, case.index_keys, torch.Generator().manual_seed(seed))
    assert torch.equal(run(replace(case, batch=batch, index_keys=pool))[0], run(case)[0])


@PROFILE
@given(indexer_cases())
def test_unread_keys_do_not_matter(case: IndexerCase) -> None:
    clean = replace(case, q=case.q.nan_to_num(2.0), index_keys=case.index_keys.nan_to_num(2.0))
    assert torch.equal(run(clean)[0], run(case)[0])


def simple_case(batch: Batch, q: Tensor, keys: Tensor, *, ratio: int, topk: int) -> IndexerCase:
    """One head of weight 1 for one or more equal requests whose logical keys are given, `[N, d]`."""
    pool = torch.full((num_pages(batch), batch.page_tokens // ratio, keys.shape[1]), float("nan"))
    for request in range(batch.num_requests):
        for entry in range(len(keys)):
            pool[locate(batch, request, entry, ratio)] = keys[entry]
    problem = IndexerProblem(
        **facts(torch.float32),
        num_heads=1,
        head_dim=keys.shape[1],
        compress_ratio=ratio,
        topk=topk,
        emits_candidates=False,
        uses_candidates=False,
        candidate_topk_blocks=1,
        candidate_block_size=8,
        page_tokens=batch.page_tokens,
        cache_layout="float32",
        selection_layout=TOKEN_INDICES,
    )
    return IndexerCase(problem, batch, q[:, None], torch.ones(len(q), 1), pool, None)


@pytest.mark.parametrize("chunks", [[7], [3, 4], [1, 6]])
@pytest.mark.parametrize("ratio", [1, 2])
def test_i1_the_group_that_a_query_stands_inside(ratio: int, chunks: list[int]) -> None:
    num_entries = 7 // ratio
    # Score 100 for the query's own group, 1 elsewhere; the group of p = 6 at ratio 2 has no entry.
    scores = torch.ones(7, 8)
    scores[torch.arange(7), torch.arange(7) // ratio] = 100.0
    keys = torch.eye(8)[:num_entries]
    for topk in (2, 3, 7):
        rows, start = [], 0
        for chunk in chunks:
            batch = make_batch([chunk], [start], page_tokens=16)
            case = simple_case(batch, scores[start : start + chunk], keys, ratio=ratio, topk=topk)
            rows += run(case)[0].unbind(0)
            start += chunk
        for position, row in enumerate(rows):
            visible = list(range((position + 1) // ratio))
            ranked = sorted(visible, key=lambda e: (-scores[position, e].item(), e))
            assert_padded_set(row, set(ranked[:topk]))
    assert rows[0].tolist() == ([-1] * 7 if ratio == 2 else [0] + [-1] * 6)


@pytest.mark.parametrize(
    ("high", "topk", "expected"),
    [
        ([], 4, {0, 1, 2, 3}),
        ([2, 5, 7, 11, 13], 4, {2, 5, 7, 11}),
        ([9], 4, {9, 0, 1, 2}),
        ([], 16, set(range(16))),
        ([], 20, set(range(16))),
    ],
)
def test_i2_ties_take_the_lower_index(high: list[int], topk: int, expected: set[int]) -> None:
    keys = torch.full((16, 4), -1.0)  # ReLU makes the score 0
    keys[high] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    q = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(8, 1)
    for run_number in range(10):
        generator = torch.Generator().manual_seed(run_number)
        for chunk in (8, 4, 1):
            for start in range(0, 8, chunk):
                # Ratio 8 shows 16 entries to all positions 127 .. 134.
                batch = make_batch([chunk], [127 + start], page_tokens=64, generator=generator)
                indices, _ = run(simple_case(batch, q[:chunk], keys, ratio=8, topk=topk))
                for row in indices:
                    assert_padded_set(row, expected)


def test_a_negative_zero_ties_with_zero() -> None:
    keys = torch.full((16, 1), -1.0)
    keys[9] = 1e-30
    batch = make_batch([1], [127], page_tokens=64)
    case = simple_case(batch, torch.tensor([[1e-30]]), keys, ratio=8, topk=4)
    # Entry 9 scores -1e-60, which is -0.0 in float32.
    assert_padded_set(run(replace(case, head_weights=-case.head_weights))[0][0], {0, 1, 2, 3})
    assert_padded_set(run(case)[0][0], {0, 1, 2, 3})
