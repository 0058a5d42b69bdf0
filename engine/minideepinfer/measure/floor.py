"""The least time that a cost can take at the rates of a run."""

from __future__ import annotations

from collections.abc import Mapping

from minideepinfer.measure.rates import COPY, tflops
from minideepinfer.operators.cost import Cost


def floor_ms(cost: Cost, rates: Mapping[str, float]) -> float:
    """Milliseconds: the larger of its arithmetic and its bytes, each at this run's rate."""
    arithmetic = sum(number / tflops(rates, name) for name, number in cost.flops.items())
    return max(arithmetic, cost.num_bytes / rates[COPY]) / 1e9
