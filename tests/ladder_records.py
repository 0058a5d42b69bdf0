"""Records of a ladder that nobody ran, for tests of its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minideepinfer.measure.record import Machine, Measurement, Record, Software
from minideepinfer.operators.context import Stage

NAIVE = {
    Stage.ATTENTION: 6800.0,
    Stage.GROUPED_GEMM: 2050.0,
    Stage.FP4_DECODING: 1000.0,
    Stage.INDEXER: 1700.0,
    Stage.MIXING: 430.0,
    Stage.PROJECTIONS: 150.0,
    Stage.GATE: 25.0,
    Stage.SHARED_EXPERT: 17.0,
    Stage.COMBINE: 11.0,
    Stage.ENGRAM: 9.0,
    Stage.HEAD: 1.0,
}


def measurement(median: float, unit: Any = "ms") -> Measurement:
    """A median with a spread of two percent."""
    return Measurement(median=median, low=0.99 * median, high=1.01 * median, repeats=5, unit=unit)


def rung(
    name: str,
    stages: Mapping[str, float],
    builds_on: str | None = None,
    kernels: Mapping[str, tuple[float, float]] | None = None,
    errors: Mapping[str, float] | None = None,
    inside: Mapping[str, str] | None = None,
    layers: int = 40,
    plan: Mapping[str, str] | None = None,
) -> Record:
    """A rung whose step is the sum of its stages."""
    step = sum(stages.values())
    values = {"step": measurement(step), "tokens_per_second": measurement(4096e3 / step, "tokens/s")}
    for operator, (before, after) in (kernels or {}).items():
        values |= {f"kernel {operator}": measurement(after), f"kernel before {operator}": measurement(before)}
    operators = [
        {"family": family, "layer": None, "phase": "prefill", "operator": operator, "options": {}}
        | {"distribution": "mini-deepinfer", "version": "0.1.0", "reason": "explicit", "rejected": {}}
        for family, operator in (plan or {"attention": "naive"}).items()
    ]
    return Record(
        benchmark="ladder",
        name=name,
        headline="one rank of 4, no network; bfloat16",
        machine=Machine(device="NVIDIA H200", driver="580.1", power_limit_watts=700.0, sm_clock_mhz=(1980, 1500)),
        software=Software(commit="0123456789abcdef", dirty=False, versions={"torch": "2.11.0", "triton": "3.6.0"}),
        problem={"new_tokens": 4096, "layers": layers, "builds_on": builds_on, "says": f"what {name} says"},
        precision={"dtype": "bfloat16"},
        plan={"operators": operators},
        seed=0,
        values=values,
        stages={str(stage): milliseconds for stage, milliseconds in stages.items()},
        inside=dict(inside or {}),
        errors=dict(errors or {}),
    )


def ladder() -> list[Record]:
    """Seven rungs, from one that takes seconds to one that takes a quarter of one."""
    at_a = NAIVE | {Stage.ATTENTION: 27.0, Stage.KEY_GATHER: 1.2}
    at_b = at_a | {Stage.INDEXER: 35.0}
    at_c = {k: v for k, v in at_b.items() if k != Stage.FP4_DECODING} | {Stage.GROUPED_GEMM: 135.0}
    at_gate = at_c | {Stage.GATE: 1.5}
    at_mhc = at_gate | {Stage.MIXING: 13.0}
    bounded = {stage: milliseconds * 0.55 for stage, milliseconds in at_mhc.items()}
    decoding = {str(Stage.FP4_DECODING): str(Stage.GROUPED_GEMM)}
    zero, layer = {"block": 0.0, "attention": 0.0, "experts": 0.0}, "layers.3."
    a = {"block": 3.1e-3, "attention": 2.2e-3, "experts": 0.0, f"{layer}attention": 2.2e-3, f"{layer}block": 3.1e-3}
    return [
        rung("all naive", NAIVE, errors=zero),
        rung("+A", at_a, "all naive", {"attention:fused": (178.0, 0.71)}, a, plan={"attention": "fused"}),
        rung("+B1", at_b, "+A", {"indexer:fused": (200.0, 3.4)}, a | {"selection": 0.002}),
        rung("+C1", at_c, "+B1", {"moe:fused": (75.0, 3.2)}, a | {"experts": 4e-3}, decoding),
        rung("+gate", at_gate, "+C1", {"moe:fused": (3.9, 3.2)}, a | {"experts": 4e-3, "routing": 1e-4}, decoding),
        rung("+mHC", at_mhc, "+gate", {"residual:fused": (5.6, 0.16)}, a | {"mixing": 2e-3}, decoding),
        rung("+bounded replay", bounded, "+mHC", {}, a | {"mixing": 2e-3, "attention": 0.4}, decoding),
    ]
