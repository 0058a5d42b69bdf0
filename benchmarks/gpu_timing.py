"""Timing on one GPU: CUDA events around single calls, L2 cold, medians; with the facts that make a record comparable.

Used by the scripts in this folder. Numbers of different runs are never compared: a record holds its own baselines.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

L2_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one callable.

    Attributes:
        median: of all repeats.
        low: 20th percentile.
        high: 80th percentile.
    """

    median: float
    low: float
    high: float


def time_calls(calls: Mapping[str, Callable[[], Any]], repeats: int = 20, warmup: int = 3) -> dict[str, Timing]:
    """Time callables in turn, round after round, so that a card that throttles does so for all of them.

    Args:
        calls: by name; each is one launch, or a few, without host synchronisation.
        repeats: rounds.
        warmup: calls of each before the first round (compiles what is compiled at the first call).
    """
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        for _ in range(warmup):
            call()
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            flush.fill_(1)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {name: _summary([start.elapsed_time(end) for start, end in pairs]) for name, pairs in spans.items()}


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    """A call recorded in a CUDA graph, so that launches from Python don't count; its tensors live as long."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_kept: Callable[[], Any] = call) -> None:
        graph.replay()

    return replay


def in_ms(times: Mapping[str, Timing]) -> dict[str, list[float]]:
    """20th percentile, median and 80th percentile, as records have them."""
    return {name: [round(time.low, 4), round(time.median, 4), round(time.high, 4)] for name, time in times.items()}


def _summary(times: list[float]) -> Timing:
    ordered = sorted(times)
    return Timing(statistics.median(ordered), ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5])


def ceilings() -> dict[str, float]:
    """Rates of this card now: `copy_tb_s` (read + write), `bf16_tflops` and `fp8_tflops` of cuBLAS at 8192^3."""
    n = 8192
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").fill_(3)
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    times = time_calls(
        {
            "copy": lambda: target.copy_(source),
            "bf16": lambda: a @ b,
            "fp8": lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        },
        repeats=10,
    )
    return {
        "copy_tb_s": 2 * source.numel() / times["copy"].median / 1e9,
        "bf16_tflops": 2 * n**3 / times["bf16"].median / 1e9,
        "fp8_tflops": 2 * n**3 / times["fp8"].median / 1e9,
    }


def facts(commit: str) -> dict[str, str]:
    """Hardware, versions and commit of a record."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
