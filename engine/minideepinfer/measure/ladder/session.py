"""Running a ladder: all rungs in one process, on one set of weights, one cache and one sequence of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from minideepinfer.config import ModelConfig
from minideepinfer.errors import MiniDeepInferError, OperatorError
from minideepinfer.measure.ladder.errors import module_errors
from minideepinfer.measure.ladder.file import Ladder, Rung
from minideepinfer.measure.ladder.kernels import KernelEvidence, kernel_evidence
from minideepinfer.measure.ladder.reference import Reference, record_reference
from minideepinfer.measure.prefill import PRESETS, PrefillBench, PrefillProblem, measure_prefill
from minideepinfer.measure.rank_shape import rank_setup
from minideepinfer.measure.rates import measured_rates
from minideepinfer.measure.record import Record
from minideepinfer.measure.step_report import BETWEEN_KERNELS
from minideepinfer.measure.steps import WITH_STAGES
from minideepinfer.operators import load_registry
from minideepinfer.operators.plan import Plan


def run_ladder(
    model_config: ModelConfig,
    ladder: Ladder,
    keep: Callable[[Record], None],
    progress: Callable[[str], None] = lambda what: None,
) -> None:
    """Run the rungs in order.

    Args:
        model_config: the model of the ladder's preset.
        ladder: the rungs.
        keep: given the record of each rung as soon as there is one.
        progress: told what comes next.

    Raises:
        MiniDeepInferError: a rung cannot be served, which is known before anything is measured, or failed; names it.
    """
    registry = load_registry(ladder.rungs[0].engine.plugins.ignore)
    for rung in ladder.rungs:
        with _named(rung):
            rank_setup(model_config, rung.engine, _problem(ladder, rung).shape, registry)
    session = _Session(model_config, ladder, progress)
    for rung in ladder.rungs:
        with _named(rung):
            keep(session.measure(rung))


class _Session:
    """What all rungs share."""

    def __init__(self, model_config: ModelConfig, ladder: Ladder, progress: Callable[[str], None]) -> None:
        self._ladder, self._progress = ladder, progress
        first = ladder.rungs[0]
        layers = [rung.layers for rung in ladder.rungs]
        most = None if None in layers else max(layer for layer in layers if layer)
        progress("making weights")
        with _named(first):
            self._bench = PrefillBench(model_config, first.engine, replace(_problem(ladder, first), num_layers=most))
        progress("measuring rates")
        self._rates = measured_rates(self._bench.rank.setup.device)
        self._reference: Reference | None = None
        self._plans: dict[str, Plan] = {}

    def measure(self, rung: Rung) -> Record:
        """One rung's record."""
        self._progress(f"{rung.name}: {rung.says}" if rung.says else rung.name)
        problem = _problem(self._ladder, rung)
        if self._reference is not None or problem != self._bench.problem:
            self._bench.change(rung.engine, problem)
        if self._reference is None:
            self._progress("keeping what the first rung computes")
            self._reference = record_reference(self._bench)
        record = measure_prefill(
            self._bench,
            name=rung.name,
            profile=replace(WITH_STAGES, gaps=rung.gaps),
            rates=self._rates,
            progress=self._progress,
        )
        self._plans[rung.name] = plan = self._bench.rank.setup.plan
        self._progress("measuring kernels")
        kernels = self._kernels(self._plans[rung.builds_on], plan) if rung.builds_on else KernelEvidence()
        self._progress("measuring errors")
        errors = module_errors(self._bench, self._reference)
        if odd := [name for name, error in errors.items() if not math.isfinite(error)]:
            raise OperatorError(f"not finite on what the first rung computed: {', '.join(odd)}")
        return self._of_ladder(record, rung, errors, kernels)

    def _kernels(self, before: Plan, after: Plan) -> KernelEvidence:
        rank, ladder = self._bench.rank, self._ladder
        return kernel_evidence(before, after, ladder.preset, rank.registry, rank.setup.device, self._rates, ladder.seed)

    def _of_ladder(self, record: Record, rung: Rung, errors: dict[str, float], kernels: KernelEvidence) -> Record:
        place = {
            "ladder": self._ladder.title,
            "rungs": [other.name for other in self._ladder.rungs],
            "builds_on": rung.builds_on,
            "says": rung.says,
        }
        in_stages = {} if BETWEEN_KERNELS in record.stages else {BETWEEN_KERNELS: "stages"}
        return record.model_copy(
            update={
                "benchmark": "ladder",
                "problem": record.problem | place,
                "values": record.values | kernels.values,
                "inside": record.inside | in_stages,
                "floors": record.floors | kernels.floors,
                "errors": errors | kernels.errors,
                "notes": (*self._notes(record), *kernels.notes),
            }
        )

    def _notes(self, record: Record) -> tuple[str, ...]:
        assert self._reference is not None
        looked_at = ", ".join(str(layer.layer_id) for layer in self._reference.layers)
        notes = [*record.notes, f"errors are of the modules of layers {looked_at}"]
        if record.precision["replay"] == "bounded":
            notes.append(
                "bounded replay is an approximation by design: behind the source of candidates its windows begin at "
                "the rows that are kept, which is what its errors of attention and blocks are there"
            )
        if len({rung.layers for rung in self._ladder.rungs}) > 1:
            notes.append(f"{record.name} ran the first {len(self._bench.model.blocks)} layers; nothing is scaled")
        return tuple(notes)


def _problem(ladder: Ladder, rung: Rung) -> PrefillProblem:
    return replace(
        PRESETS[ladder.preset], num_layers=rung.layers, steps=rung.steps, warmup=rung.warmup, seed=ladder.seed
    )


@contextmanager
def _named(rung: Rung) -> Iterator[None]:
    """Say which rung an error belongs to."""
    try:
        yield
    except MiniDeepInferError as error:
        raise type(error)(f"rung {rung.name!r}: {error}") from error
    except Exception as error:  # an operator's own, or the device's
        raise OperatorError(f"rung {rung.name!r} failed: {type(error).__name__}: {error}") from error
