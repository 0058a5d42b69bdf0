"""Built-in operators serve every model that is known here, and refuse little of what the kit draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from minideepinfer.config import ModelConfig
from minideepinfer.operators import FAMILIES, OperatorRegistry, Phase, RegisteredOperator, Support, load_registry
from minideepinfer.testing.checking import check_operator
from minideepinfer.testing.coverage import is_built_in, packaged_configs, uncovered
from minideepinfer.testing.recipes.indexer import IndexerRecipe
from minideepinfer.testing.report import data, lines
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tolerances import conformance

DATA = Path(__file__).parent / "data"
REGISTRY: OperatorRegistry = load_registry()
BUILT_IN = [o for family in FAMILIES for o in REGISTRY.operators(family) if is_built_in(o)]
CONFIGS = [
    *(ModelConfig.from_file(path.parent) for path in sorted(DATA.glob("golden/*/config.json"))),
    *(ModelConfig.from_file(DATA / name) for name in ("config.full.json", "config.tiny.json")),
    *packaged_configs(),
]
HOPPER = (9, 0)
SMALL = replace(PROFILES["quick"], examples=10, shrink=False)


@pytest.mark.parametrize("operator", BUILT_IN, ids=lambda operator: operator.title)
def test_a_built_in_operator_serves_every_known_model(operator: RegisteredOperator) -> None:
    assert len(CONFIGS) == 6
    support = operator.declaration.support
    if support.serves("cpu"):
        assert uncovered(operator, CONFIGS) == []
    if support.serves("cuda"):
        assert uncovered(operator, CONFIGS, "cuda", HOPPER) == []


def changed(distribution: str = "mini-deepinfer", **changes: Any) -> RegisteredOperator:
    naive = REGISTRY.get("attention", "naive").declaration
    return RegisteredOperator(replace(naive, name="picky", **changes), distribution, "1", "ops")


def needs_rope_8(problem: Any) -> list[str]:
    return [] if problem.rope_dim == 8 or problem.head_dim >= 64 else [f"has rope_dim {problem.rope_dim}, needs 8"]


def test_a_built_in_operator_that_refuses_too_much_fails() -> None:
    report = check_operator(changed(refuses=needs_rope_8), REGISTRY, SMALL)
    (failure,) = report.failures
    assert failure.name == "refuses-few"
    assert failure.reason == (f"refuses {report.declined} of {report.drawn} drawn problems; at most 20% may be")
    assert 0.3 < report.declined / report.drawn < 0.8
    (line,) = [line for line in lines(report) if line.startswith("  drawn: ")]
    assert f"of which it refuses {report.declined} (" in line and data(report)["declined"] == report.declined


def test_a_strangers_operator_may_refuse_as_much_as_it_likes() -> None:
    report = check_operator(changed("acme-ops", refuses=needs_rope_8), REGISTRY, SMALL)
    assert report.passed and report.declined


def test_what_an_option_refuses_does_not_count() -> None:
    subject = Subject(REGISTRY.get("indexer", "fused"), REGISTRY, conformance("indexer"), "cpu", {"arithmetic": "fp8"})
    case = IndexerRecipe().build()
    assert subject.obstacles(case)
    subject.count_drawn(case)
    assert not subject.tally.drawn and not subject.tally.declined


def test_a_phase_that_is_not_declared_does_not_count() -> None:
    report = check_operator(changed(support=Support(phases=(Phase.DECODE,))), REGISTRY, SMALL)
    assert not report.declined and {"covers-models", "refuses-few"} <= set(report.held)


def test_a_built_in_operator_that_refuses_a_packaged_model_fails() -> None:
    def refuses(problem: Any) -> list[str]:
        return ["has ratio 2 and a wide latent"] if problem.compress_ratio == 2 and problem.head_dim == 64 else []

    report = check_operator(changed(refuses=refuses), REGISTRY, SMALL)
    (failure,) = report.failures
    assert failure.name == "covers-models"
    assert "e.g. layer 2, prefill, float32: has ratio 2 and a wide latent" in failure.reason
    assert len(uncovered(changed(refuses=refuses), CONFIGS)) > 10
