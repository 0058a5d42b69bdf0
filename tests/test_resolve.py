"""Choosing operators: rules, refusals, auto, layouts, the plan, and building."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import Plugins, declaration
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.checkpoint.verify import directory_of
from minideepinfer.cli.config import toml_lines
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError, OperatorError, PluginError
from minideepinfer.operators import (
    FAMILIES,
    BuildContext,
    OperatorBuilder,
    OperatorDeclaration,
    OperatorOptions,
    OperatorRegistry,
    Phase,
    Plan,
    Problem,
    RegisteredOperator,
    Support,
    Tier,
    build,
    load_registry,
    resolve,
)
from minideepinfer.operators.support import obstacles
from minideepinfer.runtime.problems import layer_problems, resolve_cache_layout, resolve_device, resolve_dtype
from pydantic import Field

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
TINY = ModelConfig.from_file(directory_of("tiny"))
GOLDEN = Path(__file__).parent / "data/golden/tiny-a"
INDEX_SOURCES = TINY.text_config.index_source_layer_ids


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return Plugins(monkeypatch)


class TileOptions(OperatorOptions):
    tile: int = Field(4, ge=1)


def registered(item: OperatorDeclaration, distribution: str = "mini-deepinfer") -> RegisteredOperator:
    return RegisteredOperator(item, distribution, "9.9", "ops")


def registry(*operators: RegisteredOperator) -> OperatorRegistry:
    """Operators beside the plainest possible one of each family."""
    plain = [registered(declaration("plain", family, tier=Tier.REFERENCE)) for family in FAMILIES]
    return OperatorRegistry([*plain, *operators])


def problems(
    config: EngineConfig, device: str = "cpu", capability: tuple[int, int] | None = None
) -> dict[Any, Problem]:
    return layer_problems(TINY, config, device, capability)


def plan_of(ops: dict[str, Any], *operators: RegisteredOperator) -> Plan:
    config = EngineConfig(ops=ops)
    return resolve(registry(*operators), config, problems(config))


def names(plan: Plan, family: str, phase: Phase = PREFILL) -> list[str]:
    return [item.registered.name for (other, _, at), item in plan.operators.items() if (other, at) == (family, phase)]


# Problems


def test_problems_cover_every_call_of_the_model() -> None:
    found = problems(EngineConfig())
    layers = TINY.text_config.num_hidden_layers
    for phase in Phase:
        assert {layer for family, layer, at in found if family == "attention" and at == phase} == set(range(layers))
        assert {layer for family, layer, at in found if family == "moe" and at == phase} == set(range(layers))
        assert {layer for family, layer, at in found if family == "indexer" and at == phase} == set(INDEX_SOURCES)
        assert ("comm", None, phase) in found
    assert all(problem.phase is phase for (_, _, phase), problem in found.items())
    assert [found["attention", layer, DECODE].compress_ratio for layer in range(6)] == [0, 0, 2, 2, 2, 1]
    source, later = found["indexer", 5, PREFILL], found["indexer", 7, PREFILL]
    assert (source.emits_candidates, source.uses_candidates) == (True, False)
    assert (later.emits_candidates, later.uses_candidates) == (False, True)
    assert found["moe", 0, PREFILL].num_local_experts == found["moe", 0, PREFILL].num_experts == 8


@pytest.mark.parametrize(
    ("device", "settings", "dtype", "layout"),
    [
        ("cpu", {}, "float32", "float32"),
        ("cuda", {}, "bfloat16", "bf16"),
        ("cpu", {"dtype": "bfloat16"}, "bfloat16", "bf16"),
        ("cuda", {"dtype": "float32"}, "float32", "float32"),
        ("cpu", {"cache": {"layout": "bf16"}}, "float32", "bf16"),
    ],
)
def test_auto_dtype_and_layout(device: str, settings: dict[str, Any], dtype: str, layout: str) -> None:
    config = EngineConfig(**settings)
    assert resolve_dtype(config, device) == dtype
    assert resolve_cache_layout(config, dtype) == layout
    found = problems(config, device)["attention", 2, DECODE]
    assert (found.device, found.dtype, found.cache_layout) == (device, dtype, layout)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device: cuda is not here.*0 CUDA devices"):
        resolve_device(EngineConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(EngineConfig()) == torch.device("cuda", 0)
    assert resolve_device(EngineConfig(device="cuda:1")) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"cuda:2 is not here.*2 CUDA devices"):
        resolve_device(EngineConfig(device="cuda:2"))


# Rules


def test_the_most_specific_rule_wins() -> None:
    rule = {
        "default": "a",
        "decode": "b",
        "layers": {"0-2": "c", "4": {"name": "d", "options": {}}, "6-7": {"decode": "e"}},
    }
    plan = plan_of({"attention": rule}, *[registered(declaration(name)) for name in "abcde"])
    assert names(plan, "attention", PREFILL) == list("cccadaaaaa")
    assert names(plan, "attention", DECODE) == list("cccbdbeebb")
    reasons = {key: item.reason for key, item in plan.operators.items()}
    assert reasons["attention", 3, PREFILL] == "explicit: ops.attention.default"
    assert reasons["attention", 3, DECODE] == "explicit: ops.attention.decode"
    assert reasons["attention", 0, DECODE] == 'explicit: ops.attention.layers["0-2"]'
    assert reasons["attention", 6, DECODE] == 'explicit: ops.attention.layers["6-7"].decode'


LETTERS = st.sampled_from("abc")
PHASED = st.fixed_dictionaries({}, optional={"prefill": LETTERS, "decode": LETTERS})
CHUNKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=4)


@given(LETTERS, PHASED, CHUNKS, st.lists(LETTERS | PHASED, min_size=4, max_size=4))
def test_rules_against_a_table(default: str, phased: dict[str, str], spans: list[list[int]], values: list[Any]) -> None:
    layers: dict[str, Any] = {}
    table = {(layer, phase): phased.get(phase.value, default) for layer in range(10) for phase in Phase}
    taken: set[int] = set()
    for (first, last), value in zip(spans, values, strict=False):
        if taken & set(range(first, last + 1)):
            continue
        taken |= set(range(first, last + 1))
        layers[f"{first}-{last}" if first < last else str(first)] = value
        for layer in range(first, last + 1):
            for phase in Phase:
                specific = value if isinstance(value, str) else value.get(phase.value)
                table[layer, phase] = specific or table[layer, phase]
    rule = {"default": default, **phased, "layers": layers}
    plan = plan_of({"attention": rule}, *[registered(declaration(name)) for name in "abc"])
    assert {
        (layer, phase): plan.operators["attention", layer, phase].registered.name for layer, phase in table
    } == table


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"a": "plain"}, r'\["a"\]: is not a layer'),
        ({"": "plain"}, r'\[""\]: is not a layer'),
        ({"-1": "plain"}, "is not a layer"),
        ({"1-": "plain"}, "is not a layer"),
        ({"1,2": "plain"}, "is not a layer"),
        ({"2-0": "plain"}, r'runs backwards; write "0-2"'),
        ({"10": "plain"}, r"names layer 10, but the model has layers 0-9"),
        ({"8-10": "plain"}, "names layer 10"),
        ({"0-2": "plain", "2": "plain"}, r': "0-2" and "2" both name layer 2'),
        ({"3": "plain", "03": "plain"}, "both name layer 3"),
        ({"0-5": {"decode": "plain"}, "1-2": {"prefill": "plain"}}, "both name layer 1"),
    ],
)
def test_wrong_layer_keys_are_refused(layers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ops\.attention\.layers.*{message}"):
        plan_of({"attention": {"layers": layers}})


def test_a_rule_that_reaches_no_operator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'ops\.indexer\.layers\["3"\].*layers that do: 2, 4, 5, 7'):
        plan_of({"indexer": {"layers": {"3": "plain"}}})
    with pytest.raises(ConfigError, match=r'ops\.comm\.layers\["0-9"\].*layers that do: none'):
        plan_of({"comm": {"layers": {"0-9": "plain"}}})
    assert names(plan_of({"indexer": {"layers": {"0-9": "plain"}}}), "indexer") == ["plain"] * 4


def test_unknown_family_operator_and_option_are_refused_with_their_path() -> None:
    tiled = registered(declaration("tiled", options=TileOptions), "acme")
    with pytest.raises(ConfigError, match=r"^ops\.residual: .*attention, indexer, moe, comm"):
        plan_of({"residual": "plain"})
    with pytest.raises(OperatorError, match=r'^ops\.attention\.layers\["1"\]\.decode: .*\'fast\'.*plain'):
        plan_of({"attention": {"layers": {"1": {"decode": "fast"}}}})
    with pytest.raises(OperatorError, match=r"^ops\.attention\.default: .*'typo'"):
        plan_of({"attention": {"default": "typo", "prefill": "plain", "decode": "plain"}})
    with pytest.raises(ConfigError, match=r"^ops\.attention\.options: tiles: unknown key.*acme 9\.9.*options: tile$"):
        plan_of({"attention": {"name": "tiled", "options": {"tiles": 3}}}, tiled)
    with pytest.raises(ConfigError, match=r"^ops\.attention\.decode\.options: tile: .*found 0"):
        plan_of({"attention": {"decode": {"name": "tiled", "options": {"tile": 0}}}}, tiled)
    with pytest.raises(ConfigError, match=r"^ops\.attention\.options: .*these options: none"):
        plan_of({"attention": {"name": "plain", "options": {"tile": 1}}})


def test_auto_takes_no_options() -> None:
    with pytest.raises(ConfigError, match=r"^ops\.attention: gives options \['tile'\] to auto"):
        plan_of({"attention": {"name": "auto", "options": {"tile": 1}}})


def test_options_are_validated_and_kept() -> None:
    tiled = registered(declaration("tiled", options=TileOptions))
    ops = {"attention": {"default": "tiled", "layers": {"1": {"name": "tiled", "options": {"tile": 9}}}}}
    plan = plan_of(ops, tiled)
    assert plan.operators["attention", 0, PREFILL].options == TileOptions(tile=4)
    assert plan.operators["attention", 1, PREFILL].options == TileOptions(tile=9)


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
            *[registered(declaration("plain", family)) for family in ("indexer", "moe", "comm")],
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


# The plan


def test_a_plan_is_plain_data() -> None:
    tiled = registered(declaration("tiled", options=TileOptions), "acme")
    plan = plan_of({"attention": {"decode": {"name": "tiled", "options": {"tile": 2}}}}, tiled)
    data = json.loads(json.dumps(plan.to_dict()))
    assert len(data["operators"]) == 2 * (10 + 4 + 10 + 1)
    assert data["operators"][1] == {
        "family": "attention",
        "layer": 0,
        "phase": "decode",
        "operator": "tiled",
        "distribution": "acme",
        "version": "9.9",
        "options": {"tile": 2},
        "reason": "explicit: ops.attention.decode",
        "rejected": {"plain": ["ops.attention.decode names tiled"]},
    }
    assert [entry["family"] for entry in data["operators"]] == sorted(
        (entry["family"] for entry in data["operators"]), key=FAMILIES.index
    )


def test_plan_text_merges_equal_layers_and_phases() -> None:
    tiled = registered(declaration("tiled", options=TileOptions), "acme")
    plan = plan_of({"attention": {"layers": {"2-3": {"decode": "tiled"}, "5": "tiled"}}}, tiled)
    tile = "tiled tile=4 (acme 9.9)  explicit: ops.attention.layers"
    auto = "plain (mini-deepinfer 9.9)  auto: highest priority (0) of 1 from mini-deepinfer that can serve"
    assert plan.lines() == [
        f"attention  layers 0-1,4,6-9  prefill+decode  {auto}",
        f"attention  layers 2-3        prefill         {auto}",
        f'attention  layers 2-3        decode          {tile}["2-3"].decode',
        f'attention  layers 5          prefill+decode  {tile}["5"]',
        f"indexer    layers 2,4-5,7    prefill+decode  {auto}",
        f"moe        layers 0-9        prefill+decode  {auto}",
        f"comm       engine            prefill+decode  {auto}",
    ]
    assert "not tiled: comes from acme, auto ranks only mini-deepinfer" in plan.rejection_lines()[0]


def test_comm_single_refuses_a_world_of_several() -> None:
    config = EngineConfig(ops={"comm": "single"})
    asked = {
        key: replace(value, world_size=4) if key[0] == "comm" else value for key, value in problems(config).items()
    }
    with pytest.raises(OperatorError, match=r"ops\.comm: comm:single .*: has world size 4, needs 1\. What works"):
        resolve(load_registry(), config, asked)


# Building


def test_equal_choices_share_one_operator(plugins: Plugins) -> None:
    module = plugins.module(build=lambda context: context)
    tiled = registered(declaration("tiled", build=f"{module}:build", options=TileOptions))
    ops = {"attention": {"default": "tiled", "layers": {"8": {"name": "tiled", "options": {"tile": 9}}}}}
    plan = plan_of(ops, tiled)
    builder = OperatorBuilder(torch.device("cpu"))
    built = {layer: builder.build(plan.operators["attention", layer, DECODE]) for layer in range(10)}
    assert built[0] is built[1] and built[2] is built[3] is built[4] and built[5] is built[6] is built[7] is built[9]
    assert len({id(operator) for operator in built.values()}) == 4
    assert isinstance(built[8], BuildContext) and built[8].options == TileOptions(tile=9)
    assert built[0].problem is not built[2].problem
    assert builder.build(plan.operators["attention", 0, PREFILL]) is not built[0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("module_that_does_not_exist:build", "ModuleNotFoundError"),
        ("json:biuld", "cannot be imported: AttributeError"),
        ("json:__name__", "is a str; a function is needed"),
        ("json:loads", "failed to build: TypeError"),
    ],
)
def test_building_errors_name_the_distribution(path: str, message: str) -> None:
    plan = plan_of({"attention": "fast"}, registered(declaration("fast", build=path), "acme"))
    with pytest.raises(PluginError, match=rf"^attention:fast \(acme 9\.9\).*{message}"):
        build(plan.operators["attention", 0, DECODE], torch.device("cpu"))


def test_our_own_errors_pass_through_building(plugins: Plugins) -> None:
    def fail(context: BuildContext) -> None:
        raise OperatorError("no workspace")

    item = declaration("fast", build=f"{plugins.module(build=fail)}:build")
    plan = plan_of({"attention": "fast"}, registered(item))
    with pytest.raises(OperatorError, match=r"^no workspace$"):
        build(plan.operators["attention", 0, DECODE], torch.device("cpu"))


def test_every_operator_of_the_default_plan_can_be_built() -> None:
    config = EngineConfig()
    plan = resolve(load_registry(), config, problems(config))
    builder = OperatorBuilder(torch.device("cpu"))
    for (family, _, _), planned in plan.operators.items():
        assert callable(getattr(builder.build(planned), "dispatch" if family == "comm" else "run"))


# Commands


def test_explain_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "explain", "--ops", "moe=naive", "--set", "device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "device cpu, dtype float32, cache layout float32" in text
    assert "naive (mini-deepinfer" in text and "explicit: ops.moe" in text
    assert main(["ops", "explain", "--model", str(GOLDEN), "--set", "device=cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {entry["family"] for entry in data["operators"]} == set(FAMILIES)
    assert data["dtype"] == "float32"


def test_a_wrong_choice_is_a_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "explain", "--ops", "attention=nothing", "--set", "device=cpu"]) == 1
    assert capsys.readouterr().err.startswith("mini-deepinfer: ops.attention: there is no attention operator 'nothing'")
    for wrong in (["--ops", "attention"], ["--set", "dtype"], ["--set", "=3"], ["--set", "a..b=3"]):
        assert main(["ops", "explain", *wrong]) == 2


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=6)
OPTION = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(TEXT, OPTION, max_size=3))
def test_config_show_can_be_read_back(options: dict[str, Any]) -> None:
    choice = {"name": "fast", "options": options}
    config = EngineConfig(dtype="float32", ops={"attention": {"layers": {"0-2": {"decode": choice}}}, "moe": choice})
    text = "\n".join(toml_lines(config.model_dump(mode="json", exclude_none=True)))
    assert EngineConfig.from_dict(tomllib.loads(text)) == config


def test_settings_change_the_file_in_order(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('dtype = "float32"\n[cache]\nnum_pages = 7\npage_tokens = 32\n[ops]\nattention = "naive"\n')
    arguments = ["--config", str(file), "--set", "cache.num_pages=9", "--ops", "moe=naive,comm=single"]
    assert main(["config", "show", *arguments, "--set", "ops.moe=auto", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dtype"] == "float32"
    assert (data["cache"]["num_pages"], data["cache"]["page_tokens"]) == (9, 32)
    assert data["ops"] == {"attention": "naive", "moe": "auto", "comm": "single"}
    assert main(["config", "show", *arguments, "--set", "ops.attention.decode=naive"]) == 1
    assert "ops.attention is 'naive', not a table" in capsys.readouterr().err
    assert main(["config", "show", "--set", "cache.pages=9"]) == 1
    assert "cache.pages: unknown key" in capsys.readouterr().err
