"""A job of `two_gpus.py`: the conformance kit for some operators, first what it asks of them between processes.

    python benchmarks/two_gpus_kit.py comm:collective comm:all_to_all --device cpu --out DIR

On a machine with two GPUs each process has its own; the same two serve all operators. `DIR/kit-FAMILY-NAME.json` is
written every second, so that a limit of time leaves what was checked. Everything between processes comes first, of all
operators; of MoE operators nothing else is asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from minideepinfer.operators import load_registry
from minideepinfer.testing.checking import FAILED, Outcome, check_one, entries, find_operators
from minideepinfer.testing.contract import ExplicitCase, Relation
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject

BETWEEN = ("moe-and-comm", "between-processes", "C1", "M4")
"""What the kit asks of several processes."""
LARGE = ("64-bit-offsets",)
"""What takes gigabytes, and one process only; other jobs run beside this one."""


class Record:
    """What is known of an operator, written every second."""

    def __init__(self, title: str, examples: int, entries: int, file: Path) -> None:
        self._file, self._begin = file, time.monotonic()
        self._subjects: dict[str, Subject] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._facts = {"operator": title, "examples": examples, "of": entries}
        threading.Thread(target=self._repeat, daemon=True).start()

    def begin(self, name: str, subject: Subject) -> None:
        """An entry of the kit is looked at now."""
        self._subjects[name] = subject

    def end(self, outcome: Outcome) -> None:
        """It is known."""
        self._outcomes[outcome.name] = outcome
        self._write()
        seconds = time.monotonic() - self._begin
        title = self._facts["operator"]
        print(f"{title}: {outcome.name} {outcome.status} {seconds:.1f} s {outcome.reason[:300]}", flush=True)

    def statuses(self) -> set[str]:
        """All that occur."""
        return {outcome.status for outcome in self._outcomes.values()}

    def _repeat(self) -> None:
        while True:
            time.sleep(1.0)
            self._write()

    def _write(self) -> None:
        record: dict[str, Any] = {**self._facts, "seconds": time.monotonic() - self._begin, "entries": {}}
        for name, subject in list(self._subjects.items()):
            outcome, tally = self._outcomes.get(name), subject.tally
            record["entries"][name] = {
                "status": outcome.status if outcome else "cut off",
                "reason": outcome.reason[:600] if outcome else "nothing failed until then",
                "calls": tally.ran,
                "worst error / bound": tally.worst,
                "refused": dict(tally.refused),
                "forms": dict(tally.forms),
            }
        beside = self._file.with_suffix(f".{threading.get_ident()}")
        beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._file)


def _wanted(entry: Relation | ExplicitCase, comm: bool) -> bool:
    """Of MoE operators what is asked between processes."""
    return entry.name in BETWEEN or (comm and entry.name not in LARGE)


def _turn(entry: Relation | ExplicitCase) -> int:
    return BETWEEN.index(entry.name) if entry.name in BETWEEN else len(BETWEEN)


def main() -> int:
    """Check some operators; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operators", nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--examples", type=int, default=6, help="drawn for a relation, behind its edge cases")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    arguments = parser.parse_args()
    registry = load_registry()
    profile = replace(PROFILES["quick"], examples=arguments.examples, shrink=False)
    records, asked = [], []
    for operator in find_operators(registry, arguments.operators):
        name = operator.declaration.family
        wanted = [(family, each) for family, each in entries(operator, registry) if _wanted(each, name == "comm")]
        file = arguments.out / f"kit-{name}-{operator.name}.json"
        records.append(Record(operator.title, arguments.examples, len(wanted), file))
        asked += [(_turn(entry), records[-1], operator, family, entry) for family, entry in wanted]
    for _, record, operator, family, entry in sorted(asked, key=lambda each: each[0]):
        subject = Subject(operator, registry, family, arguments.device)
        record.begin(entry.name, subject)
        record.end(check_one(subject, entry, profile, seed=0))
    return int(any(FAILED in record.statuses() for record in records))


if __name__ == "__main__":
    sys.exit(main())
