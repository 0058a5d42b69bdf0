"""Verification against a golden set: does this engine, with this plan of operators, compute what it should?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minideepinfer.config import EngineConfig
from minideepinfer.errors import VerificationError
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.golden_bounds import ModuleBounds, Variant
from minideepinfer.testing.golden_compare import Comparison
from minideepinfer.testing.golden_end_to_end import compare_bounded, compare_end_to_end
from minideepinfer.testing.golden_manifest import GoldenSequence
from minideepinfer.testing.golden_measures import Cell
from minideepinfer.testing.golden_modules import ModulePass
from minideepinfer.testing.golden_report import Report
from minideepinfer.testing.golden_set import GoldenRun, GoldenSet

__all__ = ["Report", "verify"]


def verify(
    path: str | Path,
    *,
    variants: Sequence[str] | None = None,
    sequences: Sequence[str] | None = None,
    ops: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Report:
    """Compare the engine with a golden set, end to end and module by module.

    Modules get golden inputs, and the golden selection, candidates and routing are forced on them; operators are those
    of the engine's plan, prefill and decode ones both. In bfloat16 modules get the inputs of the float32 run with the
    same boundaries.

    Args:
        path: a directory in the format of `golden/README.md`, checkpoint included.
        variants: runs to repeat, e.g. `fp32-noq`; None = all that the set names.
        sequences: names; None = all.
        ops: operator choice by family, over that of `config`.
        config: device, operators and so on; precision and replay belong to the variants.
        progress: told what is compared next.

    Returns:
        Every comparison made; `report.ok` says whether all stayed within their bounds.

    Raises:
        VerificationError: the directory is no golden set, or not one of this checkpoint, or has nothing of what is
            asked for.
        CheckpointError: the checkpoint is damaged.
        OperatorError: a chosen operator cannot serve it.
    """
    golden = GoldenSet(path)
    chosen = _choose(golden, sequences)
    base = config or EngineConfig()
    if ops:
        base = EngineConfig(**{**base.model_dump(exclude_unset=True), "ops": {**base.ops, **ops}})
    report = Report(str(path))
    for name in _variant_names(chosen, variants, report):
        variant = Variant.parse(name)
        progress(name)
        count = len(report.cells)
        _Verification(golden, variant, base, report, progress).run(chosen)
        if variants is not None and len(report.cells) == count:
            raise VerificationError(f"{path}: nothing could be compared in variant {name}")
    for sequence in chosen:
        for file in sequence.dspark.files.values() if sequence.dspark else ():
            report.skipped[file] = "draft outputs are not run by this version"
    return report


def _choose(golden: GoldenSet, names: Sequence[str] | None) -> list[GoldenSequence]:
    if unknown := [name for name in names or () if name not in golden.sequences]:
        raise VerificationError(f"{golden.path}: has no sequence {unknown}; it has {list(golden.sequences)}")
    return [sequence for name, sequence in golden.sequences.items() if names is None or name in names]


def _variant_names(
    sequences: Sequence[GoldenSequence], requested: Sequence[str] | None, report: Report
) -> Sequence[str]:
    if requested is not None:
        return requested
    named = dict.fromkeys(run for sequence in sequences for run in sequence.files)
    for run in [run for run in named if Variant.find(run) is None]:
        del named[run]
        report.skipped[run] = "a run of this name is unknown to this version"
    return sorted(named, key=lambda run: (run != "fp32-noq", run))


class _Verification:
    """One variant of a set, with a runner for each kind of replay that it needs."""

    def __init__(
        self, golden: GoldenSet, variant: Variant, base: EngineConfig, report: Report, progress: Callable[[str], None]
    ) -> None:
        self.golden = golden
        self.variant = variant
        self.base = base
        self.report = report
        self.progress = progress

    def run(self, sequences: Sequence[GoldenSequence]) -> None:
        """Run everything that the sequences hold of this variant."""
        names = (self.variant.name, self.variant.inputs)
        full = [sequence for sequence in sequences if any(name in sequence.files for name in names)]
        if full:
            runner = self._runner(full, "full")
            for sequence in full:
                self._full(runner, sequence)
            del runner
        bounded = [run for s in sequences if (run := self.golden.bounded(s, self.variant.name)) is not None]
        if bounded:
            runner = self._runner([run.sequence for run in bounded], "bounded")
            for run in bounded:
                self.progress(f"{self.variant.name}, {run.sequence.name} in bounded replay")
                self._add(run, compare_bounded(runner, run, self.variant))

    def _full(self, runner: Runner, sequence: GoldenSequence) -> None:
        variant = self.variant
        self.progress(f"{variant.name}, {sequence.name}")
        own = self.golden.run(sequence, variant.name) if variant.name in sequence.files else None
        inputs = own
        if variant.inputs != variant.name:
            inputs = self.golden.run(sequence, variant.inputs) if variant.inputs in sequence.files else None
        if inputs is not None:
            text = runner.config.text_config
            comparison = Comparison(inputs, variant, "modules", text, ModuleBounds(variant, sequence, text))
            ModulePass(runner, inputs, comparison).run()
            self._add(inputs, comparison.cells)
        if own is not None:
            self._add(own, compare_end_to_end(runner, own, variant))

    def _runner(self, sequences: Sequence[GoldenSequence], replay: str) -> Runner:
        page_tokens = self.base.cache.page_tokens
        pages = max(-(-len(sequence.token_ids) // page_tokens) for sequence in sequences)
        runner = Runner(self.golden.path, self.variant.engine_config(self.base, pages, replay))
        self.report.plans[self.variant.name] = runner.plan.lines()
        return runner

    def _add(self, run: GoldenRun, cells: Sequence[Cell]) -> None:
        self.report.cells += cells
        self.report.held.setdefault(run.file.name, set()).update(run.tensors)
        self.report.compared.setdefault(run.file.name, set()).update(cell.tensor for cell in cells)
