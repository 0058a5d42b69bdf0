"""Choosing operators: refusals with reasons, auto, and selection layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_plans import DECODE, PREFILL, names, plan_of, problems, registered
from fake_plugins import declaration
from minideepinfer.config import EngineConfig
from minideepinfer.errors import OperatorError
from minideepinfer.operators import FAMILIES, OperatorRegistry, Support, Tier, resolve
from minideepinfer.operators.support import obstacles

# Refusals


def test_an_explicit_choice_is_refused_with_everything_a_user_needs() -> None:
    fast = declaration(
        "fast",
        support=Support(devices=("cuda",), dtypes=("bfloat16",), requires=("module_that_is_not_there",)),
        refuses=lambda problem: [f"has head_dim {problem.head_dim}, needs 512"],
    )
    with pytest.raises(OperatorError) as caught:
        plan_of({"attention": {"layers": {"1-2": {"decode": "fast"}}}}, registered(fast, "acme"))
    assert str(caught.value) == (
        'ops.attention.layers["1-2"].decode: attention:fast (acme 9.9) cannot serve layer 1, decode: '
        "has device cpu, needs cuda; has dtype float32, needs bfloat16; "
        "has no module module_that_is_not_there, needs it; has head_dim 64, needs 512. What works here: plain"
    )


def test_one_layer_that_cannot_be_served_refuses_the_whole_plan() -> None:
    pooled = declaration(
        "pooled", refuses=lambda problem: [] if problem.compress_ratio != 1 else ["has ratio 1, needs 2"]
    )
    with pytest.raises(OperatorError, match=r"^ops\.attention: attention:pooled .* layer 5, prefill: has ratio 1"):
        plan_of({"attention": "pooled"}, registered(pooled))
    plan = plan_of({"attention": {"layers": {"0-4": "pooled"}}}, registered(pooled))
    assert names(plan, "attention") == ["pooled"] * 5 + ["plain"] * 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"support": Support(devices=("cpu",))}, ["has device cuda, needs cpu"]),
        ({"support": Support(dtypes=("float32", "float16"))}, ["has dtype bfloat16, needs float32 or float16"]),
        ({"support": Support(phases=(PREFILL,))}, ["has phase decode, needs prefill"]),
        ({"support": Support(min_capability=(9, 0))}, []),
        ({"support": Support(min_capability=(9, 1))}, ["has compute capability 9.0, needs at least 9.1"]),
        ({"support": Support(max_capability=(9, 0))}, []),
        ({"support": Support(max_capability=(8, 9))}, ["has compute capability 9.0, needs at most 8.9"]),
        ({"support": Support(requires=("json",))}, []),
        ({"accepts": {"selection": ("token_indices/1",)}}, ["has cache layout bf16, needs none"]),
        ({"accepts": {"cache": ("bf16",), "selection": ("b/1",)}}, ["has selection layout token_indices/1, needs b/1"]),
        ({"refuses": lambda problem: ("one", "two")}, ["one", "two"]),
        ({"refuses": lambda problem: problem.nothing}, ["its own check failed: AttributeError"]),
        ({"refuses": lambda problem: "no"}, ["its own check returned 'no'"]),
        ({"refuses": lambda problem: None}, ["its own check returned None"]),
    ],
)
def test_obstacles_in_words(changes: dict[str, Any], expected: list[str]) -> None:
    problem = problems(EngineConfig(), "cuda", (9, 0))["attention", 2, DECODE]
    found = obstacles(declaration(**changes), problem)
    assert len(found) == len(expected)
    assert all(has.startswith(wanted) for has, wanted in zip(found, expected, strict=True))


def test_required_modules_are_looked_up_but_never_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explosive_module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = declaration(support=Support(requires=("explosive_module",)))
    assert obstacles(found, problems(EngineConfig())["attention", 0, DECODE]) == ()


def test_window_layers_have_no_selection_layout_to_mismatch() -> None:
    blocks = declaration("blocks", accepts={"cache": ("float32",), "selection": ("blocks/1",)})
    asked = problems(EngineConfig())
    assert obstacles(blocks, asked["attention", 0, DECODE]) == ()
    assert obstacles(blocks, asked["attention", 2, DECODE]) == ("has selection layout token_indices/1, needs blocks/1",)


# Auto


def test_auto_takes_the_highest_priority_then_the_first_name() -> None:
    operators = [registered(declaration(name, priority=priority)) for name, priority in (("c", 5), ("b", 5), ("a", 1))]
    plan = plan_of({}, *operators)
    item = plan.operators["attention", 0, PREFILL]
    assert item.registered.name == "b"
    assert item.reason == "auto: highest priority (5) of 4 from mini-deepinfer that can serve"
    assert item.rejected == {
        "a": ("has priority 1, b has 5",),
        "c": ("has priority 5 like b, which is first by name",),
        "plain": ("has priority 0, b has 5",),
    }


def test_auto_passes_over_strangers_experiments_and_what_cannot_serve() -> None:
    plan = plan_of(
        {"attention": "auto"},
        registered(declaration("stranger", priority=9), "acme"),
        registered(declaration("trial", priority=9, tier=Tier.EXPERIMENTAL)),
        registered(declaration("gpu", priority=9, support=Support(devices=("cuda",)))),
    )
    assert set(names(plan, "attention")) == {"plain"}
    assert plan.operators["attention", 0, DECODE].rejected == {
        "gpu": ("has device cpu, needs cuda",),
        "stranger": ("comes from acme, auto ranks only mini-deepinfer",),
        "trial": ("is experimental, auto never picks that",),
    }


def test_auto_decides_layer_by_layer() -> None:
    window = declaration("window", priority=1, refuses=lambda p: ["has a global path"] if p.compress_ratio else [])
    assert names(plan_of({}, registered(window)), "attention") == ["window"] * 2 + ["plain"] * 8


def test_auto_without_any_operator_gives_all_reasons() -> None:
    operators = OperatorRegistry(
        [
            *[registered(declaration("plain", family)) for family in FAMILIES if family != "attention"],
            registered(declaration("gpu", support=Support(devices=("cuda",)))),
            registered(declaration("stranger"), "acme"),
        ]
    )
    config = EngineConfig()
    with pytest.raises(OperatorError) as caught:
        resolve(operators, config, problems(config))
    assert str(caught.value) == (
        "ops.attention: auto finds no operator for layer 0, prefill: gpu: has device cpu, needs cuda; "
        "stranger: comes from acme, auto ranks only mini-deepinfer. By name these would work: stranger"
    )
    with pytest.raises(OperatorError, match="none is registered"):
        resolve(OperatorRegistry([]), config, problems(config))


# Selection layouts


BLOCK_INDEXER = declaration("block", "indexer", emits={"selection": ("blocks/1",)})
BLOCK_ATTENTION = declaration("block", accepts={"cache": ("float32",), "selection": ("blocks/1",)})


def test_an_indexer_with_another_layout_works_with_an_attention_that_accepts_it() -> None:
    ops = {"indexer": "block", "attention": {"default": "block"}}
    plan = plan_of(ops, registered(BLOCK_INDEXER), registered(BLOCK_ATTENTION))
    assert plan.operators["indexer", 2, DECODE].problem.selection_layout == "blocks/1"
    assert plan.operators["attention", 3, DECODE].problem.selection_layout == "blocks/1"


def test_an_indexer_with_another_layout_is_refused_by_name() -> None:
    with pytest.raises(OperatorError) as caught:
        plan_of(
            {"indexer": {"layers": {"4": {"decode": "block"}}}, "attention": "plain"}, registered(BLOCK_INDEXER, "acme")
        )
    message = str(caught.value)
    assert message.startswith(
        "ops.attention: attention:plain (mini-deepinfer 9.9) cannot serve layer 4, decode: "
        "has selection layout blocks/1, needs token_indices/1."
    )
    assert message.endswith("The selection layout blocks/1 is that of indexer:block (acme 9.9) in layer 4")


def test_each_attention_layer_follows_its_own_index_source() -> None:
    operators = [registered(BLOCK_INDEXER), registered(BLOCK_ATTENTION)]
    plan = plan_of({"indexer": {"layers": {"4": {"decode": "block"}}}}, *operators)
    assert names(plan, "attention", PREFILL) == ["block"] * 2 + ["plain"] * 8
    assert names(plan, "attention", DECODE) == ["block"] * 2 + ["plain"] * 2 + ["block"] + ["plain"] * 5


def test_auto_never_takes_an_indexer_with_another_layout() -> None:
    plan = plan_of({}, registered(replace(BLOCK_INDEXER, priority=9)))
    assert set(names(plan, "indexer")) == {"plain"}
