"""An operator's own rows of the tolerance table, and checks at options other than the defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from typing import Any, Literal

import pytest
import torch
from fake_plugins import declaration
from minideepinfer.errors import OperatorError
from minideepinfer.operators import (
    OperatorDeclaration,
    OperatorOptions,
    OperatorRegistry,
    OwnTolerance,
    RegisteredOperator,
    load_registry,
)
from minideepinfer.testing import report
from minideepinfer.testing.checking import check_one, check_operator
from minideepinfer.testing.replay import replay
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tolerances import conformance
from minideepinfer.testing.variants import own_tolerance, title, variants
from minideepinfer_attention.naive import NaiveAttention
from mutants import indexer, moe
from pydantic import model_validator

SMALL = replace(PROFILES["quick"], examples=3, few_examples=3, shrink=False)
MUTANTS = {"indexer": indexer.NAIVE, "moe": moe.NAIVE}
WHY = "its output is rounded to bfloat16: 2^-9 of V, where the family's bound has a few 2^-24"


class Shape(Enum):
    TALL = "tall"
    WIDE = "wide"


class Options(OperatorOptions):
    output: Literal["exact", "rounded", "wrong"] = "exact"
    shape: Shape = Shape.TALL
    split: bool | None = None
    width: int = 4

    @model_validator(mode="after")
    def _together(self) -> Options:
        if self.split:
            raise ValueError("split needs a machine with two halves")
        return self


class _Changed(NaiveAttention):
    """`naive` in everything but the last step."""

    def __init__(self, context: Any, output: str) -> None:
        super().__init__(context.problem, context.clock)
        self.output = output

    def run(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        heads = super().run(*arguments, **keywords)
        return {"exact": heads, "rounded": heads.bfloat16().to(heads.dtype), "wrong": heads * 1.5}[self.output]


def build(context: Any) -> _Changed:
    if context.options.shape is Shape.WIDE and context.problem.compress_ratio == 2:
        raise OperatorError("has ratio 2, needs 0 or 1 where shape is wide")
    return _Changed(context, context.options.output)


def build_rounded(context: Any) -> _Changed:
    return _Changed(context, "rounded")


@pytest.fixture(scope="module")
def registry() -> OperatorRegistry:
    return load_registry()


def operator(**changes: Any) -> RegisteredOperator:
    declared: OperatorDeclaration = declaration("changed", **{"build": f"{__name__}:build", **changes})
    return RegisteredOperator(declared, "acme", "1", "ops")


def test_a_loosened_row_is_what_lets_an_operator_pass_and_is_printed(registry: OperatorRegistry) -> None:
    rounded = f"{__name__}:build_rounded"
    loosened = OwnTolerance("float32", 2.0**15, WHY)
    strict = check_operator(operator(build=rounded), registry, SMALL)
    assert "matches-reference" in {failure.name for failure in strict.failures}
    passed = check_operator(operator(build=rounded, tolerances=(loosened,)), registry, SMALL)
    assert passed.passed, passed.failures
    assert 0.001 < passed.worst <= 1
    assert f"  loosened for float32: 32768 times the bound, because {WHY}" in report.lines(passed)
    assert report.data(passed)["tolerances"] == [{"dtype": "float32", "factor": 32768.0, "reason": WHY, "options": {}}]
    json.dumps(report.data(passed))


def test_a_tightened_row_is_one_that_an_operator_can_break(registry: OperatorRegistry) -> None:
    naive = registry.get("attention", "naive")

    def with_row(factor: float) -> RegisteredOperator:
        return replace(naive, declaration=replace(naive.declaration, tolerances=(OwnTolerance("bfloat16", factor),)))

    held = check_operator(with_row(0.5), registry, SMALL)
    assert held.passed
    assert "  tightened for bfloat16: 0.5 times the bound" in report.lines(held)
    broken = check_operator(with_row(0.01), registry, SMALL)
    assert {"matches-reference", "A1"} <= {failure.name for failure in broken.failures}


@pytest.mark.parametrize(
    ("family", "name", "factor"), [("indexer", "scores-in-bfloat16", 2.0**17), ("moe", "sum-in-bfloat16", 2.0**16)]
)
def test_rows_count_in_other_families(registry: OperatorRegistry, family: str, name: str, factor: float) -> None:
    (mutant,) = [each for each in MUTANTS[family] if each.name == name]
    inexact = mutant.build(registry.get(family, "naive").declaration)
    rows = tuple(OwnTolerance(dtype, factor, "an example") for dtype in ("float32", "bfloat16"))
    loosened = replace(inexact, declaration=replace(inexact.declaration, tolerances=rows))
    known = conformance(family)
    for operator, expected in ((inexact, "failed"), (loosened, "passed")):
        subject = Subject(operator, registry, known)
        assert check_one(subject, known.relation("matches-reference"), SMALL, 0).status == expected


def test_every_value_of_an_enumerable_option_is_checked(registry: OperatorRegistry) -> None:
    changed = operator(options=Options, tolerances=(OwnTolerance("float32", 2.0**15, WHY, {"output": "rounded"}),))
    expected = ["", "output=rounded", "output=wrong", "shape=wide", "split=False", "split=True"]
    assert [title(each) for each in variants(changed)] == expected
    found = check_operator(changed, registry, SMALL)
    names = {outcome.name for outcome in found.outcomes}
    by_options = {each: {o.name: o for o in found.outcomes if o.options == each} for each in expected}
    assert all(set(outcomes) == names for outcomes in by_options.values())

    def statuses(options: str) -> set[str]:
        return {outcome.status for outcome in by_options[options].values()}

    assert statuses("") == statuses("output=rounded") == statuses("split=False") == {"passed"}
    assert {failure.options for failure in found.failures} == {"output=wrong"}
    failure = by_options["output=wrong"]["matches-reference"]
    assert "options={'output': 'wrong'})" in failure.code
    # What the model refuses is skipped, and what `build` refuses is, call by call; both are counted with the reason.
    assert statuses("split=True") == {"skipped"}
    assert "split needs a machine with two halves" in by_options["split=True"]["A1"].reason
    assert statuses("shape=wide") == {"passed"}
    assert found.refused["has ratio 2, needs 0 or 1 where shape is wide"] > 10
    text = "\n".join(report.lines(found))
    assert "  holds with shape=wide: matches-reference" in text
    assert "FAILED matches-reference with output=wrong: heads at" in text
    assert "loosened for float32 with output=rounded" in text


def test_the_first_row_that_matches_stands() -> None:
    special = OwnTolerance("float32", 3.0, "reason", {"shape": "wide"})
    general = OwnTolerance("float32", 2.0, "reason")
    declared = operator(options=Options, tolerances=(special, general)).declaration
    assert own_tolerance(declared, "float32", Options(shape=Shape.WIDE)) is special
    assert own_tolerance(declared, "float32", Options()) is general
    assert own_tolerance(declared, "bfloat16", Options()) is None


def test_options_without_defaults_are_a_message(registry: OperatorRegistry) -> None:
    class Needy(OperatorOptions):
        tile: int

    with pytest.raises(OperatorError, match=r"attention:changed .*options at their defaults: tile"):
        check_operator(operator(options=Needy), registry, SMALL)


def test_replay_takes_options() -> None:
    replay("comm:single", "C1", options={})
    with pytest.raises(OperatorError, match=r"comm:single .*options tile=4: tile"):
        replay("comm:single", "C1", options={"tile": 4})
