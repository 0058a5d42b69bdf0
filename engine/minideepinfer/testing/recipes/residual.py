"""Calls of a residual operator: one of its methods on streams, coefficients and weights of any size of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import Coefficients, Entered, HyperConnectionWeights, Phase, ResidualProblem
from minideepinfer.testing.recipes.batch import facts

CALLS = ("enter", "advance", "mix", "collapse", "normalise")
"""What is called; `collapse` and `normalise` are one method, without and with a norm."""
PROJECTIONS = ("normal", "sparse", "zero")
"""`fn`: any numbers; a few in each row; zeros, so that the logits are `base`."""


@dataclass(frozen=True)
class ResidualCase:
    """One call, with everything that any of the calls takes."""

    problem: ResidualProblem
    call: str
    streams: Tensor
    output: Tensor
    pre: Tensor
    site: Coefficients
    weights: HyperConnectionWeights
    norm_weight: Tensor

    @property
    def units(self) -> int:
        """Tokens."""
        return len(self.streams)

    def run(self, operator: Any) -> dict[str, Tensor]:
        """Call an operator."""
        streams, norm = self.streams, self.norm_weight
        if self.call == "mix":
            return {"streams": operator.mix(streams, self.output, self.site)}
        if self.call in ("collapse", "normalise"):
            return {"x": operator.collapse(streams, self.pre, norm if self.call == "normalise" else None)}
        weights = operator.transform_weights(self.weights)
        if self.call == "enter":
            return _named(operator.enter(streams, self.pre, weights, norm))
        entered = operator.advance(streams, self.output, self.site, weights, norm)
        return {"streams": entered.streams, **_named(entered)}

    def take(self, order: Sequence[int]) -> tuple[ResidualCase, Tensor]:
        """Some tokens in another order, and which old row each new row is."""
        rows = torch.tensor(list(order), dtype=torch.int64)
        taken = replace(
            self,
            streams=self.streams[rows],
            output=self.output[rows],
            pre=self.pre[rows],
            site=self.site.rows(rows),
        )
        return taken, rows


def _named(entered: Entered) -> dict[str, Tensor]:
    site = entered.site
    return {"x": entered.x, "pre": site.pre, "post": site.post, "comb": site.comb}


@dataclass(frozen=True)
class ResidualRecipe:
    """Makes a call; the field names are those of `ResidualProblem` where it has them.

    Attributes:
        tokens: rows.
        call: one of `CALLS`.
        projection: one of `PROJECTIONS`.
        amplitude: standard deviation of the streams; around 1e-10, `rms_norm_eps` matters.
        base: standard deviation of the affine logits' base.
        scale: standard deviation of what multiplies the projection.
        decode: whether the rows are decode rows.
        seed: of all numbers.
    """

    tokens: int = 1
    dtype: str = "float32"
    call: str = "enter"
    num_streams: int = 1
    hidden_size: int = 1
    sinkhorn_iterations: int = 3
    hc_eps: float = 1e-6
    projection: str = "normal"
    amplitude: float = 1.0
    base: float = 1.0
    scale: float = 1.0
    decode: bool = False
    seed: int = 0

    @property
    def problem(self) -> ResidualProblem:
        """What the operator is told."""
        return ResidualProblem(
            **facts(getattr(torch, self.dtype), Phase.DECODE if self.decode else Phase.PREFILL),
            num_streams=self.num_streams,
            hidden_size=self.hidden_size,
            sinkhorn_iterations=self.sinkhorn_iterations,
            rms_norm_eps=1e-20,
            hc_eps=self.hc_eps,
        )

    def build(self) -> ResidualCase:
        """The call."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens, streams, hidden = self.tokens, self.num_streams, self.hidden_size
        dtype: torch.dtype = getattr(torch, self.dtype)
        columns = streams * (2 + streams)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        fn = normal(columns, streams * hidden) / (streams * hidden) ** 0.5
        if self.projection != "normal":
            fn = fn * (torch.rand(fn.shape, generator=generator) < 3 / fn.shape[1])
        if self.projection == "zero":
            fn = torch.zeros_like(fn)
        return ResidualCase(
            problem=self.problem,
            call=self.call,
            streams=(normal(tokens, streams, hidden) * self.amplitude).to(dtype),
            output=(normal(tokens, hidden) * self.amplitude).to(dtype),
            pre=normal(tokens, streams).sigmoid(),
            site=Coefficients(
                pre=normal(tokens, streams).sigmoid(),
                post=2 * normal(tokens, streams).sigmoid(),
                comb=normal(tokens, streams, streams).mul(2).softmax(1),
            ),
            weights=HyperConnectionWeights(fn, normal(columns) * self.base, normal(3) * self.scale),
            norm_weight=normal(hidden),
        )
