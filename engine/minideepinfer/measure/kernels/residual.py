"""Residual streams: entering a site, advancing to the next, and mixing alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.measure.costs.residual import residual_cost
from minideepinfer.measure.kernels.batches import some_rows
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.timing import Call
from minideepinfer.operators import Coefficients, Entered, HyperConnectionWeights
from minideepinfer.operators.cost import Cost
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.recipes.residual import ResidualCase, ResidualRecipe
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import map_tensors

JUDGED_ROWS = 64


def make(recipe: ResidualRecipe, device: torch.device) -> ResidualCase:
    """Normal numbers."""
    numbers, dtype = torch.Generator(device).manual_seed(recipe.seed), getattr(torch, recipe.dtype)
    tokens, streams, hidden = recipe.tokens, recipe.num_streams, recipe.hidden_size
    columns = streams * (2 + streams)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device=device)

    pre, post = normal(tokens, streams).sigmoid(), 2 * normal(tokens, streams).sigmoid()
    fn = normal(columns, streams * hidden) / (streams * hidden) ** 0.5
    return ResidualCase(
        problem=recipe.problem,
        call=recipe.call,
        streams=normal(tokens, streams, hidden).to(dtype),
        output=normal(tokens, hidden).to(dtype),
        pre=normal(tokens, streams).sigmoid(),
        site=Coefficients(pre, post, normal(tokens, streams, streams).softmax(1)),
        weights=HyperConnectionWeights(fn, normal(columns), normal(3)),
        norm_weight=1 + normal(hidden) / 10,
    )


def bind(subject: Subject, operator: Any, case: ResidualCase) -> Call:
    """The recipe's call."""
    streams, norm = case.streams, case.norm_weight
    if case.call == "mix":
        return lambda: operator.mix(streams, case.output, case.site)
    weights = operator.transform_weights(case.weights)
    if case.call == "enter":
        return lambda: operator.enter(streams, case.pre, weights, norm)
    return lambda: operator.advance(streams, case.output, case.site, weights, norm)


def outputs(case: ResidualCase, result: Tensor | Entered) -> Outputs:
    """Streams, input and coefficients, as far as the call finds them."""
    if not isinstance(result, Entered):
        return {"streams": result}
    found = {"x": result.x, "pre": result.site.pre, "post": result.site.post, "comb": result.site.comb}
    return {"streams": result.streams, **found} if case.call == "advance" else found


def cost(case: ResidualCase) -> Cost:
    """Nothing to count."""
    return residual_cost(case.problem, case.call, len(case.streams))


def sample(case: ResidualCase) -> tuple[Tensor, ResidualCase]:
    """A few rows."""
    rows = some_rows(len(case.streams), JUDGED_ROWS, case.streams.device)
    parts = {name: getattr(case, name)[rows] for name in ("streams", "output", "pre")}
    return rows, map_tensors(replace(case, site=case.site.rows(rows), **parts), lambda tensor: tensor.cpu())


RUN = Kernel(bind, outputs, cost)
RELEASED = ResidualRecipe(dtype="bfloat16", num_streams=4, hidden_size=5120, sinkhorn_iterations=20)
TINY = ResidualRecipe(tokens=16, num_streams=4, hidden_size=128, sinkhorn_iterations=20)
CALLS = ("enter", "advance", "mix")

FAMILY = KernelFamily(
    family="residual",
    problems={
        "v41-rank": {call: (RUN, replace(RELEASED, call=call, tokens=4096)) for call in CALLS},
        "decode": {
            f"advance, T={tokens}": (RUN, replace(RELEASED, call="advance", tokens=tokens, decode=True))
            for tokens in (1, 8, 64)
        },
        "tiny": {call: (RUN, replace(TINY, call=call)) for call in CALLS},
    },
    make=make,
    sample=sample,
)
