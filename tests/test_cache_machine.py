"""The caches under random use equal a recomputation from scratch, and what is wrong with them is noticed."""

from __future__ import annotations

from collections import Counter
from functools import partial

import measured
import pytest
from cache_machine import CacheMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

CHECKS = list(HealthCheck)
QUICK = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=CHECKS)
THOROUGH = settings(max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS)


def run(profile: settings) -> Counter[str]:
    seen: Counter[str] = Counter()
    run_state_machine_as_test(partial(CacheMachine, seen), settings=profile)
    return seen


def check(profile: settings) -> None:
    seen = run(profile)
    print(dict(seen))
    measured.lines.append("cache machine: " + ", ".join(f"{number} {name}" for name, number in seen.items()))
    assert seen["machines"] >= profile.max_examples
    assert seen["rows excluded"] <= 0.01 * seen["rows"]
    assert seen["pages excluded"] <= 0.01 * seen["pages compared"]


def test_the_caches_under_random_use_equal_a_recomputation() -> None:
    check(QUICK)


@pytest.mark.thorough
def test_the_caches_under_random_use_equal_a_recomputation_thorough() -> None:
    check(THOROUGH)
