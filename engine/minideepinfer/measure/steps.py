"""Timing of whole steps, and of their stages: by events, then once more under the profiler for the time of kernels."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from minideepinfer.measure.rank import Rank
from minideepinfer.measure.stages import UNSEEN, StageTimer
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
PARTS = 5
"""Parts of a step; stages are timed in one of them at a time, so that no step has more than so many of the events."""


@dataclass(frozen=True)
class StepTimes:
    """What repeated steps took, in milliseconds.

    Attributes:
        steps: each step, nothing else looked at.
        staged: as many steps in which stages were timed, in turn with the others, each in one part of the step.
        stages: exclusive time of each stage, the sum over the parts of the median of the looks at it. If kernels are
            known, no longer than those, and the rest of a step in which nothing was timed is `BETWEEN_KERNELS`.
        covered: of each staged step, the share that lies between its first and its last mark.
        kernels: of one step under the profiler; None on a CPU, and where the profiler sees none.
    """

    steps: list[float]
    staged: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    covered: list[float] = field(default_factory=list)
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
    parts = min(PARTS, steps) if timer.entered else 1
    plain: list[float] = []
    staged: list[float] = []
    looks: list[dict[str, float]] = []
    for number in range(steps):
        plain.append(_one(rank, step, between, None))
        if profile.stages:
            timer.look_at(number % parts, parts)
            staged.append(_one(rank, step, between, timer))
            looks.append({row.stage: row.milliseconds for row in timer.table()})
    covered = [sum(look.values()) / total for look, total in zip(looks, staged, strict=True)]
    stages = _sum_of_parts([looks[part::parts] for part in range(parts)])
    kernels = _traced(rank, step, between, profile)
    if kernels and stages:
        stages = _with_gaps(stages, kernels, median(plain))
    return StepTimes(plain, staged, stages, covered, kernels)


def _sum_of_parts(parts: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """The stages of a whole step, of looks at each of its parts."""
    total: dict[str, float] = {}
    for looks in parts:
        for name in dict.fromkeys(name for look in looks for name in look if name != UNSEEN):
            total[name] = total.get(name, 0.0) + median(look.get(name, 0.0) for look in looks)
    return total


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


def _with_gaps(stages: Mapping[str, float], kernels: KernelTimes, step: float) -> dict[str, float]:
    """Stages without the time in which no kernel of theirs ran; what is left of the step becomes a stage of its own.

    Waiting for other ranks belongs to communication. Recording events makes a stage wait, not its kernels longer, so
    that it shows in neither.
    """
    busy = {
        name: time if name == Stage.COMMUNICATION else min(time, kernels.stages.get(name, 0.0))
        for name, time in stages.items()
    }
    return {**busy, BETWEEN_KERNELS: max(0.0, step - sum(busy.values()))}


def fused_stages(operators: Iterable[object]) -> dict[str, str]:
    """Which stages of some built operators happen inside others."""
    inside: dict[str, str] = {}
    for operator in operators:
        inside |= {str(part): str(whole) for part, whole in getattr(operator, "fuses", {}).items()}
    return inside
