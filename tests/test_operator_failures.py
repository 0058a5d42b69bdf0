"""Exceptions in an operator's code are told with the operator, the layer and the phase; in a model and in the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_plugins import declaration
from minideepinfer import LLM, EngineConfig, SamplingParams, operators
from minideepinfer.errors import MiniDeepInferError, OperatorError, PluginError
from minideepinfer.operators import RegisteredOperator, load_registry
from minideepinfer.operators.build import _function
from minideepinfer.operators.families import FAMILIES, METHODS
from minideepinfer.operators.placed import Placed, unplaced
from minideepinfer.runtime import setup
from minideepinfer.testing.checking import FAILED, check_one
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject, including
from minideepinfer.testing.tolerances import conformance

REGISTRY = load_registry()
SMALL = replace(PROFILES["quick"], examples=1, shrink=False)
NAMES = {"attention": "naive", "indexer": "naive", "moe": "naive", "comm": "single"}


class Breaking:
    """The reference operator, one method of which raises."""

    def __init__(self, operator: Any, method: str, error: BaseException) -> None:
        self.operator = operator
        setattr(self, method, lambda *args, **kwargs: self._raise(error))

    def _raise(self, error: BaseException) -> None:
        raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


def breaking(monkeypatch: pytest.MonkeyPatch, family: str, method: str, error: BaseException) -> RegisteredOperator:
    """An operator named `odd` that breaks in a method."""
    reference = REGISTRY.get(family, NAMES[family])
    make: Callable[[Any], Any] = _function(reference)

    def build(context: Any) -> Any:
        if method == "build":
            raise error
        return Breaking(make(context), method, error)

    monkeypatch.setitem(globals(), "build", build)
    return RegisteredOperator(declaration("odd", family, build=f"{__name__}:build"), "acme-ops", "0.3", "ops")


@pytest.mark.parametrize(
    ("family", "method", "place"),
    [
        ("attention", "prepare", "in layer 0, prefill: prepare"),
        ("attention", "run", "in layer 0, prefill: run"),
        ("indexer", "run", "in layer 2, prefill: run"),
        ("moe", "transform_weights", "in layer 0, prefill: transform_weights"),
        ("moe", "prepare", "in layer 0, prefill: prepare"),
        ("moe", "run", "in layer 0, prefill: run"),
        ("comm", "fetch_rows", "in prefill: fetch_rows"),
        ("comm", "prepare", "in prefill: prepare"),
    ],
)
@pytest.mark.parametrize("error", [ValueError("no tile fits"), SystemExit(3)], ids=["error", "exit"])
def test_a_model_says_whose_exception_it_is(
    monkeypatch: pytest.MonkeyPatch, family: str, method: str, place: str, error: BaseException
) -> None:
    odd = breaking(monkeypatch, family, method, error)
    monkeypatch.setattr(setup, "load_registry", lambda ignore: including(REGISTRY, odd))
    config = EngineConfig(dtype="float32", device="cpu", ops={family: "odd"})
    with pytest.raises(OperatorError) as caught, LLM("tiny", config) as llm:
        llm.generate([[0, 5, 7]], SamplingParams(max_tokens=3))
    text = f"{family}:odd (acme-ops 0.3) {place} raised {type(error).__name__}: {error}"
    assert str(caught.value) == text
    assert caught.value.__cause__ is error


def test_decode_is_told_from_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = breaking(monkeypatch, "moe", "run", ValueError("no tile fits"))
    monkeypatch.setattr(setup, "load_registry", lambda ignore: including(REGISTRY, odd))
    rule = {"default": "naive", "layers": {"3": {"decode": "odd"}}}
    with (
        pytest.raises(OperatorError, match=r"^moe:odd \(acme-ops 0\.3\) in layer 3, decode: run raised ValueError"),
        LLM("tiny", EngineConfig(dtype="float32", device="cpu", ops={"moe": rule})) as llm,
    ):
        llm.generate([[0, 5, 7]], SamplingParams(max_tokens=3))


def test_build_is_told_with_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = breaking(monkeypatch, "moe", "build", ValueError("no compiler"))
    monkeypatch.setattr(setup, "load_registry", lambda ignore: including(REGISTRY, odd))
    with pytest.raises(PluginError, match=r"moe:odd \(acme-ops 0\.3\) failed to build: ValueError: no compiler"):
        LLM("tiny", EngineConfig(ops={"moe": "odd"}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_built_must_have_the_methods_of_its_family(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setitem(globals(), "build", lambda context: None)
    odd = RegisteredOperator(declaration("odd", family, build=f"{__name__}:build"), "acme-ops", "0.3", "ops")
    monkeypatch.setattr(setup, "load_registry", lambda ignore: including(REGISTRY, odd))
    with pytest.raises(PluginError) as caught:
        LLM("tiny", EngineConfig(ops={family: "odd"}))
    text = f"{family}:odd (acme-ops 0.3): build returned NoneType, which has no method {', '.join(METHODS[family])}"
    assert str(caught.value) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_methods_of_a_family_are_those_of_its_protocol(family: str) -> None:
    protocol = getattr(operators, f"{family.capitalize()}Operator")
    assert sorted(METHODS[family]) == sorted(name for name in vars(protocol) if not name.startswith("_"))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("attention", "build"),
        ("attention", "prepare"),
        ("attention", "run"),
        ("indexer", "run"),
        ("moe", "transform_weights"),
        ("moe", "route"),
        ("moe", "run"),
        ("comm", "prepare"),
    ],
)
@pytest.mark.parametrize("error", [ValueError("no tile fits"), SystemExit(3)], ids=["error", "exit"])
def test_the_kit_says_whose_exception_it_is(
    monkeypatch: pytest.MonkeyPatch, family: str, method: str, error: BaseException
) -> None:
    odd = breaking(monkeypatch, family, method, error)
    known = conformance(family)
    for name in ("matches-reference", "end-to-end"):
        outcome = check_one(Subject(odd, REGISTRY, known), known.relation(name), SMALL, 0)
        if (method, name) == ("route", "end-to-end"):  # the reference's routing is imposed there
            continue
        assert outcome.status == FAILED and outcome.crash
        assert f"{family}:odd (acme-ops 0.3) " in outcome.reason
        assert f"{type(error).__name__}: {error}" in outcome.reason


class Returning:
    """An operator whose `run` returns something else than a tensor of the right shape."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def prepare(self, batch: Any) -> Any:
        return None

    def run(self, q: Any, *args: Any) -> Any:
        return self.value(q)


