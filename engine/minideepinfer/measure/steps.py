"""Timing of whole steps, and of their stages: by events, then once more under the profiler for the time of kernels."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minideepinfer.measure.rank import Rank
from minideepinfer.measure.stages import StageTimer
from minideepinfer.measure.step_report import BETWEEN_KERNELS
from minideepinfer.measure.trace import KernelTimes, TraceClock, kernel_times, trace_step
from minideepinfer.operators import NoClock, Stage, StageClock


@dataclass(frozen=True)
class Profile:
    """What is looked at beside the step's time.

    Attributes:
        stages: whether stages are timed.
        trace: file for a trace of one step; None = none is kept.
        gaps: whether the time between kernels is told apart from the stages around it, where stages are timed on a GPU;
            takes a traced step, and long where kernels are many.
    """

    stages: bool = False
    trace: Path | None = None
    gaps: bool = True


WITH_STAGES = Profile(stages=True)


@dataclass(frozen=True)
class StepTimes:
    """What repeated steps took, in milliseconds.

    Attributes:
        steps: each step, nothing else looked at.
        staged: as many steps in which stages were timed, in turn with the others.
        stages: exclusive time of each stage, mean over the middle three fifths of the staged steps; with
            `BETWEEN_KERNELS` if kernels are known.
        kernels: of one step under the profiler; None on a CPU, and where the profiler sees none.
    """

    steps: list[float]
    staged: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    kernels: KernelTimes | None = None


def time_steps(
    rank: Rank,
    step: Callable[[], object],
    between: Callable[[], None],
    *,
    steps: int,
    warmup: int,
    profile: Profile,
) -> StepTimes:
    """Repeat a step.

    Args:
        rank: whose clock tells the stages.
        step: computes it.
        between: rewinds, before each step; not a part of it.
        steps: how many.
        warmup: steps before them.
        profile: with stages, a step in which they are timed follows each one in which they are not.
    """
    timer = StageTimer(rank.setup.device)
    for _ in range(warmup):
        _one(rank, step, between, timer)
    plain: list[float] = []
    staged: list[tuple[float, dict[str, float]]] = []
    for _ in range(steps):
        plain.append(_one(rank, step, between, None))
        if profile.stages:
            timer.reset()
            total = _one(rank, step, between, timer)
            staged.append((total, {row.stage: row.milliseconds for row in timer.table()}))
    stages = _middle(staged)
    kernels = _traced(rank, step, between, profile)
    totals = [total for total, _ in staged]
    return StepTimes(plain, totals, _with_gaps(stages, kernels) if kernels else stages, kernels)


def _middle(staged: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """Mean of each stage over the steps that are neither among the fastest nor among the slowest fifth."""
    fifth = len(staged) // 5
    kept = [table for _, table in sorted(staged, key=lambda item: item[0])[fifth : len(staged) - fifth]]
    names = dict.fromkeys(name for table in kept for name in table)
    return {name: sum(table.get(name, 0.0) for table in kept) / len(kept) for name in names}


def _one(rank: Rank, step: Callable[[], object], between: Callable[[], None], timer: StageTimer | None) -> float:
    between()
    rank.meet()
    begin = time.perf_counter()
    _under(rank, timer or NoClock(), step)
    rank.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _under(rank: Rank, clock: StageClock, step: Callable[[], object]) -> None:
    """A step told to a clock, all that is in no other stage under `OTHER`."""
    rank.clock.target = clock
    try:
        with clock.stage(Stage.OTHER):
            step()
    finally:
        rank.clock.target = NoClock()


def _traced(
    rank: Rank, step: Callable[[], object], between: Callable[[], None], profile: Profile
) -> KernelTimes | None:
    """Trace a step if somebody wants to see it or its kernels."""
    cuda = rank.setup.device.type == "cuda"
    if not (profile.trace or (profile.stages and profile.gaps and cuda)):
        return None
    clock = TraceClock()
    with tempfile.TemporaryDirectory() as folder:
        path = profile.trace if profile.trace and rank.world.rank == 0 else Path(folder) / "trace.json"
        between()
        rank.meet()
        trace_step(lambda: _under(rank, clock, step), path, cuda)
        return kernel_times(path, clock.names) if cuda else None


def _with_gaps(stages: Mapping[str, float], kernels: KernelTimes) -> dict[str, float]:
    """Stages without the time in which no kernel of theirs ran, which becomes a stage of its own.

    Waiting for other ranks belongs to communication.
    """
    busy = {
        name: time if name == Stage.COMMUNICATION else min(time, kernels.stages.get(name, 0.0))
        for name, time in stages.items()
    }
    return {**busy, BETWEEN_KERNELS: sum(stages.values()) - sum(busy.values())} if stages else {}


def fused_stages(operators: Iterable[object]) -> dict[str, str]:
    """Which stages of some built operators happen inside others."""
    inside: dict[str, str] = {}
    for operator in operators:
        inside |= {str(part): str(whole) for part, whole in getattr(operator, "fuses", {}).items()}
    return inside
