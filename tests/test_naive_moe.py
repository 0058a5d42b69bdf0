"""Naive mixture of experts against the loop oracle, within the kit's bound; cases M1, M2, M4 and C1 on one rank."""

from __future__ import annotations

import math
from dataclasses import replace

import oracles
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from minideepinfer.operators import Arrived, Dispatched, MoeWeights, PackedExperts
from minideepinfer.quantization import E2M1_VALUES
from minideepinfer.testing.bounds import moe_bound, route
from minideepinfer.testing.recipes.batch import NAN, context, facts
from minideepinfer.testing.recipes.moe import MoeCase, moe_problem, random_experts
from minideepinfer.testing.strategies import moe_cases
from minideepinfer_comm.single import SingleComm
from minideepinfer_moe.naive import build
from torch import Tensor

PROFILE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NO_GATE = torch.zeros(0)


def run(case: MoeCase) -> Tensor:
    return case.run(build(context(case.problem)), SingleComm())


def check(case: MoeCase) -> None:
    """Within the kit's bound of the oracle, in rows whose experts no rounding can change."""
    if case.routing is None:
        routed = [oracles.route(case, row) for row in range(len(case.x))]
        ids, weights = [r[0] for r in routed], [r[1] for r in routed]
        decided = route(case)[3]
    else:
        ids, weights = case.routing[0].tolist(), case.routing[1].tolist()
        decided = torch.ones(len(case.x), dtype=torch.bool)
    expected, bound = oracles.moe(case, ids, weights), moe_bound(case, case.x.dtype)
    output = run(case)
    assert output.dtype == case.x.dtype
    assert output.shape == case.x.shape
    assert ((bound.value - expected).abs() <= bound.error)[decided].all()
    excess = ((output.double() - expected).abs() - bound.error)[decided]
    assert (excess <= 0).all(), f"above the bound by {excess.max()}"


@PROFILE
@given(moe_cases(torch.float32))
def test_float32_stays_within_the_running_error_bound(case: MoeCase) -> None:
    check(case)


@PROFILE
@given(moe_cases(torch.bfloat16))
def test_bfloat16_stays_within_the_running_error_bound(case: MoeCase) -> None:
    check(case)


@PROFILE
@given(moe_cases(torch.float32, "released"))
def test_fp8_activations_stay_within_the_running_error_bound(case: MoeCase) -> None:
    check(case)


@PROFILE
@given(moe_cases(torch.bfloat16, "released"))
def test_bfloat16_with_fp8_activations_stays_within_the_running_error_bound(case: MoeCase) -> None:
    check(case)


@PROFILE
@given(moe_cases())
def test_routing_is_that_of_the_oracle(case: MoeCase) -> None:
    case = replace(case, x=case.x.nan_to_num())  # rows without a local expert are NaN
    ids, weights = build(context(case.problem)).route(case.x, case.weights)
    assert ids.dtype is torch.int32 and weights.dtype is torch.float32
    assert ids.shape == weights.shape == (len(case.x), case.problem.topk)
    _, _, error, decided = route(case)
    for row in decided.nonzero().flatten().tolist():
        expected, expected_weights = oracles.route(case, row)
        assert ids[row].tolist() == expected
        off = (weights[row].double() - torch.tensor(expected_weights, dtype=torch.float64)).abs()
        assert (off <= error[row]).all()


@PROFILE
@given(moe_cases())
def test_given_routing_equals_own_routing(case: MoeCase) -> None:
    case = replace(case, x=case.x.nan_to_num())  # rows without a local expert are NaN
    routing = build(context(case.problem)).route(case.x, case.weights)
    assert torch.equal(run(replace(case, routing=routing)), run(replace(case, routing=None)))


def test_equal_scores_take_the_lower_expert_and_the_bias_never_weighs() -> None:
    problem = moe_problem(32, 32, 6, 6, 3, **facts(torch.float32))
    experts = random_experts(6, 32, 32, torch.Generator().manual_seed(0))
    weights = MoeWeights(torch.zeros(6, 32).bfloat16(), torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, -1.0]), experts, None)
    ids, topk_weights = build(context(problem)).route(torch.randn(4, 32), weights)
    assert ids.tolist() == [[0, 1, 4]] * 4
    torch.testing.assert_close(topk_weights, torch.full((4, 3), 0.5))


