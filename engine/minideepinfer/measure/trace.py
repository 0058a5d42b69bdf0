"""One step as a trace: Chrome / Perfetto JSON with the stage names, and the kernel time of each stage in it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from minideepinfer.errors import ConfigError
from minideepinfer.operators import Stage

Event = dict[str, Any]
_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class TraceClock:
    """A `StageClock` that puts stages into the trace of a running `torch.profiler`, and remembers their names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """See `StageClock`."""
        self.names.add(str(name))
        return record_function(str(name))


@dataclass(frozen=True)
class KernelTimes:
    """Where the GPU was busy in a traced step, milliseconds.

    Attributes:
        stages: time of kernels and copies by the stage that launched them.
        hidden: time of those on other streams than the main one while that was busy too.
    """

    stages: dict[str, float]
    hidden: float

    @property
    def total(self) -> float:
        """All of them on the main stream, and what others did while it was idle."""
        return sum(self.stages.values()) - self.hidden


def trace_step(step: Callable[[], object], path: str | Path, cuda: bool) -> None:
    """Run a step, whose clock is a `TraceClock`, and write its trace.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError(f"--profile trace {path}: cannot be written ({error.strerror or error})") from None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def kernel_times(path: str | Path, names: Collection[str]) -> KernelTimes | None:
    """Read the kernel time of each stage from a trace that `trace_step` wrote; None if it has no kernels.

    A kernel belongs to the innermost stage that was open on the host when it was launched; what runs on another stream
    than most do is communication.

    Args:
        path: the trace.
        names: of the stages; a trace has other ranges, too.
    """
    events = [e for e in json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"] if e.get("ph") == "X"]
    stages = _Stages(e for e in events if e.get("cat") == "user_annotation" and e["name"] in names)
    launched = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCHES and "correlation" in e["args"]}
    ours = [e for e in events if e.get("cat") in _ON_THE_GPU]
    if not ours:
        return None
    main = _main_stream(ours)
    spent: dict[str, float] = defaultdict(float)
    for event in ours:
        launch = launched.get(event["args"].get("correlation"))
        name = (stages.at(launch["ts"]) if launch else "") or Stage.OTHER
        spent[str(name if _stream(event) == main else Stage.COMMUNICATION)] += event["dur"] / 1e3
    return KernelTimes(dict(spent), _hidden(ours, main))


def _stream(event: Event) -> Any:
    return event["args"].get("stream")


def _main_stream(events: Iterable[Event]) -> Any:
    """The stream that computes: the one with most kernels, since few that wait for other ranks may take longer."""
    return Counter(_stream(event) for event in events).most_common(1)[0][0]


class _Stages:
    """Nested ranges of one thread, each with a name, by time."""

    def __init__(self, events: Iterable[Event]) -> None:
        changes: list[tuple[float, str]] = []
        opened: list[tuple[float, str]] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            self._close(opened, changes, event["ts"])
            opened.append((event["ts"] + event["dur"], event["name"]))
            changes.append((event["ts"], opened[-1][1]))
        self._close(opened, changes, float("inf"))
        self._times, self._names = [time for time, _ in changes], [name for _, name in changes]

    @staticmethod
    def _close(opened: list[tuple[float, str]], changes: list[tuple[float, str]], until: float) -> None:
        while opened and opened[-1][0] <= until:
            end, _ = opened.pop()
            changes.append((end, opened[-1][1] if opened else ""))

    def at(self, time: float) -> str:
        """The innermost stage at a time; empty if none is open."""
        index = bisect_right(self._times, time) - 1
        return self._names[index] if index >= 0 else ""


def _hidden(events: Iterable[Event], main: Any) -> float:
    """Milliseconds in which other streams than the main one ran while that one did."""
    ours: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in events:
        (ours if _stream(event) == main else others).append((event["ts"], event["ts"] + event["dur"]))
    ours.sort()
    starts = [begin for begin, _ in ours]
    overlap = 0.0
    for begin, end in others:
        index = max(0, bisect_right(starts, begin) - 1)
        while index < len(ours) and ours[index][0] < end:
            overlap += max(0.0, min(end, ours[index][1]) - max(begin, ours[index][0]))
            index += 1
    return overlap / 1e3
