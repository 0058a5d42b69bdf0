"""Operators whose Triton kernels can be interpreted on the CPU: when they serve, who picks them, what reports say."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from fake_plans import DECODE, PREFILL, names, plan_of, problems, registered
from fake_plugins import declaration
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig
from minideepinfer.errors import OperatorError
from minideepinfer.operators import FAMILIES, RegisteredOperator, Support, interpreting, load_registry
from minideepinfer.operators.build import _function
from minideepinfer.operators.support import obstacles
from minideepinfer.operators.validation import faults
from minideepinfer.testing.checking import check_operator
from minideepinfer.testing.coverage import is_built_in
from minideepinfer.testing.report import data, lines
from minideepinfer.testing.search import PROFILES

REGISTRY = load_registry()
SMALL = replace(PROFILES["quick"], examples=2, shrink=False)
FUSED = Support(devices=("cuda",), interpreted=True)


@pytest.fixture(params=["0", "1", None], ids=["off", "on", "unset"])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether kernels are interpreted in this process."""
    if request.param is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", request.param)
    return bool(request.param == "1")


def test_it_serves_the_cpu_where_kernels_are_interpreted(setting: bool) -> None:
    assert interpreting() == setting
    assert FUSED.serves("cpu") == setting
    assert FUSED.serves("cuda")
    assert not Support(devices=("cuda",)).serves("cpu")
    assert Support(devices=("cpu",)).serves("cpu") and not Support(devices=("cpu",), interpreted=True).serves("cuda")


def test_a_refusal_says_the_way_out(setting: bool) -> None:
    found = obstacles(declaration(support=FUSED), problems(EngineConfig())["attention", 0, DECODE])
    way_out = "has device cpu, needs cuda (or TRITON_INTERPRET=1, to have its kernels interpreted)"
    assert found == (() if setting else (way_out,))
    plain = obstacles(declaration(support=Support(devices=("cuda",))), problems(EngineConfig())["attention", 0, DECODE])
    assert plain == ("has device cpu, needs cuda",)


def test_auto_never_picks_what_would_be_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused = registered(declaration("fused", support=FUSED, priority=10))
    plan = plan_of({}, fused)
    assert set(names(plan, "attention")) == {"plain"}
    rejected = plan.operators["attention", 0, PREFILL].rejected["fused"]
    assert rejected == ("would be interpreted on cpu, auto never picks that",)
    assert set(names(plan_of({"attention": "fused"}, fused), "attention")) == {"fused"}
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(OperatorError, match="TRITON_INTERPRET=1"):
        plan_of({"attention": "fused"}, fused)


def test_auto_picks_it_where_it_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_plans import registry
    from minideepinfer.operators import resolve

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = EngineConfig()
    asked = problems(config, "cuda", (9, 0))
    plan = resolve(registry(registered(declaration("fused", support=FUSED, priority=10))), config, asked)
    assert set(names(plan, "attention")) == {"fused"}


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_the_declaration_is_checked(value: Any) -> None:
    (fault,) = faults(declaration(support=replace(FUSED, interpreted=value)))
    assert fault == f"has support.interpreted {value!r}; True or False is needed"


# Reports


class WithForm:
    """An operator that says which form of it was built."""

    def __init__(self, operator: Any, form: str) -> None:
        self.operator, self.form = operator, form

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


def build(context: Any) -> WithForm:
    make: Callable[[Any], Any] = _function(REGISTRY.get("attention", "naive"))
    return WithForm(make(context), "gluon" if context.problem.dtype == "bfloat16" else "triton, interpreted")


def fused(**changes: Any) -> RegisteredOperator:
    naive = REGISTRY.get("attention", "naive").declaration
    made = replace(naive, name="fused", build=f"{__name__}:build", support=replace(FUSED, **changes))
    return RegisteredOperator(made, "acme-ops", "0.3", "ops")


def test_a_report_says_which_form_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = check_operator(fused(), REGISTRY, SMALL)
    assert report.passed and set(report.forms) == {"gluon", "triton, interpreted"}
    assert report.forms.total() == report.calls
    (line,) = [line for line in lines(report) if line.startswith("  form: ")]
    assert f"triton, interpreted ({report.forms['triton, interpreted']} calls)" in line
    assert data(report)["forms"] == dict(report.forms)
    silent = check_operator(REGISTRY.get("comm", "single"), REGISTRY, SMALL)
    assert not silent.forms and not [line for line in lines(silent) if line.startswith("  form: ")]


def test_the_command_has_kernels_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["ops", "check", "comm:single"]) == 0
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["ops", "check", "comm:single"]) == 0
    assert os.environ["TRITON_INTERPRET"] == "0", "a setting of the user's stands"


def test_an_operator_without_its_module_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip because Triton is missing must not look like success."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    report = check_operator(fused(requires=("triton_that_is_not_there",)), REGISTRY, SMALL)
    assert not report.passed and not report.calls
    assert "serves-something" in {outcome.name for outcome in report.failures}
    assert all("has no module triton_that_is_not_there" in outcome.reason for outcome in report.failures)


@pytest.mark.parametrize(
    "operator",
    [o for family in FAMILIES for o in REGISTRY.operators(family) if is_built_in(o)],
    ids=lambda operator: operator.title,
)
def test_what_built_in_operators_require_is_installed(operator: RegisteredOperator) -> None:
    """Here and in CI, so that none of them goes unchecked."""
    assert [name for name in operator.declaration.support.requires if find_spec(name) is None] == []
