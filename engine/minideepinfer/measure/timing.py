"""Timing of single calls: CUDA events, cold L2 and a host that runs ahead on a GPU; wall clock on a CPU.

Numbers of different runs are never compared with each other: a run times its own baselines.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from minideepinfer.measure.record import Measurement

Call = Callable[[], Any]
FLUSH_BYTES = 256 << 20
"""Written before each timed call, more than any L2 holds."""
MOST_HIDDEN_SECONDS = 5e-3
"""A call that keeps the host longer is launched behind one flush only."""
FEWEST = 3
"""Rounds of a call, however slow."""


def time_calls(
    calls: Mapping[str, Call], device: torch.device, repeats: int = 20, warmup: int = 3, seconds: float | None = None
) -> dict[str, Measurement]:
    """Time callables in turn, round after round, so that a card that throttles does so for all of them.

    On a GPU a time is that between two events around the call, after a write that empties L2. The write is repeated
    until the host had time to queue the whole call, so that launching from Python does not count; a call that waits
    for the device itself cannot be hidden like that, and its waiting counts. On a CPU caches are warm.

    Args:
        calls: by name; each is one launch, or a few.
        device: where they run.
        repeats: rounds.
        warmup: calls of each before the first round (compiles what is compiled at the first call), at least 1.
        seconds: about the longest that the rounds of one call may take together: a slow call sits out some of the
            rounds, evenly, but is in `FEWEST` of them; None = all are in all.

    Returns:
        Milliseconds by name.
    """
    clock = _EventClock(device) if device.type == "cuda" else _WallClock()
    rounds = {}
    for name, call in calls.items():
        for _ in range(max(1, warmup) - 1):
            call()
        once = clock.try_out(name, call)
        most = repeats if seconds is None else max(FEWEST, math.floor(seconds / max(once, 1e-9)))
        rounds[name] = min(repeats, most)
    for number in range(repeats):
        for name, call in calls.items():
            if number * rounds[name] % repeats < rounds[name]:
                clock.time(name, call)
    return {name: summary(times) for name, times in clock.milliseconds().items()}


def summary(times: Sequence[float]) -> Measurement:
    """Median, 20th and 80th percentile of milliseconds, at least one."""
    ordered = sorted(times)
    fifth = len(ordered) // 5
    return Measurement(
        median=statistics.median(ordered), low=ordered[fifth], high=ordered[-1 - fifth], repeats=len(ordered)
    )


class _WallClock:
    """Seconds that pass on the host."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def try_out(self, name: str, call: Call) -> float:
        """Seconds of one call that does not count."""
        begin = time.perf_counter()
        call()
        self._times[name] = []
        return time.perf_counter() - begin

    def time(self, name: str, call: Call) -> None:
        begin = time.perf_counter()
        call()
        self._times[name].append(1e3 * (time.perf_counter() - begin))

    def milliseconds(self) -> dict[str, list[float]]:
        return self._times


class _EventClock:
    """Pairs of CUDA events, read at the end so that nothing waits in between."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flushes: dict[str, int] = {}
        self._spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {"flush": []}
        self._flush.fill_(0)
        for _ in range(FEWEST):
            self._span("flush", lambda: self._flush.fill_(1))
        self._flush_seconds = statistics.median(self._read("flush")) / 1e3
        del self._spans["flush"]

    def try_out(self, name: str, call: Call) -> float:
        """Seconds of one call that does not count; how long it keeps the host decides how long the GPU is kept busy."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        queued = time.perf_counter() - begin
        torch.cuda.synchronize()
        hidden = queued if queued < MOST_HIDDEN_SECONDS else 0.0
        self._flushes[name], self._spans[name] = 1 + math.ceil(hidden / self._flush_seconds), []
        return time.perf_counter() - begin

    def time(self, name: str, call: Call) -> None:
        for _ in range(self._flushes[name]):
            self._flush.fill_(1)
        self._span(name, call)

    def milliseconds(self) -> dict[str, list[float]]:
        return {name: self._read(name) for name in self._spans}

    def _span(self, name: str, call: Call) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        self._spans[name].append((start, end))

    def _read(self, name: str) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self._spans[name]]
