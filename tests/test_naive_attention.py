"""Naive attention against the loop oracle, and cases A1, A2, A3."""

from __future__ import annotations

from dataclasses import replace

import oracles
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minideepinfer.operators import TOKEN_INDICES, AttentionProblem, Phase, Selection
from minideepinfer.testing.bounds import attention_bound
from minideepinfer.testing.recipes.attention import AttentionCase, fill_readable
from minideepinfer.testing.recipes.batch import GARBAGE, NAN, context, facts, make_batch, move_pages, num_pages
from minideepinfer.testing.strategies import attention_cases
from minideepinfer_attention.naive import build
from torch import Tensor

PROFILE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(case: AttentionCase) -> Tensor:
    return case.run(build(context(case.problem)))


def check(case: AttentionCase) -> None:
    expected, bound = oracles.attention(case), attention_bound(case, case.q.dtype)
    output = run(case)
    assert output.shape == case.q.shape
    assert output.dtype == case.q.dtype
    error = (output.double() - expected).abs().flatten(1).amax(1) if len(output) else torch.zeros(0)
    assert (error <= bound).all(), f"errors {error.tolist()} above bounds {bound.tolist()}"


@PROFILE
@given(attention_cases(torch.float32))
def test_float32_stays_within_the_derived_bound(case: AttentionCase) -> None:
    check(case)


@PROFILE
@given(attention_cases(torch.bfloat16))
def test_bfloat16_stays_within_the_derived_bound(case: AttentionCase) -> None:
    check(case)


@PROFILE
@given(attention_cases(), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_other_requests(case: AttentionCase, random: object) -> None:
    order = list(range(len(case.batch.seqlens)))
    random.shuffle(order)  # type: ignore[attr-defined]
    output = run(case)
    for requests in (order, *([request] for request in order)):
        taken, rows = case.take(requests)
        assert torch.equal(run(taken), output[rows])


@PROFILE
@given(attention_cases(), st.integers(0, 1000))
def test_other_pages_give_the_same_bits(case: AttentionCase, seed: int) -> None:
    if case.global_kv is None:
        return
    batch, pool = move_pages(case.batch, case.global_kv, torch.Generator().manual_seed(seed))
    assert torch.equal(run(replace(case, batch=batch, global_kv=pool)), run(case))


@PROFILE
@given(attention_cases())
def test_unread_memory_and_inputs_are_left_alone(case: AttentionCase) -> None:
    tensors = [case.q, case.window_new, case.window_ring, case.cos, case.sin]
    tensors += [] if case.global_kv is None or case.selection is None else [case.global_kv, case.selection.indices]
    before = [tensor.clone() for tensor in tensors]
    poisoned = run(case)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copy.nan_to_num(7))
    clean = {name: getattr(case, name).nan_to_num(3.0) for name in ("q", "window_new", "window_ring")}
    pool = None if case.global_kv is None else case.global_kv.nan_to_num(3.0)
    assert torch.equal(run(replace(case, **clean, global_kv=pool)), poisoned)


@PROFILE
@given(attention_cases(), st.integers(1, 6))
def test_a_prompt_in_two_steps_gives_the_same_bits(case: AttentionCase, cut: int) -> None:
    """The first rows go into the ring, the rest is a step of its own."""
    batch = case.batch
    whole, rows = case.take([0]) if batch.seqlens and batch.positions[:1].ge(0).all() else (case, None)
    if rows is None or len(rows) <= cut:
        return
    seq, start = whole.batch.seqlens[0] - cut, whole.batch.context_lens[0]
    window = whole.problem.sliding_window
    ring = torch.full((1, window + 8, whole.q.shape[-1]), NAN)
    for position in range(max(0, start - window + 1), start):
        slot = position % whole.window_ring.shape[1]
        ring[0, position % ring.shape[1]] = whole.window_ring[whole.batch.ring_table[0], slot]
    for i in range(cut):
        ring[0, (start + i) % ring.shape[1]] = whole.window_new[i]
    selection = whole.selection
    if selection is not None:
        selection = Selection(selection.indices[cut:], None if selection.lens is None else selection.lens[cut:])
    tail = replace(
        whole,
        batch=replace(
            whole.batch,
            seqlens=(seq,),
            context_lens=(start + cut,),
            cu_seqlens=torch.tensor([0, seq], dtype=torch.int32),
            positions=whole.batch.positions[cut:],
            request_ids=whole.batch.request_ids[cut:],
            ring_table=torch.tensor([0]),
        ),
        selection=selection,
        window_ring=ring,
        **{name: getattr(whole, name)[cut:] for name in ("q", "window_new", "cos", "sin")},
    )
    assert torch.equal(run(tail), run(whole)[cut:])


def selected_only(
    indices: list[list[int]], num_entries: int, *, lens: list[int] | None = None, heads: int = 2, dim: int = 64
) -> AttentionCase:
    """One request whose rows have no window and read what they select; angles are 0."""
    generator = torch.Generator().manual_seed(11)
    rows = len(indices)
    # Ratio 64 shows `num_entries` to all of up to 64 rows.
    batch = make_batch(
        [rows], [num_entries * 64 - 1], page_tokens=1024, window_start=[num_entries * 64 + rows], generator=generator
    )
    case = AttentionCase(
        problem=AttentionProblem(
            **facts(torch.float32),
            num_heads=heads,
            head_dim=dim,
            rope_dim=16,
            sliding_window=4,
            compress_ratio=64,
            index_topk=len(indices[0]),
            page_tokens=1024,
            cache_layout="float32",
            selection_layout=TOKEN_INDICES,
        ),
        batch=batch,
        q=torch.randn(rows, heads, dim, generator=generator),
        window_new=torch.full((rows, dim), NAN),
        window_ring=torch.full((2, 6, dim), NAN),
        global_kv=torch.full((num_pages(batch), 16, dim), NAN),
        selection=Selection(
            torch.tensor(indices, dtype=torch.int32), None if lens is None else torch.tensor(lens, dtype=torch.int32)
        ),
        sink=None,
        cos=torch.ones(rows, 8),
        sin=torch.zeros(rows, 8),
        scale=dim**-0.5,
    )
    fill_readable(case, generator)
    return case


