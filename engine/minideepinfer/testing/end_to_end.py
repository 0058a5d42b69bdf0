"""A whole model with the operator under test, against the same model with reference operators only.

First every call that the model makes of the reference operators is made of the operator too, and compared within the
family's bound. Then the model runs with the operator in its place, its discrete choices (selection, candidates,
routing) imposed as they fell in the reference run, since a tie that falls otherwise would change everything behind it.
Its logits may differ as much as those of a reference run whose results of the family are moved by random signs times
the very bounds of the first part: what errors of legal size do to the logits, as this model carries them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.model.step import Forced
from minideepinfer.operators import FAMILIES, Phase
from minideepinfer.operators.plan import PlanKey
from minideepinfer.operators.support import obstacles
from minideepinfer.runtime.problems import layer_problems
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.testing.bounds import attention_bound, moe_bound
from minideepinfer.testing.contract import Refused, Violation
from minideepinfer.testing.models import MODELS, checkpoint
from minideepinfer.testing.subject import Subject, crashing
from minideepinfer.testing.watching import Watch

STEPS = ((11, 0), (8, 9), (1, 1), (3, 7), (1, 1))
"""Tokens of two requests in each step: prefill, prefill in chunks, decode, decode of 3 rows beside a chunk, decode."""
DRAWS = 2
"""Reference runs with moved results."""

Bound = Callable[[Any], Tensor]
"""Largest legal difference between two operators for a case, of the result's shape or broadcast to it."""


def _attention_bound(case: Any) -> Tensor:
    return (attention_bound(case, case.q.dtype) + attention_bound(case, torch.float32))[:, None, None]


def _moe_bound(case: Any) -> Tensor:
    return moe_bound(case, case.x.dtype).error + moe_bound(case, torch.float32).error


BOUNDS: dict[str, Bound] = {"attention": _attention_bound, "moe": _moe_bound}
"""By family; results of others are imposed (indexer) or the same bits (comm), so that logits must be too."""


def end_to_end(subject: Subject) -> None:
    """The comparison in every compute dtype, in the first model of which the operator serves a layer."""
    for dtype in subject.dtypes[:1] if subject.interpreted else subject.dtypes:
        path, places = nearest_model(subject, dtype)
        Comparison(subject, path, dtype, places).check()


def nearest_model(subject: Subject, dtype: str, block: tuple[int, int] = (32, 32)) -> tuple[Path, list[PlanKey]]:
    """The first model of which the operator serves a layer, with the layers and phases that it serves.

    Args:
        subject: the operator.
        dtype: compute dtype.
        block: see `checkpoint`.

    Raises:
        Refused: it serves none of any.
    """
    reasons: dict[str, None] = {}
    for name in MODELS:
        path = checkpoint(name, block)
        refusals = _refusals(subject, path, dtype)
        if places := [key for key, found in refusals.items() if not found]:
            return path, places
        reasons |= dict.fromkeys(reason for found in refusals.values() for reason in found)
    raise Refused(f"serves no layer of any model that the kit makes: {'; '.join(list(reasons)[:3])}")


def _refusals(subject: Subject, path: Path, dtype: str) -> dict[PlanKey, tuple[str, ...]]:
    """Why the operator does not serve the layers and phases of a model."""
    config = engine_config(subject, dtype, [])
    capability = torch.cuda.get_device_capability(subject.device) if subject.device.type == "cuda" else None
    problems = layer_problems(ModelConfig.from_file(path), config, subject.device.type, capability)
    declaration = subject.registered.declaration
    return {key: obstacles(declaration, p) for key, p in problems.items() if key[0] == declaration.family}


