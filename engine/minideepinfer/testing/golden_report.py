"""What a verification found: as data, and as tables of layer x module."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minideepinfer.testing.golden_measures import Cell

_MODULES = {
    "engram": "engram",
    "mhc": "mhc",
    "attention": "attn",
    "window kv": "window",
    "global kv": "global",
    "index keys": "keys",
    "selection": "select",
    "candidates": "cand",
    "routing": "route",
    "experts": "moe",
}
"""Columns of the table of modules, and what their heads say."""

_WHOLE_RUNS = ("prefill", "prefill+decode", "bounded")
_MEASURES = {"median token": "median", "worst token": "worst", "whole": "whole"}
_CHOICES = ("selection", "candidates", "routing")
_LAYOUT: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}


@dataclass
class Report:
    """Every comparison of a verification.

    Attributes:
        path: the golden set.
        cells: the comparisons.
        skipped: what was not run, and why.
        plans: operators that served each variant, in words.
        held: names of tensors by file that was read.
        compared: those of them that were compared.
    """

    path: str
    cells: list[Cell] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    plans: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, set[str]] = field(default_factory=dict)
    compared: dict[str, set[str]] = field(default_factory=dict)

    @property
    def failures(self) -> list[Cell]:
        """Comparisons past their bound."""
        return [cell for cell in self.cells if cell.failed]

    @property
    def num_bounded(self) -> int:
        """Comparisons that have a bound."""
        return sum(cell.bound is not None for cell in self.cells)

    @property
    def ok(self) -> bool:
        """Something was held to a bound, and nothing went past one."""
        return self.num_bounded > 0 and not self.failures

    def not_compared(self) -> dict[str, int]:
        """Tensors that were read but not compared: how many by name, `*` standing for the layer.

        Margins, inputs of a module and outputs of parts that the engine does not name are among them.
        """
        names = (name for file, held in self.held.items() for name in held - self.compared[file])
        patterns = (re.sub(r"^deep\..*|(?<=\.)\d+(?=\.)", _star, name) for name in names)
        return dict(sorted(Counter(patterns).items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "ok": self.ok,
            "comparisons": len(self.cells),
            "bounded": self.num_bounded,
            "failed": len(self.failures),
            "plans": self.plans,
            "skipped": self.skipped,
            "not_compared": self.not_compared(),
            "cells": [_cell_data(cell) for cell in self.cells],
        }

    def print(self, console: Console) -> None:
        """Print tables, flipped rows, what was left out, and every failure."""
        for line in dict.fromkeys(line for lines in self.plans.values() for line in lines):
            console.print(line, style="dim", highlight=False, soft_wrap=True)
        for variant in dict.fromkeys(cell.variant for cell in self.cells):
            self._print_modules(console, variant)
        self._print_whole_runs(console)
        for cell in self.cells:
            if cell.rows and cell.bound is not None and not cell.failed:
                console.print(
                    f"{_where(cell)}: rows {_listed(cell.rows)} of {cell.num_rows} differ",
                    highlight=False,
                    soft_wrap=True,
                )
        for what, reason in self.skipped.items():
            console.print(f"skipped {what}: {reason}", highlight=False, soft_wrap=True)
        if left_out := self.not_compared():
            names = f"{sum(left_out.values())} tensors ({', '.join(left_out)})"
            console.print(f"read, not compared: {names}", highlight=False, soft_wrap=True)
        for cell in self.failures:
            console.print(
                f"FAILED {_where(cell)}: {cell.measure} {cell.value:.2e}, bound {cell.bound}"
                + (f", rows {_listed(cell.rows)}" if cell.rows else ""),
                style="bold red",
                highlight=False,
                soft_wrap=True,
            )
        console.print(
            f"{self.path}: {'verified' if self.ok else 'NOT verified'}; {len(self.cells)} comparisons, "
            f"{self.num_bounded} with a bound, {len(self.failures)} past it",
            style="green" if self.ok else "bold red",
            highlight=False,
            soft_wrap=True,
        )

    def _print_modules(self, console: Console, variant: str) -> None:
        """Layer x module, the worst over all sequences."""
        cells = [cell for cell in self.cells if cell.part == "modules" and cell.variant == variant]
        inside = [cell for cell in cells if cell.module in _MODULES]
        modules = [module for module in _MODULES if any(cell.module == module for cell in inside)]
        if modules:
            table = Table("layer", title=f"{variant}: modules on golden inputs, worst over sequences", **_LAYOUT)
            for module in modules:
                mine = [cell for cell in inside if cell.module == module]
                table.add_column(f"{_MODULES[module]}\n{_bound(mine)}", justify="right")
            for layer in sorted({cell.layer for cell in inside if cell.layer is not None}):
                row = [[c for c in inside if c.layer == layer and c.module == module] for module in modules]
                table.add_row(str(layer), *map(_worst, row))
            console.print(table)
        outside = [cell for cell in cells if cell.module not in _MODULES]
        for module in dict.fromkeys(cell.module for cell in outside):
            mine = [cell for cell in outside if cell.module == module]
            console.print(Text(f"{variant} {module} (bound {_bound(mine)}): ") + _worst(mine))

    def _print_whole_runs(self, console: Console) -> None:
        cells = [cell for cell in self.cells if cell.part in _WHOLE_RUNS]
        if not cells:
            return
        table = Table(
            "variant",
            "sequence",
            "run",
            title="whole runs: logits (median token, worst, all), rows that choose otherwise",
            **_LAYOUT,
        )
        for title in (*_MEASURES.values(), *(_MODULES[module] for module in _CHOICES)):
            table.add_column(title, justify="right")
        for key in dict.fromkeys((cell.variant, cell.sequence, cell.part) for cell in cells):
            mine = [cell for cell in cells if (cell.variant, cell.sequence, cell.part) == key]
            logits = [[c for c in mine if c.measure == measure] for measure in _MEASURES]
            choices = [[c for c in mine if c.module == module and c.measure == "rows"] for module in _CHOICES]
            table.add_row(*key, *map(_worst, logits), *map(_worst, choices))
        console.print(table)


def _star(match: re.Match[str]) -> str:
    return "*" if match[0].isdigit() else "deep.*"


def _cell_data(cell: Cell) -> dict[str, Any]:
    value = cell.value if math.isfinite(cell.value) else None  # JSON has no other numbers
    return {**asdict(cell), "value": value, "failed": cell.failed}


def _bound(cells: list[Cell]) -> str:
    bounds = {cell.bound for cell in cells if cell.bound is not None}
    return _short(max(bounds)) if bounds else "none"


def _worst(cells: list[Cell]) -> Text:
    if not cells:
        return Text("")
    cell = max(cells, key=lambda cell: (cell.failed, cell.value))
    return Text(_short(cell.value), style="bold red" if cell.failed else "")


def _short(value: float) -> str:
    """Two digits, in at most six characters."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.1e}") if 0 < value < 1e-3 else f"{value:.2g}"


def _where(cell: Cell) -> str:
    return f"{cell.variant} {cell.sequence} {cell.part}: {cell.module}, {cell.tensor}"


def _listed(rows: tuple[int, ...], most: int = 12) -> str:
    shown = ", ".join(map(str, rows[:most]))
    return f"{shown}, ... ({len(rows)})" if len(rows) > most else shown
