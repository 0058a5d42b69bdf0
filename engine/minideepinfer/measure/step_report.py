"""Records of steps, for people."""

from __future__ import annotations

from minideepinfer.measure.record import Record
from minideepinfer.measure.steps import BETWEEN_KERNELS

SPEC_FLOORS = {
    ("v41-rank", "bounded"): (112.0, 73.0),
    ("v41-rank", "full"): (194.0, 119.0),
}


def prefill_lines(record: Record) -> list[str]:
    """The result of `bench prefill`, behind its headline and plan."""
    return [f"{name}: {value.median:g} {value.unit}" for name, value in record.values.items()]
