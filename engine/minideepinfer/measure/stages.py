"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import torch

from minideepinfer.operators import StageClock

UNSEEN = "not looked at"
"""The stage of the parts of a step that are not looked at."""

_BEGIN, _END = -1, -2
"""Where the first part begins, and where the last one ends, however many stages there are."""

_MAX_MARKS = 1 << 15
"""Marks kept as CUDA events before they are read, so that a long run does not pile them up."""


Mark = torch.cuda.Event | float
"""A point of time: seconds on the host, or an event on a stream."""


@dataclass(frozen=True)
class StageRow:
    """One line of the table: exclusive milliseconds, share of the sum, number of times entered."""

    stage: str
    milliseconds: float
    share: float
    calls: int


class StageTimer:
    """A `StageClock` whose stages nest; the time of an inner stage is not counted in the outer one.

    Each beginning and each end of a stage is a mark on the stream on which the outermost stage began; the time between
    two marks belongs to the innermost stage open there, so that under one outer stage nothing is lost, waiting for the
    host included. A stage inside one of the same name needs no marks. On CUDA a mark is an event, made once and used
    again, and nothing is synchronised before the table is asked for.

    Recording an event costs host and GPU a few microseconds, and a step has a thousand of them. So that a step is not
    made longer by them, one can `look_at` a part of it only, at another one in each repetition: outside of the part
    there are no events but those at both ends of the step.

    Attributes:
        entered: how many stages the latest outermost stage held directly; parts are made of so many.
    """

    def __init__(self, device: torch.device) -> None:
        self.entered = 0
        self._device = device
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._looking, self._entered = True, 0
        self._first, self._last = _BEGIN, _END
        self._stream: torch.cuda.Stream | None = None
        self._marks: list[tuple[Mark, str]] = []
        self._free: list[torch.cuda.Event] = []
        self._stages: dict[str, _Stage] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()

    def stage(self, name: str) -> _Stage:
        """Attribute what happens inside to a stage."""
        if name not in self._stages:
            self._stages[name] = _Stage(self, str(name))
        return self._stages[name]

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._resolve()
        self._seconds.clear()
        self._calls.clear()

    def look_at(self, part: int, parts: int) -> None:
        """Forget everything measured so far, and look at one part of each outermost stage from now on.

        The parts of repetitions of one step add up to it; the rest of each is `UNSEEN`.

        Args:
            part: which, from 0.
            parts: of how many, each with as many of the stages that the latest outermost stage held directly.
        """
        self.reset()
        self._first = part * self.entered // parts if part else _BEGIN
        self._last = (part + 1) * self.entered // parts if part + 1 < parts else _END

    def table(self) -> list[StageRow]:
        """Stages by time, longest first."""
        self._resolve()
        total = sum(self._seconds.values()) or 1.0
        return [
            StageRow(stage, 1e3 * seconds, seconds / total, self._calls[stage])
            for stage, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])
        ]

    def enter(self, name: str) -> None:
        """Open a stage; see `stage`."""
        stack = self._stack
        if not stack:
            self._begin(name)
        elif len(stack) == 1:
            self._next_inner()
        if self._looking:
            self._calls[name] += 1
            if stack and stack[-1] != name:
                self._mark(name)
        stack.append(name)

    def leave(self) -> None:
        """Close the innermost stage."""
        stack = self._stack
        name = stack.pop()
        if not stack:
            self.entered = self._entered
            self._mark("")
        elif self._looking and stack[-1] != name:
            self._mark(stack[-1])

    def _begin(self, name: str) -> None:
        if self._cuda:
            self._stream = torch.cuda.current_stream(self._device)
        self._looking, self._entered = self._first == _BEGIN, 0
        self._mark(name if self._looking else UNSEEN)

    def _next_inner(self) -> None:
        """A part begins or ends where the outermost stage opens another one."""
        if self._entered == self._last:
            self._looking = False
            self._mark(UNSEEN)
        elif self._entered == self._first:
            self._looking = True
        self._entered += 1

    def _mark(self, following: str) -> None:
        """What follows belongs to a stage; to nobody if that is empty."""
        if not self._cuda:
            self._marks.append((time.perf_counter(), following))
        else:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._marks.append((event, following))
        if len(self._marks) > _MAX_MARKS:
            self._resolve()

    def _resolve(self) -> None:
        """Turn the marks into seconds; the last one stays, since something may follow it."""
        if len(self._marks) < 2:
            return
        if self._cuda:
            torch.cuda.synchronize(self._device)
        for (begin, stage), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            if stage:
                self._seconds[stage] += _seconds_between(begin, end)
        self._free += [mark for mark, _ in self._marks[:-1] if isinstance(mark, torch.cuda.Event)]
        self._marks = self._marks[-1:]


class _Stage:
    """A context manager that opens a stage; cheaper than a generator, and one for each name does."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: StageTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._timer.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.leave()


def _seconds_between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float), "all marks are of one kind"
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3


class SwitchedClock:
    """A `StageClock` whose target can be changed after operators were built with it."""

    def __init__(self, target: StageClock) -> None:
        self.target = target

    def stage(self, name: str) -> AbstractContextManager[None]:
        """See `StageClock`."""
        return self.target.stage(name)
