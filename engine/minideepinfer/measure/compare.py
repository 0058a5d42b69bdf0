"""Two files of records side by side: what changed, beyond the spread or within it, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minideepinfer.errors import ConfigError
from minideepinfer.measure.record import Measurement, Record

SMALLER_IS_BETTER = ("ms", "bytes", "1")
NEITHER_IS_BETTER = ("rows",)
MACHINE = ("device", "driver", "power_limit_watts")
"""Facts of a machine without which times mean something else."""


WORDS = ("says", "ladder", "rungs")
"""Parts of a problem that only a reader needs."""


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
    def ratio(self) -> float | None:
        """After in units of before; None where before is none."""
        return self.after.median / self.before.median if self.before.median > 0 else None

    @property
    def has_spread(self) -> bool:
        """Whether both were repeated; of what was looked at once nobody knows how much it varies."""
        return min(self.before.repeats, self.after.repeats) > 1

    @property
    def within_spread(self) -> bool:
        """Whether the intervals from the 20th to the 80th percentile overlap."""
        return self.before.low <= self.after.high and self.after.low <= self.before.high

    @property
    def is_worse(self) -> bool:
        """Whether the median went the wrong way."""
        more, unit = self.after.median - self.before.median, self.before.unit
        return unit not in NEITHER_IS_BETTER and (more > 0 if unit in SMALLER_IS_BETTER else more < 0)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.before.median == self.after.median:
            return "the same"
        if self.within_spread:
            return "within the spread"
        words = "different" if self.before.unit in NEITHER_IS_BETTER else "worse" if self.is_worse else "better"
        return words if self.has_spread else f"{words}, measured once: spread unknown"


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


@dataclass(frozen=True)
class Gate:
    """What became of the kernels that have a value in the first file.

    Attributes:
        passed: got worse by no more than is allowed.
        failed: one sentence for each that got worse by more, beyond the spread, that is no longer right or whose value
            or record is missing in the second file.
        undecided: one sentence for each that got worse by more than is allowed, but within its spread: nobody knows.
    """

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    undecided: tuple[str, ...]


def gate(pairs: Sequence[Pair], value: str, allowed: float) -> Gate:
    """Look for kernels whose value got worse by more than a share.

    Args:
        pairs: what `compare` found; those that cannot be compared are left out.
        value: name of the value that counts; one that smaller is better of.
        allowed: e.g. 0.05.
    """
    passed: list[str] = []
    failed: list[str] = []
    undecided: list[str] = []
    for pair in pairs:
        if pair.before is None or pair.differences or pair.before.benchmark != "kernel":
            continue
        if value not in pair.before.values and not (pair.before.values and pair.after and not pair.after.values):
            continue
        change = pair.change(value)
        if change is None:
            notes = pair.after.notes if pair.after and not pair.after.values else ()
            failed.append(f"{pair.title}: {'; '.join(notes) or f'has no {value} in the second file'}")
        elif not change.is_worse or change.after.median <= (1 + allowed) * change.before.median:
            passed.append(pair.title)
        else:
            more = f"{pair.title}: {value} {change.before.median:.4g} -> {change.after.median:.4g}, more than allowed"
            if change.within_spread:
                undecided.append(f"{more} but within the spread")
            else:
                failed.append(f"{more} and than the spread" if change.has_spread else f"{more}; measured once")
    return Gate(tuple(passed), tuple(failed), tuple(undecided))


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
    changes = [Change(name, before.values[name], after.values[name]) for name in common]
    return Pair(title, before, after, changes=tuple(changes))


def differences(before: Record, after: Record) -> Iterator[str]:
    """Why two records cannot be compared: hardware, problem, precision and units, by name."""
    for name in MACHINE:
        yield from _unequal(f"machine.{name}", getattr(before.machine, name), getattr(after.machine, name))
    old, new = ({k: v for k, v in record.problem.items() if k not in WORDS} for record in (before, after))
    yield from _unequal("problem", old, new)
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
