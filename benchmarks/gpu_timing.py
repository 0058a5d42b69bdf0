"""What the scripts in this folder share; the instruments themselves are `minideepinfer.measure`'s."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from minideepinfer.measure import timing
from minideepinfer.measure.facts import machine, software
from minideepinfer.measure.rates import measured_rates
from minideepinfer.measure.record import Measurement
from minideepinfer.measure.timing import Call, graphed

__all__ = ["ceilings", "facts", "graphed", "in_ms", "time_calls", "write_record"]

GPU = torch.device("cuda")


def time_calls(calls: Mapping[str, Call], repeats: int = 20, warmup: int = 3) -> dict[str, Measurement]:
    """See `minideepinfer.measure.timing.time_calls`."""
    return timing.time_calls(calls, GPU, repeats, warmup)


def in_ms(times: Mapping[str, Measurement]) -> dict[str, list[float]]:
    """20th percentile, median and 80th percentile, as records have them."""
    return {name: [round(time.low, 4), round(time.median, 4), round(time.high, 4)] for name, time in times.items()}


def ceilings() -> dict[str, float]:
    """Rates of this card now."""
    return measured_rates(GPU)


def facts(commit: str) -> dict[str, Any]:
    """Hardware, versions and commit of a record."""
    return {"machine": machine(GPU).model_dump(), "versions": software().versions, "commit": commit}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
