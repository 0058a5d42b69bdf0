"""Reports of checks, as text and as data."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from minideepinfer.testing.checking import FAILED, SKIPPED, Report


def lines(report: Report) -> list[str]:
    """One operator, for people."""
    verdict = "passed" if report.passed else "FAILED"
    worst = f"worst error {report.worst:.2g} of its bound"
    text = [
        f"{report.title}: {verdict}; {report.calls} calls, {report.refused.total()} refused, {worst}, "
        f"{report.seconds:.1f} s",
        f"  holds: {', '.join(report.held) or 'nothing'}",
    ]
    if report.drawn:
        share = report.declined / report.drawn
        text.append(f"  drawn: {report.drawn} problems, of which it refuses {report.declined} ({share:.1%})")
    if report.forms:
        text.append("  form: " + ", ".join(f"{form} ({count} calls)" for form, count in report.forms.most_common()))
    text += [f"  refused {count} times: {reason}" for reason, count in report.refused.most_common(5)]
    for outcome in report.outcomes:
        if outcome.status == SKIPPED:
            text.append(f"  skipped {outcome.name}: {outcome.reason}")
        elif outcome.status == FAILED:
            text.append(f"  FAILED {outcome.name}{' (exception)' if outcome.crash else ''}: {outcome.reason}")
            if outcome.code:
                text += ["  smallest failing input:", textwrap.indent(outcome.code, "    ")]
    return text


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
        "seconds": round(report.seconds, 2),
        "outcomes": [asdict(outcome) for outcome in report.outcomes],
    }
