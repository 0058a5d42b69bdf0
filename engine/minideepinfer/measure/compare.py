"""Two files of records side by side: what changed, beyond the spread or within it, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minideepinfer.errors import ConfigError
from minideepinfer.measure.record import Measurement, Record

SMALLER_IS_BETTER = ("ms", "bytes", "1")
MACHINE = ("device", "driver", "power_limit_watts")
"""Facts of a machine without which times mean something else."""


@dataclass(frozen=True)
class Change:
    """One measured quantity in two records.

    Attributes:
        name: of the value.
        before: in the first.
        after: in the second.
    """

    name: str
    before: Measurement
    after: Measurement

    @property
    def ratio(self) -> float:
        """After in units of before."""
        return self.after.median / self.before.median

    @property
    def within_spread(self) -> bool:
        """Whether the intervals from the 20th to the 80th percentile overlap."""
        return self.before.low <= self.after.high and self.after.low <= self.before.high

    @property
    def is_worse(self) -> bool:
        """Whether the median went the wrong way."""
        return (self.ratio > 1) == (self.before.unit in SMALLER_IS_BETTER) and self.ratio != 1


@dataclass(frozen=True)
class Pair:
    """Records of one benchmark and name.

    Attributes:
        title: benchmark and name.
        before: in the first file, None if it has none.
        after: in the second file.
        differences: why they cannot be compared, one sentence each.
        changes: of the values that both have; empty if they cannot be compared.
    """

    title: str
    before: Record | None
    after: Record | None
    differences: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def change(self, name: str) -> Change | None:
        """That of a value."""
        return next((change for change in self.changes if change.name == name), None)


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[Pair]:
    """Pair the records of two files by benchmark and name.

    Raises:
        ConfigError: two records of a file have one name, or the files have no name in common.
    """
    old, new = _by_title(before, "first"), _by_title(after, "second")
    if not set(old) & set(new):
        raise ConfigError("bench compare: the files have no benchmark of one name in common")
    return [_pair(title, old.get(title), new.get(title)) for title in {**old, **new}]


def regressions(pairs: Sequence[Pair], value: str, allowed: float) -> list[str]:
    """Kernels whose value got worse by more than a share, beyond the spread; and such that are no longer right.

    Args:
        pairs: what `compare` found.
        value: name of the value that counts.
        allowed: e.g. 0.05.

    Returns:
        One sentence for each.
    """
    found = []
    for pair in pairs:
        if pair.after is None or pair.before is None or pair.after.benchmark != "kernel":
            continue
        if not pair.after.values and pair.before.values:
            found.append(f"{pair.title}: {'; '.join(pair.after.notes) or 'nothing was measured'}")
        change = pair.change(value)
        if change and change.is_worse and not change.within_spread and abs(change.ratio - 1) > allowed:
            found.append(f"{pair.title}: {value} {change.ratio - 1:+.1%}, more than {allowed:.1%} and than the spread")
    return found


def _by_title(records: Sequence[Record], which: str) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for record in records:
        title = f"{record.benchmark} {record.name}"
        if found.setdefault(title, record) is not record:
            raise ConfigError(f"bench compare: the {which} file has two records of {title}")
    return found


def _pair(title: str, before: Record | None, after: Record | None) -> Pair:
    if before is None or after is None:
        return Pair(title, before, after)
    if found := tuple(differences(before, after)):
        return Pair(title, before, after, found)
    common = [name for name in before.values if name in after.values]
    changes = [Change(name, before.values[name], after.values[name]) for name in common if before.values[name].median]
    return Pair(title, before, after, changes=tuple(changes))


def differences(before: Record, after: Record) -> Iterator[str]:
    """Why two records cannot be compared: hardware, problem, precision and units, by name."""
    for name in MACHINE:
        yield from _unequal(f"machine.{name}", getattr(before.machine, name), getattr(after.machine, name))
    yield from _unequal("problem", before.problem, after.problem)
    yield from _unequal("precision", before.precision, after.precision)
    for name in before.values:
        if name in after.values:
            yield from _unequal(f"unit of {name}", before.values[name].unit, after.values[name].unit)


def _unequal(path: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from _unequal(f"{path}.{key}", before.get(key), after.get(key))
    elif before != after:
        yield f"{path} is {_shown(before)} in the first and {_shown(after)} in the second"


def _shown(value: Any) -> str:
    return "absent" if value is None else repr(value)
