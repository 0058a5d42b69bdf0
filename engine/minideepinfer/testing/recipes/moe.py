"""MoE calls of a rank that holds some of the experts; forced routing has -1 and duplicates, remote rows are NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import MoeProblem, MoeWeights, PackedExperts, SharedExpert
from minideepinfer.testing.recipes.batch import NAN, facts

ROUTINGS = ("gate", "any", "one", "none", "remote", "twice")
"""By the gate; or forced: anywhere, all on one expert, no expert at all, experts of other ranks, one expert twice."""


@dataclass(frozen=True)
class MoeCase:
    """One MoE call, with routing given or not; `exact` = gate and x are small integers, so that logits are exact."""

    problem: MoeProblem
    x: Tensor
    weights: MoeWeights
    routing: tuple[Tensor, Tensor] | None
    exact: bool = False

    @property
    def units(self) -> int:
        """Tokens."""
        return len(self.x)

    def run(self, operator: Any, comm: Any) -> Tensor:
        """Call an operator."""
        weights = operator.transform_weights(self.weights)
        output: Tensor = operator.run(self.x, weights, comm, operator.prepare(()), self.routing)
        return output

    def take(self, order: Sequence[int]) -> tuple[MoeCase, Tensor]:
        """Some tokens in another order, and which old row each new row is."""
        rows = torch.tensor(list(order), dtype=torch.int64)
        routing = None if self.routing is None else (self.routing[0][rows], self.routing[1][rows])
        return replace(self, x=self.x[rows], routing=routing), rows

    def local_rows(self) -> Tensor:
        """Which rows have an expert here, bool `[T]`; forced routing only."""
        assert self.routing is not None
        local = self.routing[0] - self.weights.experts.expert_start
        return ((self.routing[0] >= 0) & (local >= 0) & (local < self.weights.experts.num_local)).any(1)


def random_experts(num: int, hidden: int, inner: int, generator: torch.Generator, start: int = 0) -> PackedExperts:
    """Random codes; exponents that keep values around 1."""

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def exponents(*shape: int) -> Tensor:
        return torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)

    return PackedExperts(
        w13=codes(num, 2, inner, hidden // 2),
        w13_scale=exponents(num, 2, inner, hidden // 32),
        w2=codes(num, hidden, inner // 2),
        w2_scale=exponents(num, hidden, inner // 32),
        expert_start=start,
    )


def held_experts(experts: PackedExperts, first: int, last: int) -> PackedExperts:
    """Some of the experts of a rank, by local number, as another rank holds them."""
    parts = {name: getattr(experts, name)[first:last] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    return PackedExperts(**parts, expert_start=experts.expert_start + first)


def moe_problem(hidden: int, inner: int, experts: int, local: int, topk: int, **shared_facts: Any) -> MoeProblem:
    """A MoE problem with the release's scaling and clamp."""
    return MoeProblem(
        **shared_facts,
        hidden_size=hidden,
        intermediate_size=inner,
        num_experts=experts,
        num_local_experts=local,
        topk=topk,
        num_shared_experts=1,
        routed_scaling=1.5,
        swiglu_limit=10.0,
        world_size=1,
    )


@dataclass(frozen=True)
class MoeRecipe:
    """Makes a MoE call; the field names are those of `MoeProblem` where it has them.

    Attributes:
        tokens: rows.
        expert_start: global id of the first local expert.
        routing: one of `ROUTINGS`.
        shared: whether there is a shared expert.
        amplitude: standard deviation of x; large ones reach the clamps.
        few: gate and x of small integers, most of them 0 in the gate, so that equal routing scores are common.
        seed: of all numbers.
    """

    tokens: int = 1
    dtype: str = "float32"
    activation_quantization: str = "none"
    hidden_size: int = 32
    intermediate_size: int = 32
    num_experts: int = 2
    num_local_experts: int = 2
    expert_start: int = 0
    topk: int = 1
    routing: str = "any"
    shared: bool = False
    amplitude: float = 1.0
    few: bool = False
    seed: int = 0

    @property
    def problem(self) -> MoeProblem:
        """What the operator is told."""
        shared_facts = facts(getattr(torch, self.dtype), activation_quantization=self.activation_quantization)
        sizes = (self.hidden_size, self.intermediate_size, self.num_experts, self.num_local_experts, self.topk)
        return replace(moe_problem(*sizes, **shared_facts), num_shared_experts=int(self.shared))

    def build(self) -> MoeCase:
        """The call."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_experts
        dtype: torch.dtype = getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            few: Tensor = torch.randint(-1, 2, shape, generator=generator).float()
            many: Tensor = torch.randn(shape, generator=generator)
            return few if self.few else many

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(dtype)

        gate = normal(experts, hidden)
        if self.few:
            gate[:, 2:] = 0.0
        shared_expert = SharedExpert(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
        weights = MoeWeights(
            gate=gate.bfloat16(),
            gate_bias=normal(experts),
            experts=random_experts(self.num_local_experts, hidden, inner, generator, self.expert_start),
            shared=shared_expert if self.shared else None,
        )
        x = (normal(self.tokens, hidden) * self.amplitude).to(dtype)
        case = MoeCase(self.problem, x, weights, None, self.few)
        if self.routing == "gate":
            return case
        ids = self._ids(generator)
        case = replace(case, routing=(ids, torch.rand(ids.shape, generator=generator).masked_fill(ids < 0, NAN)))
        return case if self.shared else replace(case, x=x.masked_fill(~case.local_rows()[:, None], NAN))

    def _ids(self, generator: torch.Generator) -> Tensor:
        ids = torch.randint(-1, self.num_experts, (self.tokens, self.topk), generator=generator).int()
        local = self.expert_start
        if self.routing == "one":
            ids = torch.full_like(ids, -1)
            ids[:, :1] = local
        elif self.routing == "twice":
            ids[:] = local
        elif self.routing == "none":
            ids[:] = -1
        elif self.routing == "remote":
            ids[:] = local - 1 if local else min(local + self.num_local_experts, self.num_experts - 1)
        return ids
