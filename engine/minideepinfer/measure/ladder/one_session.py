"""Whether records are the rungs of one ladder, as a report needs them; files may have been edited, or put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minideepinfer.errors import ConfigError
from minideepinfer.measure.record import Record

_OF_OPERATOR = {"family", "operator", "phase", "distribution", "version"}


def check(records: Sequence[Record]) -> None:
    """Refuse records that are not those of one ladder.

    Raises:
        ConfigError: there are none, two have one name, one lacks what every rung has, or is of another benchmark,
            machine, commit, seed or problem.
    """
    if not records:
        raise ConfigError("report: no records; at least one rung of a ladder is needed")
    for number, record in enumerate(records):
        if record.benchmark != "ladder":
            raise ConfigError(f"report: record {record.name!r} is of `bench {record.benchmark}`, needs `bench ladder`")
        if record.name in (other.name for other in records[:number]):
            raise ConfigError(f"report: two records are named {record.name!r}, need names of their own")
        for what in _lacks(record):
            raise ConfigError(f"report: record {record.name!r} has no {what}")
        for what, of in _ONE_SESSION.items():
            if of(record) != of(records[0]):
                raise ConfigError(
                    f"report: {what} of {record.name!r} is {of(record)!r} and of {records[0].name!r} "
                    f"{of(records[0])!r}; times of different runs are not put together"
                )


def _lacks(record: Record) -> Iterator[str]:
    """What every rung has, and this one does not."""
    for name, unit in (("step", "ms"), ("tokens_per_second", "tokens/s")):
        value = record.values.get(name)
        if value is None or value.low <= 0 or value.unit != unit:
            yield f"{name} in {unit}"
    if not isinstance(record.problem.get("layers"), int):
        yield "number of layers in its problem"
    if not all(set(entry) >= _OF_OPERATOR for entry in operators_of(record)):
        yield "plan whose operators say family, operator, phase, distribution and version"


def operators_of(record: Record) -> list[dict[str, Any]]:
    """The plan of a rung, one entry for each operator in its place."""
    return list(record.plan.get("operators", []) if isinstance(record.plan, dict) else record.plan or [])


_ONE_SESSION: dict[str, Callable[[Record], Any]] = {
    "device": lambda record: record.machine.device,
    "driver": lambda record: record.machine.driver,
    "commit": lambda record: (record.software.commit, record.software.dirty),
    "seed": lambda record: record.seed,
    "problem": lambda record: {k: v for k, v in record.problem.items() if k not in ("layers", "builds_on", "says")},
    "dtype": lambda record: record.precision.get("dtype"),
}
