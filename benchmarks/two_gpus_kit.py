"""A job of `two_gpus.py`: the conformance kit for one operator, first what it asks of operators between processes.

    python benchmarks/two_gpus_kit.py comm:collective --device cpu --out FILE

On a machine with two GPUs each process has its own. The record is written every second, so that a limit of time leaves
what was checked; everything between processes comes first, and of MoE operators nothing else is asked.
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
        print(f"{outcome.name} {outcome.status} {seconds:.1f} s {outcome.reason[:300]}", flush=True)

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


def main() -> int:
    """Check one operator; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operator")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--examples", type=int, default=10, help="drawn for a relation, behind its edge cases")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    registry = load_registry()
    (operator,) = find_operators(registry, [arguments.operator])
    profile = replace(PROFILES["quick"], examples=arguments.examples, shrink=False)
    comm = operator.declaration.family == "comm"
    asked = [(family, entry) for family, entry in entries(operator, registry) if _wanted(entry, comm)]
    asked.sort(key=lambda entry: BETWEEN.index(entry[1].name) if entry[1].name in BETWEEN else len(BETWEEN))
    record = Record(operator.title, arguments.examples, len(asked), arguments.out)
    for family, entry in asked:
        subject = Subject(operator, registry, family, arguments.device)
        record.begin(entry.name, subject)
        outcome = check_one(subject, entry, profile, seed=0)
        record.end(outcome)
    return int(FAILED in record.statuses())


if __name__ == "__main__":
    sys.exit(main())
