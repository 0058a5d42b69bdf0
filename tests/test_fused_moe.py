"""`moe: fused`, interpreted: what the conformance kit doesn't show of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minideepinfer.operators import Arrived, Dispatched, PackedExperts
from minideepinfer.quantization import decode_mxfp4, qdq_fp8
from minideepinfer.testing.recipes.batch import context
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe
from minideepinfer.testing.tensors import same_bits
from minideepinfer_comm.single import SingleComm
from minideepinfer_moe import fused, naive
from minideepinfer_moe.experts import PlainProducts
from minideepinfer_moe.gate import select
from minideepinfer_moe.rows import quantize
from minideepinfer_moe.schedule import SMALL_SLOTS, Schedule, make_schedule
from torch import Tensor

PROFILE = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_exponent_is_decoded_bit_by_bit(dtype: torch.dtype) -> None:
    """One expert whose w2 is everything there is, 16 bytes to a row; rows of r are 1 in one column and 0 elsewhere."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)[:, None]
    w13 = torch.zeros(1, 2, 32, codes.shape[0] // 2, dtype=torch.uint8)
    experts = PackedExperts(
        w13, torch.zeros(1, 2, 32, codes.shape[0] // 32, dtype=torch.uint8), codes[None], scales[None]
    )
    schedule = make_schedule(torch.zeros(32, 1, dtype=torch.int32), torch.ones(32, 1), 0, 1, 16)
    products = PlainProducts(wide=True)
    y = products.down(torch.eye(32, dtype=dtype), products.pack(experts), schedule)
    expected = decode_mxfp4(codes, scales, dtype).T
    finite = expected.isfinite()
    shown = finite.all(0)  # where a row of weights holds infinity, 0 times it is NaN for the other tokens
    assert shown.sum() > 252 * 16
    assert same_bits(y[:, shown] + 0.0, expected[:, shown] + 0.0)
    assert not y[~finite].isfinite().any()
    assert y[:, scales[:, 0] == 255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qdq_fp8_is_that_of_the_release_bit_by_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator) * torch.randint(-30, 30, (64, 64), generator=generator).float().exp2()
    x[0] = 0.0
    x[1, :32] = 448.0 * 2.0 ** torch.arange(-16, 16)  # amax exactly at the edge of a scale
    x[2, :32] = torch.arange(32) * 2.0**-3  # ties of the code
    x[2, 32:] = torch.arange(32) * 2.0**-10 + 2.0**-11  # subnormal codes and their ties
    x[2, 63] = 448.0
    x = x.to(dtype)
    assert same_bits(quantize(x), qdq_fp8(x))


def expected_order(ids: Tensor, start: int, experts: int) -> list[int]:
    """Slots in the order of the schedule."""
    flat = ids.flatten().tolist()
    return [slot for e in range(start, start + experts) for slot, expert in enumerate(flat) if expert == e]


def assert_sorted(schedule: Schedule, ids: Tensor, weights: Tensor, start: int, experts: int) -> None:
    order = expected_order(ids, start, experts)
    rows, counts = len(order), [int((ids == start + e).sum()) for e in range(experts)]
    assert schedule.expert_offsets.tolist() == [sum(counts[:e]) for e in range(experts + 1)]
    assert schedule.sorted_tokens[:rows].tolist() == [slot // ids.shape[1] for slot in order]
    assert torch.equal(schedule.row_weights[:rows], weights.flatten()[order])
    slot_rows = torch.full((ids.numel(),), -1, dtype=torch.int32)
    slot_rows[order] = torch.arange(rows, dtype=torch.int32)
    assert torch.equal(schedule.slot_rows.flatten(), slot_rows)


def assert_tiled(schedule: Schedule) -> None:
    """Tiles cover each expert's rows once and in order, as few as possible."""
    tiles = schedule.tiles.tolist()
    used = [tile for tile in tiles if tile[2]]
    assert tiles[: len(used)] == used and schedule.num_tiles.tolist() == [len(used)]
    offsets, expected = schedule.expert_offsets.tolist(), []
    for expert in range(schedule.num_experts):
        rows = offsets[expert + 1] - offsets[expert]
        mine = [tile for tile in used if tile[0] == expert]
        assert len(mine) == -(-rows // schedule.tile_rows)
        assert all(tile[2] == mine[0][2] and not tile[2] % 8 for tile in mine[:-1])
        expected += mine
        covered = [row for _, first, count in mine for row in range(first, first + count)]
        assert covered == list(range(offsets[expert], offsets[expert + 1]))
    assert used == expected


@PROFILE
@given(st.data())
def test_schedules_are_stable_sorts_by_expert(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40))
    local = data.draw(st.integers(1, num_experts))
    start = data.draw(st.integers(0, num_experts - local))
    tokens, topk = data.draw(st.integers(1, 60)), data.draw(st.sampled_from([1, 3, 6]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    few = data.draw(st.sampled_from([1, 7, num_experts]))
    ids = torch.randint(-1, num_experts, (tokens, topk), generator=generator).int() // few
    weights = torch.rand(tokens, topk, generator=generator)
    schedule = make_schedule(ids, weights, start, local, data.draw(st.sampled_from([8, 16, 128])))
    assert_sorted(schedule, ids, weights, start, local)
    assert_tiled(schedule)


def test_a_schedule_of_many_blocks_sorts_as_one_of_few() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 30, (SMALL_SLOTS // 6 + 100, 6), generator=generator).int()
    weights = torch.rand(ids.shape, generator=generator)
    schedule = make_schedule(ids, weights, 7, 11, 32)
    assert_sorted(schedule, ids, weights, 7, 11)
    assert_tiled(schedule)


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("topk", [1, 4, 6])
def test_rows_of_other_ranks_are_never_read(tokens: int, topk: int) -> None:
    recipe = MoeRecipe(dtype="bfloat16", num_experts=12, num_local_experts=3, expert_start=3, tokens=tokens, topk=topk)
    case = replace(recipe, seed=tokens + topk).build()
    zeros = replace(case, x=case.x.nan_to_num(0.0))
    assert case.routing is not None and case.x.isnan().any(1).equal(~case.local_rows())
    operator, comm = fused.build(context(case.problem)), SingleComm()
    found = case.run(operator, comm)
    assert same_bits(found, zeros.run(operator, comm))
    assert (found[~case.local_rows()] == 0).all()
    expected = case.run(naive.build(context(case.problem)), comm)
    torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-6)


def test_selection_of_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(9, 384, generator=generator) * 8, torch.randn(384, generator=generator)
    logits[0] = 0.0  # ties in the scores, decided by the bias alone
    bias[5:9] = bias.max()  # ties there too
    bias[20:30] = -torch.inf
    logits[1] = torch.nan
    ids, weights = select(logits, bias, 6, 1.5)
    scores = F.softplus(logits.double()).sqrt()
    expected = (scores.float() + bias).sort(dim=-1, descending=True, stable=True).indices[:, :6].sort(-1).values
    rows = [row for row in range(9) if row != 1]
    assert torch.equal(ids[rows].long(), expected[rows])
    chosen = scores.gather(1, expected)[rows]
    torch.testing.assert_close(weights[rows].double(), chosen / chosen.sum(1, keepdim=True) * 1.5, rtol=1e-6, atol=0.0)
    assert ids[1].unique().numel() == 6 and (ids[1] >= 0).all() and (ids[1] < 384).all()


@pytest.mark.parametrize("logit", [-1000.0, -80.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 1000.0])
def test_scores_are_exact_at_both_ends(logit: float) -> None:
    logits = torch.tensor([[logit, 0.25]])
    weights = select(logits, torch.zeros(2), 2, 1.0)[1][0].double()
    score = torch.logaddexp(logits.double(), torch.zeros(2).double()).sqrt()[0]
    torch.testing.assert_close(weights, score / score.sum(), rtol=1e-6, atol=1e-19)


class Mirrored:
    """A comm operator of two ranks, where every rank sees all tokens in reverse order and the other adds nothing."""

    rank, world_size = 0, 2

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Arrived[Dispatched]:
        return Arrived(Dispatched(x.flip(0), topk_ids.flip(0), topk_weights.flip(0), "handle"))

    def combine(self, partial: Tensor, handle: str) -> Arrived[Tensor]:
        assert partial.dtype is torch.float32 and handle == "handle"
        return Arrived(partial.flip(0))


@pytest.mark.parametrize("quantization", ["none", "released"])
def test_tokens_go_through_the_comm_operator_of_a_larger_world(quantization: str) -> None:
    recipe = MoeRecipe(tokens=5, num_experts=4, num_local_experts=2, topk=2, shared=True)
    case: MoeCase = replace(recipe, activation_quantization=quantization).build()
    operator = fused.build(context(case.problem))
    torch.testing.assert_close(case.run(operator, Mirrored()), case.run(operator, SingleComm()), rtol=1e-6, atol=1e-6)


def test_weights_stay_packed() -> None:
    case = replace(MoeRecipe(hidden_size=96, intermediate_size=64, num_local_experts=2), dtype="bfloat16").build()
    weights = fused.build(context(case.problem)).transform_weights(case.weights)
    packed, released = weights.experts, case.weights.experts
    assert packed.w13.dtype is packed.w2.dtype is torch.uint8
    assert packed.w13.numel() == released.w13.numel() and packed.w2.numel() == released.w2.numel()


@pytest.mark.parametrize("exponent", [128, 129, 130, 255])
def test_exponents_that_a_packed_form_cannot_hold_take_the_other(exponent: int) -> None:
    recipe = MoeRecipe(tokens=2, dtype="bfloat16", hidden_size=128, intermediate_size=128)
    case = recipe.build()
    case.weights.experts.w2_scale[0, 0, 0] = exponent
    operator = fused.build(context(case.problem))
    found, expected = (case.run(o, SingleComm()) for o in (operator, naive.build(context(case.problem))))
    torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-6, equal_nan=True)
