"""The kit over every operator of this distribution that runs on a CPU, natively or interpreted, and its time."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from measured import within_budget
from minideepinfer.operators import FAMILIES, load_registry


def test_quick_over_every_operator_that_runs_on_a_cpu() -> None:
    own = [operator for family in FAMILIES for operator in load_registry().operators(family)]
    served = [o for o in own if o.distribution == "mini-deepinfer" and o.declaration.support.serves("cpu")]
    wanted = [f"{operator.declaration.family}:{operator.name}" for operator in served]
    assert len(wanted) >= len(FAMILIES)
    start = time.perf_counter()
    command = [sys.executable, "-m", "minideepinfer", "ops", "check", *wanted, "--jobs", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout)["operators"]
    assert [report["operator"].partition(" ")[0] for report in reports] == wanted
    assert all(report["calls"] > 100 for report in reports)
    for operator, report in zip(served, reports, strict=True):
        if "cpu" not in operator.declaration.support.devices:
            assert set(report["forms"]) == {"triton, interpreted"}
    within_budget("ops check, profile quick, every operator that runs on a CPU", seconds)
