"""The caches under random use equal a recomputation from scratch, and what is wrong with them is noticed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import measured
import pytest
from cache_faults import FAULTS, IN_HALO_ONLY, Fault
from cache_machine import SETTINGS, CacheMachine
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

CHECKS = list(HealthCheck)
THOROUGH = settings(max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS)
QUICK = settings(THOROUGH, max_examples=60, stateful_step_count=20, derandomize=True)
FAULTY = settings(
    QUICK, max_examples=200, phases=[Phase.generate], verbosity=Verbosity.quiet, report_multiple_bugs=False
)
TOLD = "^(logits|tree|pages|rings|requests): |^DID NOT RAISE .*RequestError"
"""What the machine says about a fault, in its own words."""
ENOUGH = ("rollbacks", "forks: forks", "prefixes: hits", "prefixes: evicted_pages", "aborts")
"""Each must happen in every third machine or more often."""


def run(profile: settings, **options: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    run_state_machine_as_test(partial(CacheMachine, seen, **options), settings=profile)
    return seen


def check(profile: settings) -> None:
    seen = run(profile)
    measured.lines.append("cache machine: " + ", ".join(f"{number} {name}" for name, number in seen.items()))
    assert seen["machines"] >= profile.max_examples
    assert all(3 * seen[what] >= profile.max_examples for what in ENOUGH), seen
    assert seen["rows excluded"] <= 0.01 * seen["rows"]
    assert seen["pages excluded"] <= 0.01 * seen["pages compared"]


def test_the_caches_under_random_use_equal_a_recomputation() -> None:
    check(QUICK)


@pytest.mark.thorough
def test_the_caches_under_random_use_equal_a_recomputation_thorough() -> None:
    check(THOROUGH)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_machine_notices(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    choices = [setting for setting in SETTINGS if setting.replay == "halo" or fault not in IN_HALO_ONLY]
    with pytest.raises((AssertionError, pytest.fail.Exception), match=TOLD) as error:
        run(FAULTY, choices=choices, fresh=True)
    measured.lines.append(f"cache machine, {fault.__name__}: {str(error.value).splitlines()[0]}")
