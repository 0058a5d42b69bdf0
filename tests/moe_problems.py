"""MoE problems for tests: a rank that holds some of the experts; forced routing with -1 and duplicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from batches import NAN, facts
from hypothesis import strategies as st
from minideepinfer.operators import (
    MoeProblem,
    MoeWeights,
    PackedExperts,
    SharedExpert,
)
from torch import Tensor


@dataclass(frozen=True)
class MoeCase:
    """One MoE call, with routing given or not."""

    problem: MoeProblem
    x: Tensor
    weights: MoeWeights
    routing: tuple[Tensor, Tensor] | None

    def run(self, operator: Any, comm: Any) -> Tensor:
        """Call an operator."""
        return operator.run(self.x, operator.transform_weights(self.weights), comm, operator.prepare(()), self.routing)


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


@st.composite
def moe_cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32, activation_quantization: str = "none") -> MoeCase:
    """Any legal MoE call of a rank that holds some of the experts; forced routing has -1 and duplicates."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hidden, inner = draw(st.sampled_from([32, 96])), draw(st.sampled_from([32, 96]))
    experts, tokens = draw(st.integers(2, 6)), draw(st.integers(0, 6))
    local = draw(st.integers(1, experts))
    start, topk = draw(st.integers(0, experts - local)), draw(st.integers(1, min(3, experts)))

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    shared = SharedExpert(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
    ids = torch.randint(-1, experts, (tokens, topk), generator=generator).int()
    routing = (ids, torch.rand(tokens, topk, generator=generator).masked_fill(ids < 0, NAN))
    return MoeCase(
        problem=moe_problem(
            hidden, inner, experts, local, topk, **facts(dtype, activation_quantization=activation_quantization)
        ),
        x=torch.randn(tokens, hidden, generator=generator).to(dtype),
        weights=MoeWeights(
            gate=torch.randn(experts, hidden, generator=generator).bfloat16(),
            gate_bias=torch.randn(experts, generator=generator),
            experts=random_experts(local, hidden, inner, generator, start),
            shared=shared if draw(st.booleans()) else None,
        ),
        routing=routing if draw(st.booleans()) else None,
    )
