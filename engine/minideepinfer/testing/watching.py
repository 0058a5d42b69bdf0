"""Looking at what a model asks of its operators: every call, as a case of the kit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from minideepinfer.model.step import Forced
from minideepinfer.operators import Batch, Coefficients, Entered, Phase, Quantization
from minideepinfer.operators.plan import PlanKey
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.contract import Outputs
from minideepinfer.testing.recipes.attention import AttentionCase
from minideepinfer.testing.recipes.epilogue import EpilogueCase, InjectCase
from minideepinfer.testing.recipes.indexer import IndexerCase
from minideepinfer.testing.recipes.moe import MoeCase
from minideepinfer.testing.recipes.residual import ResidualCase
from minideepinfer.testing.tensors import map_tensors

Visit = Callable[[PlanKey, Any, Outputs], Outputs]
"""Called with place, case and results of every call (of an indexer without results); what it returns is passed on."""


@dataclass
class Watch:
    """Puts itself between a model and its operators; comm operators are not watched.

    Attributes:
        runner: the model, which stays watched.
        visit: see `Visit`; cases are on the CPU.
        choices: the discrete choices made since `begin_step`, which impose them again on another run.
    """

    runner: Runner
    visit: Visit
    choices: Forced = field(default_factory=Forced)

    def __post_init__(self) -> None:
        model = self.runner.model
        self._put(_Residual, None, model.mixing.operators)
        self._put(_Epilogue, None, model.epilogue.operators)
        for block in model.blocks:
            layer, attention = block.layer.layer_id, block.attention
            self._put(_Attention, layer, attention.attention)
            self._put(_Indexer, layer, attention.indexer)
            self._put(_Moe, layer, block.moe)

    def _put(self, kind: type[_Watched], layer: int | None, operators: Mapping[Phase, Any]) -> None:
        watched = {phase: kind(self, layer, phase, operator) for phase, operator in operators.items()}
        cast(dict[Phase, Any], operators).update(watched)

    def begin_step(self) -> None:
        """Forget the choices so far."""
        self.choices = Forced()


class _Watched:
    """Stands for an operator in one layer and phase."""

    family = ""

    def __init__(self, watch: Watch, layer: int | None, phase: Phase, operator: Any) -> None:
        self.watch, self.place, self.built = watch, (self.family, layer, phase), operator
        self.problem: Any = watch.runner.plan.operators[self.place].problem

    def prepare(self, batches: Any) -> tuple[Any, Any]:
        """Keep what the metadata was made of."""
        return batches, self.built.prepare(batches)

    def visited(self, case: Any, **outputs: Tensor) -> Outputs:
        return self.watch.visit(self.place, map_tensors(case, lambda tensor: tensor.cpu()), outputs)


class _Attention(_Watched):
    family = "attention"

    def run(self, metadata: tuple[Batch, Any], **arguments: Any) -> Tensor:
        batch, inner = metadata
        heads = self.built.run(**arguments, metadata=inner)
        return self.visited(AttentionCase(self.problem, batch, **arguments), heads=heads)["heads"]


class _Indexer(_Watched):
    family = "indexer"

    def run(self, q: Tensor, head_weights: Tensor, index_keys: Tensor, candidates: Tensor | None, metadata: Any) -> Any:
        batch, inner = metadata
        output = self.built.run(q, head_weights, index_keys, candidates, inner)
        self.visited(IndexerCase(self.problem, batch, q, head_weights, index_keys, candidates))
        choices, layer = self.watch.choices, self.place[1]
        assert layer is not None
        choices.selection.setdefault(layer, []).append(output.selection)
        if output.candidates is not None:
            choices.candidates.setdefault(layer, []).append(output.candidates)
        return output


class _Moe(_Watched):
    family = "moe"

    def run(self, x: Tensor, weights: Any, comm: Any, metadata: Any, routing: Any = None) -> Tensor:
        layer = self.place[1]
        assert layer is not None
        routing = routing or self.built.route(x, weights)
        self.watch.choices.routing[layer] = routing
        y = self.built.run(x, weights, comm, metadata[1], routing)
        as_loaded = self.watch.runner.model.weights.layers[layer].moe
        assert as_loaded is not None  # a rehearsal keeps weights
        return self.visited(MoeCase(self.problem, x, as_loaded, routing), y=y)["y"]


class _Residual(_Watched):
    family = "residual"

    def enter(self, streams: Tensor, pre: Tensor, weights: Any, norm_weight: Tensor) -> Entered:
        entered = self.built.enter(streams, pre, weights, norm_weight)
        case = self._case("enter", streams, pre=pre, weights=weights, norm_weight=norm_weight)
        return _entered(streams, self.visited(case, x=entered.x, **_parts(entered.site)))

    def advance(
        self, streams: Tensor, output: Tensor, site: Coefficients, weights: Any, norm_weight: Tensor
    ) -> Entered:
        entered = self.built.advance(streams, output, site, weights, norm_weight)
        case = self._case("advance", streams, output=output, site=site, weights=weights, norm_weight=norm_weight)
        results = {"x": entered.x, **_parts(entered.site)}
        passed_on = self.visited(case, streams=entered.streams, **results)
        moved = passed_on.pop("streams")
        if moved is not entered.streams:  # what follows from the streams follows from those that are passed on
            again = self.built.enter(moved, site.pre, weights, norm_weight)
            follows = {"x": again.x, **_parts(again.site)}
            passed_on = {name: follows[name] + (passed_on[name] - results[name]) for name in results}
        return _entered(moved, passed_on)

    def mix(self, streams: Tensor, output: Tensor, site: Coefficients) -> Tensor:
        mixed = self.built.mix(streams, output, site)
        return self.visited(self._case("mix", streams, output=output, site=site), streams=mixed)["streams"]

    def collapse(self, streams: Tensor, pre: Tensor, norm_weight: Tensor | None) -> Tensor:
        x = self.built.collapse(streams, pre, norm_weight)
        if norm_weight is None:
            return self.visited(self._case("collapse", streams, pre=pre), x=x)["x"]
        return self.visited(self._case("normalise", streams, pre=pre, norm_weight=norm_weight), x=x)["x"]

    def _case(self, call: str, streams: Tensor, **given: Any) -> ResidualCase:
        """The call; what it does not take is filled up."""
        first = self.watch.runner.model.blocks[0]
        zeros = streams.new_zeros(*streams.shape[:2], streams.shape[1], dtype=torch.float32)
        filled = {
            "output": streams[:, 0],
            "pre": zeros[..., 0],
            "site": Coefficients(zeros[..., 0], zeros[..., 0], zeros),
            "norm_weight": first.weights.attn_norm,
            **given,
            "weights": self._as_loaded(given.get("weights", first.attention_site.weights[self.place[2]])),
        }
        return ResidualCase(self.problem, call, streams, **filled)

    def _as_loaded(self, transformed: Any) -> Any:
        for block in self.watch.runner.model.blocks:
            loaded = (block.weights.hc_attn, block.weights.hc_ffn)
            for site, weights in zip((block.attention_site, block.moe_site), loaded, strict=True):
                if site.weights[self.place[2]] is transformed:
                    return weights
        raise AssertionError("no site has these weights")


class _Epilogue(_Watched):
    family = "epilogue"

    def run(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        quantization: Quantization,
        in_place: bool,
    ) -> Tensor:
        case = EpilogueCase(self.problem, x.clone(), norm_weight, cos, sin, quantization, in_place)
        return self.visited(case, y=self.built.run(x, norm_weight, cos, sin, quantization, in_place))["y"]

    def inject(self, streams: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        case = InjectCase(self.problem, streams, values, weight)
        return self.visited(case, streams=self.built.inject(streams, values, weight))["streams"]


def _parts(site: Coefficients) -> Outputs:
    return {part.name: getattr(site, part.name) for part in fields(site)}


def _entered(streams: Tensor, outputs: Outputs) -> Entered:
    return Entered(streams, outputs["x"], Coefficients(outputs["pre"], outputs["post"], outputs["comb"]))