@pytest.mark.parametrize(
    ("value", "words"),
    [(lambda q: None, "heads is None; a tensor is needed"), (lambda q: q[:0], "attention:odd (acme-ops 0.3)")],
)
def test_the_kit_says_what_was_returned(monkeypatch: pytest.MonkeyPatch, value: Any, words: str) -> None:
    monkeypatch.setitem(globals(), "build", lambda context: Returning(value))
    odd = RegisteredOperator(declaration("odd", build=f"{__name__}:build"), "acme-ops", "0.3", "ops")
    known = conformance("attention")
    for name in ("permuted-units", "other-chunks"):
        outcome = check_one(Subject(odd, REGISTRY, known), known.relation(name), SMALL, 0)
        assert outcome.status == FAILED and words in outcome.reason


def test_a_placed_operator_has_all_attributes_of_its_own() -> None:
    class Operator:
        form = "triton"

        def run(self, x: int) -> int:
            return x + 1

        def fail(self) -> None:
            raise MiniDeepInferError("names somebody already")

    operator = Operator()
    placed = Placed(operator, "attention:odd in layer 1, decode")
    assert placed.form == "triton" and placed.run(1) == placed.run(1) == 2
    assert unplaced(placed) is operator and unplaced(operator) is operator
    with pytest.raises(MiniDeepInferError, match=r"^names somebody already$"):
        placed.fail()
    with pytest.raises(AttributeError):
        placed.nothing  # noqa: B018


def test_layers_with_the_same_operator_share_what_it_prepared() -> None:
    with LLM("tiny", EngineConfig(dtype="float32", device="cpu")) as llm:
        blocks = llm.engine.runner.model.blocks
        operators = {id(unplaced(operator)) for block in blocks for operator in block.moe.values()}
        assert len(operators) == 2 and len({id(block.moe["prefill"]) for block in blocks}) == len(blocks)  # type: ignore[index]
