"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_MAX_SPANS = 1 << 14
"""Spans kept as CUDA events before they are read, so that a long run does not pile them up."""


@dataclass(frozen=True)
class StageRow:
    """One line of the table: exclusive milliseconds, share of the sum, number of times entered."""

    stage: str
    milliseconds: float
    share: float
    calls: int


class StageTimer:
    """A `StageClock` whose stages nest; the time of an inner stage is not counted in the outer one.

    On CUDA a stage costs two event records and no synchronisation; times are read when the table is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._last_mark: float | torch.cuda.Event = 0.0
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attribute what happens inside to a stage."""
        self._mark()
        self._stack.append(name)
        self._calls[name] += 1
        try:
            yield
        finally:
            self._mark()
            self._stack.pop()

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._resolve()
        self._seconds.clear()
        self._calls.clear()

    def table(self) -> list[StageRow]:
        """Stages by time, longest first."""
        self._resolve()
        total = sum(self._seconds.values()) or 1.0
        return [
            StageRow(stage, 1e3 * seconds, seconds / total, self._calls[stage])
            for stage, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])
        ]

    def _mark(self) -> None:
        """Attribute the time since the last mark to the innermost open stage."""
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
            if self._stack:
                assert isinstance(self._last_mark, torch.cuda.Event)
                self._spans.append((self._stack[-1], self._last_mark, now))
            self._last_mark = now
            if len(self._spans) > _MAX_SPANS:
                self._resolve()
            return
        moment = time.perf_counter()
        if self._stack:
            assert isinstance(self._last_mark, float)
            self._seconds[self._stack[-1]] += moment - self._last_mark
        self._last_mark = moment

    def _resolve(self) -> None:
        if self._spans:
            torch.cuda.synchronize()
        for stage, begin, end in self._spans:
            self._seconds[stage] += begin.elapsed_time(end) / 1e3
        self._spans.clear()
