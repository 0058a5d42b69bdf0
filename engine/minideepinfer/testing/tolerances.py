"""The tolerance table of `docs/conformance.md`: `python -m minideepinfer.testing.tolerances` prints it."""

from __future__ import annotations

import importlib

from minideepinfer.operators import FAMILIES
from minideepinfer.testing.contract import Conformance


def conformance(family: str) -> Conformance:
    """What the kit knows about a family."""
    module = importlib.import_module(f"minideepinfer.testing.families.{family}")
    found: Conformance = module.FAMILY
    return found


def tolerance_table() -> str:
    """All rows, as a Markdown table."""
    rows = ["| family | dtype | compared | bound | derivation |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        rows += [
            f"| {family} | {row.dtype} | {row.compares} | {row.bound} | {row.derivation} |"
            for row in conformance(family).tolerances
        ]
    return "\n".join(rows) + "\n"


def relation_tables() -> str:
    """Per family, what is checked and the fault behind it, as Markdown."""
    text = ""
    for family in FAMILIES:
        known = conformance(family)
        text += f"### {family}\n\n| relation | asked | the fault behind it |\n|---|---|---|\n"
        for relation in known.relations:
            asked = f"if declared {relation.needs.replace('_', '-')}" if relation.needs else "always"
            text += f"| `{relation.name}` | {asked} | {relation.fault} |\n"
        for case in known.cases:
            text += f"| case `{case.name}` | always | {case.fault} |\n"
        text += "\n"
    return text
