"""MoE: the experts of one rank, the gate, and a whole layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.costs.moe import experts_cost, gate_cost, layer_cost
from minideepinfer.measure.kernels.batches import some_rows
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators import MoeWeights, PackedExperts, SharedExpert
from minideepinfer.operators.cost import Cost
from minideepinfer.testing.bounds import route
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.families.moe import comm_problem, compare_routing
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe
from minideepinfer.testing.subject import Subject

JUDGED_ROWS = 8


def make(recipe: MoeRecipe, device: torch.device) -> MoeCase:
    """Random codes; exponents that keep values around 1; a routing, where it is given, that likes all experts alike."""
    numbers = torch.Generator(device).manual_seed(recipe.seed)
    hidden, inner, local = recipe.hidden_size, recipe.intermediate_size, recipe.num_local_experts
    dtype = getattr(torch, recipe.dtype)

    def byte(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=numbers, device=device, dtype=torch.uint8)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=numbers, device=device) / columns**0.5).to(dtype)

    middle = 126 - (hidden.bit_length() + 1) // 2  # codes are up to 6: a row of w1 x is about 1
    experts = PackedExperts(
        byte(0, 256, local, 2, inner, hidden // 2),
        byte(middle - 2, middle + 3, local, 2, inner, hidden // 32),
        byte(0, 256, local, hidden, inner // 2),
        byte(middle - 2, middle + 3, local, hidden, inner // 32),
        expert_start=recipe.expert_start,
    )
    shared = SharedExpert(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
    gate = matrix(recipe.num_experts, hidden).bfloat16()
    bias = torch.zeros(recipe.num_experts, device=device)
    x = torch.randn(recipe.tokens, hidden, generator=numbers, device=device).to(dtype)
    weights = MoeWeights(gate, bias, experts, shared if recipe.shared else None)
    given = None if recipe.routing == "gate" else _random_routing(recipe, numbers)
    return MoeCase(recipe.problem, x, weights, given)


def _random_routing(recipe: MoeRecipe, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = torch.rand(recipe.tokens, recipe.num_experts, generator=numbers, device=numbers.device)
    weights = torch.rand(recipe.tokens, recipe.topk, generator=numbers, device=numbers.device)
    return drawn.topk(recipe.topk, dim=1).indices.sort(1).values.int(), weights


def bind_run(subject: Subject, operator: Any, case: MoeCase) -> Call:
    """The experts, with routing given or not."""
    weights, metadata = operator.transform_weights(case.weights), operator.prepare(())
    exchange = subject.peer("comm", comm_problem(case.problem)).prepare([len(case.x)])
    return lambda: operator.run(case.x, weights, exchange, metadata, case.routing)


def bind_route(subject: Subject, operator: Any, case: MoeCase) -> Call:
    """The gate."""
    weights = operator.transform_weights(case.weights)
    return lambda: operator.route(case.x, weights)


def run_outputs(case: MoeCase, result: Tensor) -> Outputs:
    """Tokens."""
    return {"y": result}


def route_outputs(case: MoeCase, result: tuple[Tensor, Tensor]) -> Outputs:
    """Ids and weights."""
    return {"topk_ids": result[0], "topk_weights": result[1]}


def compare_gate(
    subject: Subject, case: MoeCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    """Against the contract's own routing."""
    compare_routing(subject, case, found)


def cost_of_experts(case: MoeCase) -> Cost:
    """Counts the pairs of a row and an expert here."""
    assert case.routing is not None
    local = _local(case, case.routing[0])
    used, pairs = len(case.routing[0][local].unique()), int(local.sum())
    return experts_cost(case.problem, len(case.x), int(local.any(1).sum()), pairs, used)


def cost_of_gate(case: MoeCase) -> Cost:
    """Nothing to count."""
    return gate_cost(case.problem, len(case.x))


def cost_of_layer(case: MoeCase) -> Cost:
    """Counts the pairs that the gate chooses."""
    with case.x.device:
        ids = route(case)[0]
    local = _local(case, ids)
    return layer_cost(case.problem, len(case.x), int(local.sum()), len(ids[local].unique()))


def _local(case: MoeCase, ids: Tensor) -> Tensor:
    experts = case.weights.experts
    here = ids - experts.expert_start
    return (ids >= 0) & (here >= 0) & (here < experts.num_local)


def sample(case: MoeCase) -> tuple[Tensor, MoeCase]:
    """A few tokens."""
    rows = some_rows(len(case.x), JUDGED_ROWS, case.x.device)
    routing = None if case.routing is None else (case.routing[0][rows], case.routing[1][rows])
    return rows, replace(case, x=case.x[rows], routing=routing)


EXPERTS = Kernel(bind_run, run_outputs, cost_of_experts)
LAYER = Kernel(bind_run, run_outputs, cost_of_layer)
GATE = Kernel(bind_route, route_outputs, cost_of_gate, compare_gate)
ONE_RANK_OF_4 = MoeRecipe(
    dtype="bfloat16",
    hidden_size=5120,
    intermediate_size=2304,
    num_experts=384,
    num_local_experts=96,
    expert_start=96,
    topk=6,
)
LAYER_OF_RANK = replace(ONE_RANK_OF_4, routing="gate", shared=True)
TINY = MoeRecipe(
    tokens=16, hidden_size=128, intermediate_size=64, num_experts=16, num_local_experts=8, expert_start=8, topk=3
)

FAMILY = KernelFamily(
    family="moe",
    problems={
        "v41-rank": {
            "experts, T=16384": (EXPERTS, replace(ONE_RANK_OF_4, tokens=16_384)),
            "experts, T=16384, fp8 activations": (
                EXPERTS,
                replace(ONE_RANK_OF_4, tokens=16_384, activation_quantization="released"),
            ),
            "experts, T=4096": (EXPERTS, replace(ONE_RANK_OF_4, tokens=4096)),
            "gate, T=4096": (GATE, replace(LAYER_OF_RANK, tokens=4096)),
            "layer, T=4096": (LAYER, replace(LAYER_OF_RANK, tokens=4096)),
        },
        "decode": {f"layer, T={tokens}": (LAYER, replace(LAYER_OF_RANK, tokens=tokens)) for tokens in (1, 8, 64)},
        "tiny": {
            "experts": (EXPERTS, TINY),
            "experts, fp8 activations": (EXPERTS, replace(TINY, activation_quantization="released")),
            "gate": (GATE, replace(TINY, routing="gate", shared=True)),
            "layer": (LAYER, replace(TINY, routing="gate", shared=True)),
        },
    },
    make=make,
    sample=sample,
)