@pytest.mark.parametrize("sink", [None, torch.tensor([0.3, -0.2])])
def test_a1_a_first_tile_with_no_valid_key(sink: Tensor | None) -> None:
    row = [-1] * 48 + [5, 17, 40, 80] + [-1] * 12
    case = replace(selected_only([row, [-1] * 64], 96), sink=sink)
    expected, bound = oracles.attention(case), attention_bound(case, case.q.dtype)
    assert case.selection is not None
    for seed in range(6):
        output = run(case)
        assert ((output.double() - expected).abs().flatten(1).amax(1) <= bound).all()
        assert (output[1] == 0.0).all()
        assert (output[0] != 0.0).any()
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        case = replace(case, selection=Selection(case.selection.indices[:, order]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a2_a_padding_row_must_not_touch_real_rows(dtype: torch.dtype) -> None:
    valid = [list(range(3, 3 + n)) for n in (1, 7, 20)]
    rows = [[-1] * ((32 - len(v)) // 2) + v + [-1] * (32 - len(v) - (32 - len(v)) // 2) for v in valid]
    alone = selected_only(rows, 64)
    assert alone.global_kv is not None
    alone = replace(
        alone,
        problem=replace(alone.problem, dtype=str(dtype).removeprefix("torch.")),
        **{name: getattr(alone, name).to(dtype) for name in ("q", "window_new", "window_ring", "global_kv")},
    )
    padded = selected_only([*rows, [-1] * 32], 64)
    nan_row = torch.full_like(alone.q[:1], NAN)
    padded = replace(
        padded,
        problem=alone.problem,
        q=torch.cat([alone.q, nan_row]),
        window_new=padded.window_new.to(dtype),
        window_ring=padded.window_ring.to(dtype),
        global_kv=alone.global_kv,
        batch=replace(padded.batch, block_table=alone.batch.block_table),
    )
    without, with_padding = run(alone), run(padded)
    assert torch.equal(with_padding[:3], without)
    assert (with_padding[3] == 0.0).all()
    scales = [output.float().abs().amax() / 448.0 for output in (without, with_padding)]
    assert scales[0].isfinite() and scales[0] > 0 and torch.equal(*scales)
    codes = [(out.float() / s).to(torch.float8_e4m3fn) for out, s in zip((without, with_padding), scales, strict=True)]
    assert torch.equal(codes[0].view(torch.uint8), codes[1][:3].view(torch.uint8))


def test_a3_left_over_values_in_a_reused_index_buffer() -> None:
    real = [3, 9, 11, 30, 49]
    clean = selected_only([real + [-1] * 59], 50)
    expected = run(clean)
    assert expected.isfinite().all() and (expected != 0).any()
    stale = [real + [GARBAGE] * 59, real + [50, 53, -7] + [12] * 56, real + [0, GARBAGE, -1] + [-7] * 56]
    for row in stale:
        with_lens = Selection(torch.tensor([row], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
        assert torch.equal(run(replace(clean, selection=with_lens)), expected)
    for row in [real + [GARBAGE] * 59, real + [50, 53, -7] * 19 + [-1, -1], [*([50, -7] * 29), 53, *real]]:
        without_lens = Selection(torch.tensor([row], dtype=torch.int32))
        torch.testing.assert_close(run(replace(clean, selection=without_lens)), expected, rtol=1e-6, atol=1e-6)


def test_an_entry_named_twice_counts_twice() -> None:
    case = selected_only([[4, 9, 4]], 16)
    assert case.selection is not None
    expected, bound = oracles.attention(case), attention_bound(case, case.q.dtype)
    once = run(replace(case, selection=Selection(case.selection.indices[:, :2])))
    assert (run(case).double() - expected).abs().amax() <= bound.max()
    assert (run(case) - once).abs().amax() > 1e-3


def test_a_row_alone_gives_the_same_bits_at_shapes_where_matrix_products_do_not() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 128, (12, 118), generator=generator).tolist()
    case = selected_only(rows, 128, heads=10, dim=256)
    output = run(case)
    assert case.selection is not None
    for row in (0, 5, 11):
        alone = replace(
            case,
            batch=replace(
                case.batch,
                seqlens=(1,),
                context_lens=(case.batch.context_lens[0] + row,),
                cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
                positions=case.batch.positions[row : row + 1],
                request_ids=case.batch.request_ids[row : row + 1],
            ),
            selection=Selection(case.selection.indices[row : row + 1]),
            **{name: getattr(case, name)[row : row + 1] for name in ("q", "window_new", "cos", "sin")},
        )
        assert torch.equal(run(alone), output[row : row + 1])


def test_decode_and_prefill_rows_are_the_same_rows() -> None:
    case = selected_only([[4, 9, 4], [-1, 2, 3]], 16)
    decode = replace(case, batch=replace(case.batch, phase=Phase.DECODE))
    assert torch.equal(run(decode), run(case))