@pytest.mark.parametrize("logit", [-1000.0, -80.0, 80.0, 1000.0])
def test_softplus_is_stable_at_both_ends(logit: float) -> None:
    problem = moe_problem(32, 32, 2, 2, 1, **facts(torch.float32))
    gate = torch.zeros(2, 32)
    gate[:, 0] = 1.0
    x = torch.zeros(1, 32)
    x[0, 0] = logit
    experts = random_experts(2, 32, 32, torch.Generator().manual_seed(0))
    ids, weights = build(context(problem)).route(x, MoeWeights(gate.bfloat16(), torch.zeros(2), experts, None))
    assert ids.tolist() == [[0]]
    score = math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))) if logit > 0 else math.exp(logit / 2)
    # At -80 the 1e-20 under the fraction shows; at -1000 the score underflows, and 0 / 1e-20 is 0.
    assert weights.item() == pytest.approx(1.5 * score / (score + 1e-20), rel=1e-5)


def forced(ids: list[list[int]], experts: PackedExperts, hidden: int, inner: int, num_experts: int) -> MoeCase:
    generator = torch.Generator().manual_seed(3)
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    return MoeCase(
        moe_problem(hidden, inner, num_experts, experts.num_local, topk_ids.shape[1], **facts(torch.float32)),
        torch.randn(len(ids), hidden, generator=generator),
        MoeWeights(NO_GATE, NO_GATE, experts, None),
        (topk_ids, torch.rand(topk_ids.shape, generator=generator)),
    )


def test_m1_experts_without_tokens() -> None:
    experts = random_experts(6, 64, 96, torch.Generator().manual_seed(1))
    for unused in (0, 2, 4, 5):
        experts.w13_scale[unused] = 255
        experts.w2_scale[unused] = 255
    case = forced([[1], [3], [1], [1], [3], [1], [3], [1]], experts, 64, 96, 6)
    outputs = []
    for _ in range(2):
        block = torch.full(case.x.shape, NAN)
        del block
        outputs.append(run(case))
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)
    check(case)


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0, 2.0**-127), (1, 2.0**-126), (126, 0.5), (127, 1.0), (134, 128.0), (254, 2.0**127), (255, NAN)],
)
def test_m2_e8m0_at_its_edges(byte: int, value: float) -> None:
    """w2 holds all 16 codes with one exponent; what goes into it is 1, so the output shows the decoded numbers."""
    hidden, inner = 32, 96  # three blocks of 32: an odd number
    w13 = torch.zeros(1, 2, inner, hidden // 2, dtype=torch.uint8)
    w13[0, :, 0, 0] = 0x02  # w1[0, 0] = w3[0, 0] = 1
    w2 = torch.zeros(1, hidden, inner // 2, dtype=torch.uint8)
    w2[0, :16, 0] = torch.arange(16, dtype=torch.uint8)
    scales = torch.full((1, hidden, 3), 127, dtype=torch.uint8)
    scales[0, :16, 0] = byte
    experts = PackedExperts(w13, torch.full((1, 2, inner, 1), 127, dtype=torch.uint8), w2, scales)
    case = forced([[0]], experts, hidden, inner, 1)
    x = torch.zeros(1, hidden)
    x[0, 0] = 1.0
    weight = 1.0 / torch.nn.functional.silu(torch.tensor(1.0))
    assert torch.nn.functional.silu(torch.tensor(1.0)) * weight == 1.0
    output = run(replace(case, x=x, routing=(torch.zeros(1, 1, dtype=torch.int32), weight.view(1, 1))))
    expected = torch.tensor([sign * code * value for sign in (1.0, -1.0) for code in E2M1_VALUES])
    torch.testing.assert_close(output[0, :16], expected, rtol=0, atol=0, equal_nan=True)
    assert (output[0, 16:] == 0.0).all()


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("topk", [1, 4, 6])
def test_m4_rows_of_other_ranks_are_never_read(tokens: int, topk: int) -> None:
    hidden, inner, num_experts, local = 1056, 96, 8, 2
    generator = torch.Generator().manual_seed(tokens * 10 + topk)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:topk] for _ in range(tokens)])
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    for rank in (0, 3):
        experts = random_experts(local, hidden, inner, generator, start=rank * local)
        experts.w13[0, 0, 0, :256] = torch.arange(256, dtype=torch.uint8)
        case = forced(ids.tolist(), experts, hidden, inner, num_experts)
        here = ((ids >= rank * local) & (ids < (rank + 1) * local)).any(1)
        zeroed = replace(case, x=case.x.masked_fill(~here[:, None], 0.0))
        poisoned = replace(case, x=case.x.masked_fill(~here[:, None], NAN))
        output = run(poisoned)
        assert torch.equal(output, run(zeroed))
        assert output.isfinite().all()
        assert (output[~here] == 0.0).all()


