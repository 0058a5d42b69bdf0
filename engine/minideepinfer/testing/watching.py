"""Looking at what a model asks of its operators: every call, as a case of the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from minideepinfer.model.step import Forced
from minideepinfer.operators import Batch, Phase
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.recipes.attention import AttentionCase
from minideepinfer.testing.recipes.indexer import IndexerCase
from minideepinfer.testing.recipes.moe import MoeCase
from minideepinfer.testing.tensors import map_tensors

Visit = Callable[[str, int, Phase, Any, Any], Any]
"""Called with family, layer, phase, case and result of every call; what it returns is passed on instead."""


@dataclass
class Watch:
    """Puts itself between a model and its operators.

    Attributes:
        runner: the model, which stays watched.
        visit: see `Visit`; cases are on the CPU.
        choices: the discrete choices made since `begin_step`, which impose them again on another run.
    """

    runner: Runner
    visit: Visit
    choices: Forced = field(default_factory=Forced)

    def __post_init__(self) -> None:
        for block in self.runner.model.blocks:
            layer, attention = block.layer.layer_id, block.attention
            for kind, operators in (
                (_Attention, attention.attention),
                (_Indexer, attention.indexer),
                (_Moe, block.moe),
            ):
                watched = {phase: kind(self, layer, phase, operator) for phase, operator in operators.items()}
                cast(dict[Phase, Any], operators).update(watched)

    def begin_step(self) -> None:
        """Forget the choices so far."""
        self.choices = Forced()


class _Watched:
    """Stands for an operator in one layer and phase."""

    family = ""

    def __init__(self, watch: Watch, layer: int, phase: Phase, operator: Any) -> None:
        self.watch, self.layer, self.phase, self.built = watch, layer, phase, operator
        self.problem: Any = watch.runner.plan.operators[self.family, layer, phase].problem

    def prepare(self, batches: Any) -> tuple[Any, Any]:
        """Keep what the metadata was made of."""
        return batches, self.built.prepare(batches)

    def visited(self, case: Any, result: Any) -> Any:
        case = map_tensors(case, lambda tensor: tensor.cpu())
        return self.watch.visit(self.family, self.layer, self.phase, case, result)


class _Attention(_Watched):
    family = "attention"

    def run(self, metadata: tuple[Batch, Any], **arguments: Any) -> Tensor:
        batch, inner = metadata
        heads: Tensor = self.built.run(**arguments, metadata=inner)
        passed_on: Tensor = self.visited(AttentionCase(self.problem, batch, **arguments), heads)
        return passed_on


class _Indexer(_Watched):
    family = "indexer"

    def run(self, q: Tensor, head_weights: Tensor, index_keys: Tensor, candidates: Tensor | None, metadata: Any) -> Any:
        batch, inner = metadata
        output = self.built.run(q, head_weights, index_keys, candidates, inner)
        output = self.visited(IndexerCase(self.problem, batch, q, head_weights, index_keys, candidates), output)
        choices = self.watch.choices
        choices.selection.setdefault(self.layer, []).append(output.selection)
        if output.candidates is not None:
            choices.candidates.setdefault(self.layer, []).append(output.candidates)
        return output


class _Moe(_Watched):
    family = "moe"

    def route(self, x: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
        ids, scores = self.built.route(x, weights)
        return ids, scores

    def run(self, x: Tensor, weights: Any, comm: Any, metadata: Any, routing: Any = None) -> Tensor:
        routing = routing or self.built.route(x, weights)
        self.watch.choices.routing[self.layer] = routing
        y = self.built.run(x, weights, comm, metadata[1], routing)
        as_loaded = self.watch.runner.model.weights.layers[self.layer].moe
        passed_on: Tensor = self.visited(MoeCase(self.problem, x, as_loaded, routing), y)
        return passed_on
