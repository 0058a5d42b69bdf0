"""The tables of `docs/conformance.md`, which `python -m minideepinfer.testing.tolerances PAGE` rewrites in place."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

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
        for row in conformance(family).tolerances:
            cells = (family, row.dtype, row.compares, row.bound, row.derivation)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n\n"


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
            asked = "on cuda, or with thorough" if case.heavy else "always"
            text += f"| case `{case.name}` | {asked} | {case.fault} |\n"
        text += "\n"
    return text


def with_tables(page: str) -> str:
    """A page with the generated tables between its markers."""
    for name, table in (("relations", relation_tables()), ("tolerances", tolerance_table())):
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda match, text=table: f"{match[1]}\n{text}{match[2]}", page, flags=re.S)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_tables(target.read_text(encoding="utf-8")), encoding="utf-8")
