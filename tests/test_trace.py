"""Kernel times by stage, from a trace made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from minideepinfer.errors import ConfigError
from minideepinfer.measure.trace import KernelTimes, TraceClock, kernel_times, trace_step


def stage(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}


def kernel(number: int, launched: float, begin: float, end: float, stream: int = 7) -> list[dict[str, Any]]:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1.0}
    run = {"ph": "X", "cat": "kernel", "name": "k", "ts": begin, "dur": end - begin}
    return [{**launch, "args": {"correlation": number}}, {**run, "args": {"correlation": number, "stream": stream}}]


def times_in(folder: Path, events: list[dict[str, Any]], names: set[str]) -> KernelTimes:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = kernel_times(path, names)
    assert found is not None
    return found


def test_a_kernel_belongs_to_the_innermost_stage_that_launched_it(tmp_path: Path) -> None:
    events = [
        stage("other", 0, 100),
        stage("experts", 10, 50),
        stage("decoding", 20, 30),
        stage("somebody else's range", 21, 29),
        *kernel(1, launched=5, begin=100, end=1100),
        *kernel(2, launched=15, begin=1100, end=3100),
        *kernel(3, launched=25, begin=3100, end=6100),
        *kernel(4, launched=40, begin=6100, end=10100),
        *kernel(5, launched=60, begin=10100, end=15100),
        {"ph": "i", "name": "a mark", "ts": 3},
    ]
    found = times_in(tmp_path, events, {"other", "experts", "decoding"})
    assert found.stages == pytest.approx({"other": 6.0, "experts": 6.0, "decoding": 3.0})
    assert found.total == pytest.approx(15.0)
    assert found.hidden == 0.0


def test_what_another_stream_does_meanwhile_is_hidden(tmp_path: Path) -> None:
    events = [
        stage("experts", 0, 20),
        *kernel(1, launched=1, begin=0, end=10000),
        *kernel(2, launched=2, begin=12000, end=20000),
        *kernel(3, launched=11, begin=9000, end=13000, stream=20),
    ]
    found = times_in(tmp_path, events, {"experts"})
    assert found.stages == pytest.approx({"experts": 18.0, "communication": 4.0})
    assert found.hidden == pytest.approx(2.0)
    assert found.total == pytest.approx(20.0)


def test_a_stream_that_waits_longer_than_all_kernels_run_is_still_not_the_one_that_computes(tmp_path: Path) -> None:
    events = [
        stage("experts", 0, 20),
        *kernel(1, launched=1, begin=0, end=1000),
        *kernel(2, launched=2, begin=1000, end=2000),
        *kernel(3, launched=11, begin=2000, end=9000, stream=20),
    ]
    found = times_in(tmp_path, events, {"experts"})
    assert found.stages == pytest.approx({"experts": 2.0, "communication": 7.0})


def test_a_real_trace_holds_its_stages(tmp_path: Path) -> None:
    clock, path = TraceClock(), tmp_path / "trace.json"

    def step() -> None:
        with clock.stage("outer"), clock.stage("inner"):
            torch.ones(3) + 1

    trace_step(step, path, cuda=False)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    assert {event["name"] for event in events} == clock.names == {"outer", "inner"}
    assert kernel_times(path, clock.names) is None


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written \(Is a directory\)"):
        trace_step(lambda: None, tmp_path, cuda=False)
