"""The plan as data and as text, and building what it names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_plans import DECODE, PREFILL, TileOptions, plan_of, problems, registered
from fake_plugins import Plugins, declaration
from minideepinfer.config import EngineConfig
from minideepinfer.errors import OperatorError, PluginError
from minideepinfer.operators import FAMILIES, BuildContext, OperatorBuilder, build, load_registry, resolve


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return Plugins(monkeypatch)


def test_a_plan_is_plain_data() -> None:
    tiled = registered(declaration("tiled", options=TileOptions), "acme")
    plan = plan_of({"attention": {"decode": {"name": "tiled", "options": {"tile": 2}}}}, tiled)
    data = json.loads(json.dumps(plan.to_dict()))
    assert len(data["operators"]) == 2 * (10 + 4 + 10 + 1 + 1 + 1)
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
        f"residual   engine            prefill+decode  {auto}",
        f"epilogue   engine            prefill+decode  {auto}",
    ]
    assert "not tiled: comes from acme, auto ranks only mini-deepinfer" in plan.rejection_lines()[0]


def test_comm_single_refuses_a_world_of_several() -> None:
    config = EngineConfig(ops={"comm": "single"})
    asked = {
        key: replace(value, world_size=4) if key[0] == "comm" else value for key, value in problems(config).items()
    }
    with pytest.raises(OperatorError, match=r"ops\.comm: comm:single .*: has world size 4, needs 1\. What works"):
        resolve(load_registry(), config, asked)


class Kept:
    """An attention operator in name only, which keeps what it was built with."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def prepare(self, batch: object) -> None: ...

    def run(self, **tensors: object) -> None: ...


def test_equal_choices_share_one_operator(plugins: Plugins) -> None:
    module = plugins.module(build=Kept)
    tiled = registered(declaration("tiled", build=f"{module}:build", options=TileOptions))
    ops = {"attention": {"default": "tiled", "layers": {"8": {"name": "tiled", "options": {"tile": 9}}}}}
    plan = plan_of(ops, tiled)
    builder = OperatorBuilder(torch.device("cpu"))
    built = {layer: builder.build(plan.operators["attention", layer, DECODE]) for layer in range(10)}
    assert built[0] is built[1] and built[2] is built[3] is built[4] and built[5] is built[6] is built[7] is built[9]
    assert len({id(operator) for operator in built.values()}) == 4
    assert built[8].context.options == TileOptions(tile=9)
    assert built[0].context.problem is not built[2].context.problem
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
    calls = {"comm": "dispatch", "residual": "enter"}
    for (family, _, _), planned in plan.operators.items():
        assert callable(getattr(builder.build(planned), calls.get(family, "run")))
