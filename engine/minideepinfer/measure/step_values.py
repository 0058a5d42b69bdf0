"""What timed steps come to in a record."""

from __future__ import annotations

from typing import Literal

from minideepinfer.measure.record import Measurement
from minideepinfer.measure.steps import StepTimes
from minideepinfer.measure.timing import summary


def step_values(times: StepTimes, tokens: int) -> dict[str, Measurement]:
    """A step of so many tokens: its time, their rate, and what its profile adds."""
    step = summary(times.steps)
    median, low, high = (1e3 * tokens / time for time in (step.median, step.high, step.low))
    rate = Measurement(median=median, low=low, high=high, repeats=step.repeats, unit="tokens/s")
    values = {"step": step, "tokens_per_second": rate}
    if times.staged:
        values["step_with_stages"] = summary(times.staged)
        more = [staged / plain - 1 for staged, plain in zip(times.staged, times.steps, strict=True)]
        values["stage_overhead"] = summary(more).model_copy(update={"unit": "1"})
    if times.kernels:
        values["kernels"] = once(times.kernels.total, "ms")
        values["communication_hidden"] = once(times.kernels.hidden, "ms")
    return values


def once(number: float, unit: Literal["ms", "GB/s", "bytes", "rows"]) -> Measurement:
    """A quantity that was looked at once."""
    return Measurement(median=number, low=number, high=number, repeats=1, unit=unit)