def test_m4_all_exponents() -> None:
    hidden, inner = 8192, 32
    experts = random_experts(1, hidden, inner, torch.Generator().manual_seed(0), start=1)
    experts.w13_scale[0, 0, 0] = torch.arange(256, dtype=torch.uint8)
    case = forced([[1], [0]], experts, hidden, inner, 2)
    zeroed, poisoned = case.x.clone(), case.x.clone()
    zeroed[1], poisoned[1] = 0.0, NAN
    outputs = [run(replace(case, x=x)) for x in (zeroed, poisoned)]
    assert torch.equal(outputs[0].view(torch.int32), outputs[1].view(torch.int32))
    assert outputs[0][0].isnan().all()  # the NaN exponent is in the row that was chosen
    assert (outputs[0][1] == 0.0).all()


def test_duplicated_ids_count_twice() -> None:
    experts = random_experts(2, 32, 32, torch.Generator().manual_seed(5))
    twice = forced([[1, 1]], experts, 32, 32, 2)
    twice = replace(twice, routing=(torch.tensor([[1, 1]], dtype=torch.int32), torch.tensor([[0.25, 0.25]])))
    once = replace(twice, routing=(torch.tensor([[1, -1]], dtype=torch.int32), torch.tensor([[0.25, NAN]])))
    check(twice)
    check(once)
    torch.testing.assert_close(run(twice), 2 * run(once), rtol=1e-5, atol=1e-6)


class _TwoRanksInTurn(SingleComm):
    """Sums what the same rows give on two ranks, called one after the other."""

    def __init__(self, other: Tensor) -> None:
        self.other = other

    def combine(self, partial: Tensor, handle: object) -> Arrived[Tensor]:
        return Arrived(partial + self.other)


def test_partial_sums_of_ranks_add_up_to_the_whole() -> None:
    whole_experts = random_experts(4, 32, 32, torch.Generator().manual_seed(8))
    whole = forced([[0, 3], [1, 2], [2, 3], [-1, 0]], whole_experts, 32, 32, 4)

    def rank(start: int) -> MoeCase:
        names = ("w13", "w13_scale", "w2", "w2_scale")
        shards = {name: getattr(whole_experts, name)[start : start + 2] for name in names}
        experts = PackedExperts(**shards, expert_start=start)
        problem = replace(whole.problem, num_local_experts=2)
        return replace(whole, problem=problem, weights=replace(whole.weights, experts=experts))

    first, second = rank(0), rank(2)
    combined = second.run(build(context(second.problem)), _TwoRanksInTurn(run(first)))
    # Two float32 terms a row: addition of two numbers does not depend on the order.
    assert torch.equal(combined, run(whole))


@pytest.mark.parametrize("ids", [[[0, 7], [3, 3], [5, -1], [6, 2]], [[6, 7]] * 4, []])
def test_c1_one_rank_part(ids: list[list[int]]) -> None:
    experts = random_experts(8, 32, 32, torch.Generator().manual_seed(2))
    case = forced(ids or [[0, 0]], experts, 32, 32, 8)
    if not ids:
        assert case.routing is not None
        case = replace(case, x=case.x[:0], routing=(case.routing[0][:0], case.routing[1][:0]))
    check(case)
    comm = SingleComm()
    assert case.routing is not None
    dispatched = comm.dispatch(case.x, *case.routing).wait()
    assert isinstance(dispatched, Dispatched)
    assert comm.combine(case.x.float(), dispatched.handle).wait().shape == (len(ids), 32)
