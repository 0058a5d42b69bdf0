"""One plan of operators against the plan of reference operators, in a model.

The discrete choices of the reference run (selection, candidates, routing) are imposed on the other one, since a tie
that falls otherwise would change everything behind it. A selection in a layout of its own cannot be imposed: then
logits are compared up to the step in which a choice of the reference run lies within noise of a tie.

Logits may differ as much as those of reference runs in which every result of an operator that the plan replaces is
moved by its family's bound with random signs: what errors of legal size do to the logits, as this model carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minideepinfer.config import EngineConfig
from minideepinfer.model.step import Forced
from minideepinfer.operators import TOKEN_INDICES, OperatorRegistry
from minideepinfer.operators.plan import PlanKey, PlannedOperator
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.testing import epilogue_bounds, residual_bounds
from minideepinfer.testing.bounds import attention_bound, moe_bound
from minideepinfer.testing.contract import Outputs, Violation
from minideepinfer.testing.margins import is_close
from minideepinfer.testing.recipes.attention import AttentionCase
from minideepinfer.testing.recipes.epilogue import EpilogueCase, InjectCase
from minideepinfer.testing.recipes.moe import MoeCase
from minideepinfer.testing.recipes.residual import ResidualCase
from minideepinfer.testing.variants import own_factor
from minideepinfer.testing.watching import Watch

STEPS = ((11, 0), (8, 9), (1, 1), (3, 7), (1, 1))
"""Tokens of two requests in each step: prefill, prefill in chunks, decode, decode of 3 rows beside a chunk, decode."""
DRAWS = 2
"""Reference runs with moved results."""


def _attention_bounds(case: AttentionCase, outputs: Outputs) -> Outputs:
    return {"heads": _of_both(case.q.dtype, lambda dtype: attention_bound(case, dtype)[:, None, None])}


def _moe_bounds(case: MoeCase, outputs: Outputs) -> Outputs:
    return {"y": _of_both(case.x.dtype, lambda dtype: moe_bound(case, dtype).error)}


def _residual_bounds(case: ResidualCase, outputs: Outputs) -> Outputs:
    on_cpu = {name: tensor.cpu() for name, tensor in outputs.items()}

    def bound(name: str) -> Tensor:
        return _of_both(case.streams.dtype, lambda dtype: residual_bounds.truth(case, dtype, on_cpu)[name].error)

    return {name: bound(name) for name in outputs}


def _epilogue_bounds(case: EpilogueCase | InjectCase, outputs: Outputs) -> Outputs:
    def half(dtype: torch.dtype) -> Tensor:
        if isinstance(case, InjectCase):
            return epilogue_bounds.injected(case, dtype).half
        return epilogue_bounds.finished(case, dtype).half

    dtype = next(iter(outputs.values())).dtype
    return {name: _of_both(dtype, half) for name in outputs}


def _of_both(dtype: torch.dtype, bound: Callable[[torch.dtype], Tensor]) -> Tensor:
    """What an operator in a dtype and the reference may be apart."""
    return bound(dtype) + bound(torch.float32)


BOUNDS: dict[str, Callable[[Any, Outputs], Outputs]] = {
    "attention": _attention_bounds,
    "moe": _moe_bounds,
    "residual": _residual_bounds,
    "epilogue": _epilogue_bounds,
}
"""By family the largest legal difference between two operators, for a case and each of its results. Results of other
families are imposed (indexer) or the same bits (comm), so that they move no logits."""


@dataclass(frozen=True)
class Stage:
    """A model and what runs on it.

    Attributes:
        path: the checkpoint.
        registry: operators to choose from.
        dtype: compute dtype.
        device: where.
        steps: see `STEPS`.
    """

    path: Path
    registry: OperatorRegistry
    dtype: str
    device: str = "cpu"
    steps: Sequence[tuple[int, int]] = STEPS

    def config(self, ops: Mapping[str, Any]) -> EngineConfig:
        """The engine's configuration with a choice of operators."""
        cache = {"num_pages": 4, "max_requests": 2}
        return EngineConfig(dtype=self.dtype, device=self.device, kv_quantization="none", cache=cache, ops=dict(ops))

    def runner(self, ops: Mapping[str, Any]) -> Runner:
        """The model with a choice of operators.

        Raises:
            OperatorError: one of them cannot serve it.
        """
        return Runner(self.path, self.config(ops), registry=self.registry, keep_weights=True)

    def play(
        self,
        runner: Runner,
        watch: Watch | None = None,
        forced: Sequence[Forced] = (),
        begin: Callable[[], None] = lambda: None,
    ) -> tuple[list[Forced], list[Tensor]]:
        """Run the steps.

        Args:
            runner: the model.
            watch: of the same model, which notes the choices.
            forced: choices to impose, one for each step.
            begin: called before each step.

        Returns:
            The choices, and float64 logits, of every step.
        """
        vocabulary = runner.config.text_config.vocab_size - 3  # special tokens are the last ones
        requests = []
        for number, lengths in enumerate(zip(*self.steps, strict=True)):
            ids = [(7 + 13 * number + 31 * i + i * i) % vocabulary for i in range(sum(lengths))]
            pages = [2 * number + 1, 2 * number]
            requests.append(Request(number, ids, len(ids), len(ids), "all", ring=1 - number, pages=pages))
        choices, logits = [], []
        for number, counts in enumerate(self.steps):
            begin()
            if watch is not None:
                watch.begin_step()
            scheduled = [ScheduledRequest(r, count) for r, count in zip(requests, counts, strict=True) if count]
            results = runner.execute(scheduled, forced=forced[number] if forced else None)
            choices.append(Forced() if watch is None else watch.choices)
            logits.append(torch.cat([result.logits.cpu().double() for result in results]))
        return choices, logits