def engine_config(subject: Subject, dtype: str, places: Sequence[PlanKey]) -> EngineConfig:
    """Reference operators everywhere, the operator under test (and its partner) in some places."""
    ops: dict[str, Any] = {family: subject.reference_operator(family).name for family in FAMILIES}
    chosen = {
        operator.declaration.family: operator.name
        for operator in (subject.registered, subject.family.partner)
        if operator
    }
    for family, layer, phase in places:
        name = chosen[family]
        if layer is None:
            ops[family] = name
            continue
        if isinstance(ops[family], str):
            ops[family] = {"default": ops[family], "layers": {}}
        ops[family]["layers"].setdefault(str(layer), {})[phase.value] = name
    return EngineConfig(
        dtype=dtype,
        device=str(subject.device),
        kv_quantization="none",
        cache={"num_pages": 4, "max_requests": 2},
        ops=ops,
    )


def model_with(subject: Subject, path: Path, dtype: str, places: Sequence[PlanKey]) -> Runner:
    """A checkpoint with the operator under test in some places."""
    return Runner(path, engine_config(subject, dtype, places), registry=subject.registry)


@dataclass
class Comparison:
    """One model, one dtype.

    Attributes:
        places: where the operator under test serves.
        steps: see `STEPS`.
        bounds: of the results that are moved, in the order of the calls.
    """

    subject: Subject
    path: Path
    dtype: str
    places: Sequence[PlanKey]
    steps: Sequence[tuple[int, int]] = STEPS
    bounds: list[Tensor] = field(default_factory=list)

    def check(self) -> None:
        """Raises `Violation` if a call or the logits are off."""
        reference = model_with(self.subject, self.path, self.dtype, [])
        watch = Watch(reference, self._compare_call)
        choices, expected = self.play(reference, watch)
        with crashing(self.subject.registered):
            found = self.play(model_with(self.subject, self.path, self.dtype, self.places), forced=choices)[1]
        bound = self.bound_of_logits(choices, expected)
        for step, (own, wanted, legal) in enumerate(zip(found, expected, bound, strict=True)):
            self.subject.measure((own - wanted).norm(dim=1), legal, f"logits of step {step}, row")

    def play(
        self,
        runner: Runner,
        watch: Watch | None = None,
        forced: Sequence[Forced] = (),
        begin: Callable[[], None] = lambda: None,
    ) -> tuple[list[Forced], list[Tensor]]:
        """The choices and the float64 logits of every step; `begin` is called before each."""
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

    def moves(self, family: str, layer: int, phase: Phase) -> bool:
        """Whether results are not those of the reference operator, but within a bound of them."""
        return (family, layer, phase) in self.places and family in BOUNDS

    def _compare_call(self, family: str, layer: int, phase: Phase, case: Any, result: Any) -> Any:
        """The operator's answer to a call of the reference run."""
        subject = self.subject
        if family == subject.family.family and (family, layer, phase) in self.places:
            try:
                subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)
            except Violation as violation:
                raise Violation(f"layer {layer}, {phase}: {violation}") from None
            if self.moves(family, layer, phase):
                self.bounds.append(BOUNDS[family](case))
        return result

    def bound_of_logits(self, choices: Sequence[Forced], expected: Sequence[Tensor]) -> list[Tensor]:
        """Per step and row, the largest change of the logits over some runs with moved results."""
        largest = [torch.zeros(len(rows), dtype=torch.float64) for rows in expected]
        for seed in range(DRAWS if self.bounds else 0):
            generator, bounds = torch.Generator().manual_seed(seed), iter(self.bounds)

            def move(
                family: str,
                layer: int,
                phase: Phase,
                case: Any,
                result: Any,
                generator: torch.Generator = generator,
                bounds: Any = bounds,
            ) -> Any:
                if not self.moves(family, layer, phase):
                    return result
                signs = torch.randint(0, 2, result.shape, generator=generator) * 2 - 1
                return (result.cpu().double() + signs * next(bounds)).to(result)

            runner = model_with(self.subject, self.path, self.dtype, [])
            Watch(runner, move)
            moved = self.play(runner, forced=choices)[1]
            largest = [a.maximum((m - e).norm(dim=1)) for a, m, e in zip(largest, moved, expected, strict=True)]
        return largest
