"""What a test run measures, printed at its end (`conftest.py`); a budget is asserted at three times its value only."""

from __future__ import annotations

BUDGETS = {
    "mini-deepinfer ops list": 0.5,
    "mini-deepinfer ops list --json": 0.5,
    "mini-deepinfer config show": 0.5,
    "checkpoint inspect of the release, 96,085 tensors": 5.0,
    "bench kernel --preset tiny": 20.0,
    "ops check, profile quick, every operator that runs on a CPU": 360.0,
}
"""Seconds on an idle machine with two cores."""
SHARED = 3.0
"""Machines that run tests are shared."""

lines: list[str] = []
"""What was measured so far."""


def within_budget(what: str, seconds: float) -> None:
    """Note a time beside its budget; fails far above it."""
    lines.append(f"{what}: {seconds:.2f} s (budget {BUDGETS[what]:g} s)")
    assert seconds < SHARED * BUDGETS[what], lines[-1]
