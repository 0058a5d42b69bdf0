"""Results of the kernel benchmark as a table: rich in a terminal, aligned text elsewhere."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence

from minideepinfer.measure.kernels.bench import Result
from minideepinfer.measure.kernels.records import baseline, rates_reached, ratio

COLUMNS = (
    "problem",
    "operator",
    "ms",
    "20 to 80 %",
    "floor",
    "x floor",
    "TFLOP/s",
    "GB/s",
    "x naive",
    "error / bound",
)
NAMES = 2
"""Columns with words."""


def table_rows(results: Sequence[Result], against: str = "") -> list[list[str]]:
    """The cells of one problem's results; operators that do not serve it have none."""
    naive, other = baseline(results), baseline(results, against) if against else None
    rows = []
    for result in results:
        if result.obstacles:
            continue
        form = f" ({result.form})" if result.form else ""
        cells = [result.problem, result.operator.title.partition(":")[2] + form]
        if result.time is None or result.cost is None:
            rows.append([*cells, "FAILED", *[""] * (len(COLUMNS) - 3 + bool(against))])
            continue
        time, reached = result.time, rates_reached(result.cost, result.time)
        cells += [_short(time.median), f"{_short(time.low)} to {_short(time.high)}"]
        cells += [_short(result.floor), f"{time.median / result.floor:.3g}" if result.floor else ""]
        cells += [_short(reached[name].median) for name in ("tflops", "gb_s")]
        cells += [f"{1 / ratio(time, naive).median:.3g}" if naive else "", f"{(result.errors or {})['of_bound']:.2g}"]
        if against:
            cells.append(f"{1 / ratio(time, other).median:.3g}" if other else "")
        rows.append(cells)
    return rows


def print_family(family: str, problems: Sequence[Sequence[Result]], seconds: float, against: str = "") -> None:
    """All problems of a family: their table, what failed, and who does not serve what.

    Args:
        family: its name.
        problems: the results of each problem.
        seconds: that everything took.
        against: title of an operator that the others are also compared with; empty = none.
    """
    results = [result for problem in problems for result in problem]
    if rows := [row for problem in problems for row in table_rows(problem, against)]:
        _print(f"{family} ({seconds:.1f} s)", [*COLUMNS, *([f"x {against}"] if against else [])], rows)
    for result in results:
        if result.failure:
            print(f"  FAILED {result.operator.title} on {result.problem}: {result.failure}")
    print("".join(f"  {line}\n" for line in refusals(results)), flush=True)


def refusals(results: Sequence[Result]) -> list[str]:
    """Who was not timed, why, and on how many problems."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.obstacles:
            found[result.operator.title, "; ".join(result.obstacles)].append(result.problem)
    return [
        f"not timed: {title} on {len(problems)} {'problem' if len(problems) == 1 else 'problems'}: {reason}"
        for (title, reason), problems in found.items()
    ]


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=box.SIMPLE)
        for number, name in enumerate(columns):
            table.add_column(name, justify="left" if number < NAMES else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console = Console()
        console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)  # a narrow terminal wraps, nothing is cut
        console.print(table)
        return
    print(title)
    for row in (columns, *rows):
        cells = [
            cell.ljust(width) if column < NAMES else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def _short(number: float) -> str:
    """Four significant digits and all digits in front of the point, without an exponent."""
    if not number:
        return "0"
    return f"{number:.{max(0, 3 - math.floor(math.log10(abs(number))))}f}"
