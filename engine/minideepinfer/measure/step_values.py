"""What timed steps come to in a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from minideepinfer.measure.record import Measurement
from minideepinfer.measure.steps import StepTimes
from minideepinfer.measure.timing import summary


def step_values(times: StepTimes, tokens: int) -> dict[str, Measurement]:
    """A step of so many tokens: its time, their rate, and what its profile adds."""
    step = summary(times.steps)
    values = {"step": step, "tokens_per_second": rate(step, tokens)}
    if times.staged:
        values["step_with_stages"] = summary(times.staged)
        more = [staged / plain - 1 for staged, plain in zip(times.staged, times.steps, strict=True)]
        values["stage_overhead"] = ratio(more)
        values["stages_covered"] = ratio(times.covered)
    if times.kernels:
        values["kernels"] = once(times.kernels.total, "ms")
        values["communication_hidden"] = once(times.kernels.hidden, "ms")
    return values


def once(number: float, unit: Literal["ms", "GB/s", "bytes", "rows"]) -> Measurement:
    """A quantity that was looked at once."""
    return Measurement(median=number, low=number, high=number, repeats=1, unit=unit)


def ratio(numbers: Sequence[float]) -> Measurement:
    """A number without a unit, looked at repeatedly."""
    return summary(numbers).model_copy(update={"unit": "1"})


def rate(time: Measurement, tokens: int) -> Measurement:
    """Tokens a second, if so many take this time."""
    median, low, high = (1e3 * tokens / milliseconds for milliseconds in (time.median, time.high, time.low))
    return Measurement(median=median, low=low, high=high, repeats=time.repeats, unit="tokens/s")
