"""Results of the kernel benchmark as records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from minideepinfer.measure.kernels.bench import Result
from minideepinfer.measure.record import Machine, Measurement, Record, Software
from minideepinfer.operators import Cost

TIME, RATIO = "time", "ratio_to_naive"
FAILED = "FAILED: "


def ratio(time: Measurement, base: Measurement) -> Measurement:
    """A time in units of another one of the same run, with the widest interval that the two spreads allow."""
    return Measurement(
        median=time.median / base.median,
        low=time.low / base.high,
        high=time.high / base.low,
        repeats=min(time.repeats, base.repeats),
        unit="1",
    )


def baseline(results: Sequence[Result], against: str = "") -> Measurement | None:
    """The time of the reference among the results of one problem, or of another operator."""
    for result in results:
        if result.operator.title == against or (not against and result.operator.is_reference):
            return result.time
    return None


def records(
    results: Sequence[Result],
    preset: str,
    against: str,
    machine: Machine,
    software: Software,
    rates: Mapping[str, float],
    seed: int,
) -> list[Record]:
    """The records of one problem's results; what an operator does not serve has none.

    Args:
        results: of one problem.
        preset: the problem's.
        against: title of an operator that the others are also compared with; empty = none.
        machine: where it ran.
        software: with what.
        rates: of the same run.
        seed: of all numbers.
    """
    bases = {RATIO: baseline(results)}
    if against:
        bases[f"ratio_to_{against}"] = baseline(results, against)
    return [
        Record(
            benchmark="kernel",
            name=f"{result.operator.title}, {preset}: {result.problem}",
            headline=f"{result.operator.title} alone, no model around it, made-up numbers; {preset}: {result.problem}",
            machine=machine,
            software=software,
            problem={"preset": preset, "name": result.problem, "sizes": plain_data(result.recipe)},
            precision=_precision(result.case_problem),
            plan=_plan(result),
            seed=seed,
            values=_values(result, bases),
            floors={TIME: result.floor} if result.time else {},
            rates=dict(rates),
            errors=dict(result.errors or {}),
            notes=(FAILED + result.failure,) if result.failure else (f"held against the reference: {result.judged}",),
        )
        for result in results
        if not result.obstacles
    ]


def plain_data(value: Any) -> Any:
    """A recipe as JSON has it, without its seed and defaults; equal numbers in a row are one string, e.g. `64 x 1`."""
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
        return {name: plain_data(item) for name, item in given.items() if name != "seed"}
    if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    return json.loads(json.dumps(value))


def rates_reached(cost: Cost, time: Measurement) -> dict[str, Measurement]:
    """Operations and bytes of a cost, and what was reached of them a second."""
    found = {"flops": _exactly(cost.total_flops, "1"), "bytes": _exactly(cost.num_bytes, "bytes")}
    for name, number, unit in (("tflops", cost.total_flops / 1e9, "TFLOP/s"), ("gb_s", cost.num_bytes / 1e6, "GB/s")):
        found[name] = Measurement(
            median=number / time.median, low=number / time.high, high=number / time.low, repeats=time.repeats, unit=unit
        )
    return found


def _exactly(number: float, unit: Any) -> Measurement:
    return Measurement(median=number, low=number, high=number, repeats=1, unit=unit)


def _values(result: Result, bases: Mapping[str, Measurement | None]) -> dict[str, Measurement]:
    if result.time is None or result.cost is None:
        return {}
    values = {TIME: result.time}
    values |= {name: ratio(result.time, base) for name, base in bases.items() if base and base is not result.time}
    return values | rates_reached(result.cost, result.time)


def _precision(problem: Any) -> dict[str, str]:
    names = ("dtype", "kv_quantization", "activation_quantization", "cache_layout")
    return {name: getattr(problem, name) for name in names if hasattr(problem, name)}


def _plan(result: Result) -> dict[str, Any]:
    operator = result.operator.registered
    return {
        "family": operator.declaration.family,
        "operator": operator.name,
        "distribution": operator.distribution,
        "version": operator.version,
        "options": plain_data(dict(result.operator.changes)),
        "form": result.form,
    }
