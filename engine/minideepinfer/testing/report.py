"""Reports of checks, as text and as data."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from minideepinfer.operators import OwnTolerance
from minideepinfer.testing.checking import FAILED, PASSED, SKIPPED, Report
from minideepinfer.testing.variants import title


def lines(report: Report) -> list[str]:
    """One operator, for people."""
    verdict = "passed" if report.passed else "FAILED"
    worst = f"worst error {report.worst:.2g} of its bound"
    text = [
        f"{report.title}: {verdict}; {report.calls} calls, {report.refused.total()} refused, {worst}, "
        f"{report.seconds:.1f} s",
        *_held(report),
        *(_tolerance(row) for row in report.tolerances),
    ]
    if report.drawn:
        share = report.declined / report.drawn
        text.append(f"  drawn: {report.drawn} problems, of which it refuses {report.declined} ({share:.1%})")
    if report.forms:
        text.append("  form: " + ", ".join(f"{form} ({count} calls)" for form, count in report.forms.most_common()))
    text += [f"  refused {count} times: {reason}" for reason, count in report.refused.most_common(5)]
    for outcome in report.outcomes:
        name = outcome.name + (f" with {outcome.options}" if outcome.options else "")
        if outcome.status == SKIPPED:
            text.append(f"  skipped {name}: {outcome.reason}")
        elif outcome.status == FAILED:
            text.append(f"  FAILED {name}{' (exception)' if outcome.crash else ''}: {outcome.reason}")
            if outcome.code:
                text += ["  smallest failing input:", textwrap.indent(outcome.code, "    ")]
        elif outcome.note:
            text.append(f"  {name}: {outcome.note}")
    return text


def _held(report: Report) -> list[str]:
    """What holds, a line for each set of options."""
    held: dict[str, list[str]] = {outcome.options: [] for outcome in report.outcomes}
    for outcome in report.outcomes:
        if outcome.status == PASSED:
            held[outcome.options].append(outcome.name)
    return [
        f"  holds{f' with {options}' if options else ''}: {', '.join(names) or 'nothing'}"
        for options, names in held.items()
    ]


def _tolerance(row: OwnTolerance) -> str:
    where = f"{row.dtype}{f' with {title(row.options)}' if row.options else ''}"
    kind = "loosened" if row.factor > 1 else "tightened"
    return f"  {kind} for {where}: {row.factor:g} times the bound{f', because {row.reason}' if row.reason else ''}"


def data(report: Report) -> dict[str, Any]:
    """One operator, as JSON."""
    return {
        "operator": report.title,
        "passed": report.passed,
        "calls": report.calls,
        "refused": dict(report.refused),
        "drawn": report.drawn,
        "declined": report.declined,
        "worst": report.worst,
        "forms": dict(report.forms),
        "tolerances": [asdict(row) for row in report.tolerances],
        "seconds": round(report.seconds, 2),
        "outcomes": [asdict(outcome) for outcome in report.outcomes],
    }