@dataclass
class Rehearsal:
    """The comparison.

    Attributes:
        stage: the model.
        reference: reference operators by family.
        ops: the choice that is compared.
        measure: called with errors, bounds and a name; raises `Violation` if an error is larger.
        visit: called with place and case of every call of the reference run.
    """

    stage: Stage
    reference: Mapping[str, str]
    ops: Mapping[str, Any]
    measure: Callable[[Tensor, Tensor, str], None]
    visit: Callable[[PlanKey, Any], None] = lambda *_: None
    _moved: dict[PlanKey, float] = field(default_factory=dict)
    """Where another operator than the reference serves, with that operator's own factor on the bound."""
    _bounds: list[Outputs] = field(default_factory=list)
    _unclear: list[bool] = field(default_factory=list)

    def check(self) -> None:
        """Run both plans.

        Raises:
            Violation: logits are off, or nothing can be compared.
            OperatorError: an operator cannot serve the model, or raised.
        """
        reference, runner = self.stage.runner(self.reference), self.stage.runner(self.ops)
        plan, expected_plan = runner.plan.operators, reference.plan.operators
        self._moved = {
            key: _slack(planned)
            for key, planned in plan.items()
            if planned.registered is not expected_plan[key].registered
        }
        watch = Watch(reference, self._note)
        choices, expected = self.stage.play(reference, watch, begin=lambda: self._unclear.append(False))
        imposed, steps = choices, len(expected)
        if any(
            getattr(planned.problem, "selection_layout", TOKEN_INDICES) != TOKEN_INDICES for planned in plan.values()
        ):
            imposed = [Forced(routing=choice.routing) for choice in choices]
            steps = [*self._unclear, True].index(True)
            if not steps:
                raise Violation("no step of the reference run is clear, so that nothing can be compared")
        found = self.stage.play(runner, forced=imposed)[1]
        bounds = self._bound_of_logits(choices, expected)
        for step in range(steps):
            error = (found[step] - expected[step]).norm(dim=1)
            self.measure(error, bounds[step], f"logits of step {step}, row")

    def _note(self, place: PlanKey, case: Any, outputs: Outputs) -> Outputs:
        """Look at a call of the reference run."""
        self.visit(place, case)
        if place[0] == "indexer":
            self._unclear[-1] |= any(is_close(case, row) for row in range(len(case.q)))
        if place[0] in BOUNDS and place in self._moved:
            slack = self._moved[place]
            self._bounds.append({name: slack * bound for name, bound in BOUNDS[place[0]](case, outputs).items()})
        return outputs

    def _bound_of_logits(self, choices: Sequence[Forced], expected: Sequence[Tensor]) -> list[Tensor]:
        """Per step and row, the largest change of the logits over some runs with moved results."""
        largest = [torch.zeros(len(rows), dtype=torch.float64) for rows in expected]
        for seed in range(DRAWS if self._bounds else 0):
            runner = self.stage.runner(self.reference)
            Watch(runner, _Mover(self._moved, self._bounds, seed))
            moved = self.stage.play(runner, forced=choices)[1]
            largest = [a.maximum((m - e).norm(dim=1)) for a, m, e in zip(largest, moved, expected, strict=True)]
        return largest


def _slack(planned: PlannedOperator) -> float:
    return own_factor(planned.registered.declaration, planned.problem.dtype, planned.options)


class _Mover:
    """Moves results by their bounds, in the order of the calls."""

    def __init__(self, moved: Container[PlanKey], bounds: Sequence[Outputs], seed: int) -> None:
        self.moved, self.bounds = moved, iter(bounds)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, place: PlanKey, case: Any, outputs: Outputs) -> Outputs:
        if place[0] not in BOUNDS or place not in self.moved:
            return outputs
        bounds = next(self.bounds)
        return {name: self._moved(tensor, bounds[name]) for name, tensor in outputs.items()}

    def _moved(self, tensor: Tensor, bound: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=self.generator) * 2 - 1
        return (tensor.cpu().double() + signs * bound).to(tensor)
