"""A stranger's distribution: built, installed, chosen by config; its operator and the one in the docs are right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_calls import Call, random_call
from fake_plugins import FakeDistribution
from hypothesis import given, settings
from hypothesis import strategies as st
from minideepinfer.config import EngineConfig
from minideepinfer.operators import OperatorRegistry, Phase, build, load_registry, resolve
from torch import Tensor

ROOT = Path(__file__).parents[1]
ACME = ROOT / "examples/acme_ops"
GUIDE = ROOT / "docs/writing-an-operator.md"

CALLS = st.builds(
    random_call,
    seed=st.integers(0, 10_000),
    ratio=st.sampled_from([0, 1, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_sink=st.booleans(),
    with_lens=st.booleans(),
)


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index", "-q"]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with acme-ops installed from its wheel."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip("wheel", ACME, "--no-build-isolation", "--wheel-dir", wheels)
    (wheel,) = wheels.glob("acme_ops-*.whl")
    pip("install", wheel, "--target", target)
    return target


def mini_deepinfer(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where acme-ops is installed."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "minideepinfer.cli.main", *arguments]
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)


def explain(site: Path, *arguments: str) -> list[dict[str, Any]]:
    done = mini_deepinfer(site, "ops", "explain", "--json", "--set", "device=cpu", *arguments)
    assert done.returncode == 0, done.stderr
    entries: list[dict[str, Any]] = json.loads(done.stdout)["operators"]
    return [entry for entry in entries if entry["family"] == "attention"]


def test_it_is_listed(installed: Path) -> None:
    done = mini_deepinfer(installed, "ops", "list", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = [entry for entry in json.loads(done.stdout)["operators"] if entry["name"] == "acme-tiled"]
    assert (found["family"], found["distribution"], found["version"]) == ("attention", "acme-ops", "0.3.0")
    assert found["options"]["tile_size"]["minimum"] == 1


def test_it_is_chosen_by_config_with_its_option(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        '[ops.attention]\ndefault = "naive"\n'
        '[ops.attention.layers]\n"2-4" = { name = "acme-tiled", options = { tile_size = 5 } }\n'
    )
    for entry in explain(installed, "--config", str(file)):
        expected = ("acme-tiled", "acme-ops", {"tile_size": 5}) if entry["layer"] in (2, 3, 4) else None
        found = (entry["operator"], entry["distribution"], entry["options"])
        assert found == (expected or ("naive", "mini-deepinfer", {}))


def test_auto_does_not_pick_it(installed: Path) -> None:
    entries = explain(installed)
    assert {entry["distribution"] for entry in entries} == {"mini-deepinfer"}
    assert entries[0]["rejected"]["acme-tiled"] == [
        "comes from acme-ops, auto ranks only mini-deepinfer",
        "is experimental, auto never picks that",
    ]


@pytest.mark.parametrize("option", ['{"tile_size": 0}', '{"tile_size": "x"}', '{"tiles": 4}'])
def test_its_option_is_validated(installed: Path, option: str) -> None:
    choice = f'ops.attention={{"name": "acme-tiled", "options": {option}}}'
    done = mini_deepinfer(installed, "ops", "explain", "--set", choice)
    assert done.returncode == 1
    assert "ops.attention.options: tile" in done.stderr
    assert "attention:acme-tiled (acme-ops 0.3.0) has these options: tile_size" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_timed_and_its_broken_sibling_is_not(installed: Path) -> None:
    arguments = ["attention:acme-tiled", "attention:acme-broken", "--preset", "tiny", "--device", "cpu"]
    done = mini_deepinfer(installed, "bench", "kernel", *arguments, "--output", "records.json")
    assert done.returncode == 1, done.stderr
    assert "FAILED attention:acme-broken on ratio 2: Violation: heads" in done.stdout
    records = {record["name"]: record for record in json.loads((installed / "records.json").read_text())}
    assert records["attention:acme-tiled, tiny: ratio 2"]["values"]["time"]["median"] > 0
    assert records["attention:acme-tiled, tiny: ratio 2"]["plan"]["distribution"] == "acme-ops"
    assert records["attention:acme-broken, tiny: ratio 2"]["values"] == {}


def test_it_can_be_ignored(installed: Path) -> None:
    done = mini_deepinfer(installed, "ops", "list", "--set", 'plugins.ignore=["acme-ops:attention"]')
    assert done.returncode == 0
    assert "naive" in done.stdout and "acme" not in done.stdout


# Numbers: in this process, the example is imported from its source.


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors of this size gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorRegistry]:
    """Our operators, acme's, and the one that the guide builds, from the guide's own text."""
    guide = tmp_path_factory.mktemp("guide")
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for name, text in blocks:
        (guide / name).parent.mkdir(exist_ok=True)
        (guide / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        points = []
        for source in (guide, ACME):
            patch.syspath_prepend(source)
            project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
            declared = project["entry-points"]["minideepinfer.plugins"]
            points += FakeDistribution(project["name"], declared, project["version"]).points
        own = FakeDistribution("mini-deepinfer", {"attention": "minideepinfer_attention.plugin"}).points
        loaded = load_registry(points=[*own, *points])
        for name in ("acme_ops.tiled", "my_ops.loop"):
            __import__(name)
        yield loaded


def built(registry: OperatorRegistry, name: str, problem: Any, **options: Any) -> Any:
    """Choose by config and build."""
    config = EngineConfig(ops={"attention": {"name": name, "options": options}})
    plan = resolve(registry, config, {("attention", 0, problem.phase): problem})
    return build(plan.operators["attention", 0, problem.phase], torch.device("cpu"))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal up to reordered sums in float32, up to three roundings (weights, heads, rotation) each in bfloat16."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.isfinite().all()
    if found.numel():
        bound = 1e-5 if found.dtype == torch.float32 else 2 * 3 * 2**-9
        error = (found.float() - expected.float()).abs().max()
        assert error <= bound * max(float(expected.float().abs().max()), 1.0)
    no_key = (expected == 0).all(-1)
    assert torch.equal(found[no_key], torch.zeros_like(found[no_key]))


@settings(deadline=None)
@given(CALLS, st.sampled_from([1, 4, 64]))
def test_acme_equals_naive(registry: OperatorRegistry, call: Call, tile_size: int) -> None:
    expected = call.run(built(registry, "naive", call.problem))
    before = {name: value.clone() for name, value in call.arguments.items() if isinstance(value, Tensor)}
    assert_same(call.run(built(registry, "acme-tiled", call.problem, tile_size=tile_size)), expected)
    for name, value in before.items():
        torch.testing.assert_close(call.arguments[name], value, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(CALLS)
def test_the_operator_of_the_guide_equals_naive(registry: OperatorRegistry, call: Call) -> None:
    assert_same(call.run(built(registry, "loop", call.problem)), call.run(built(registry, "naive", call.problem)))


@pytest.mark.parametrize("name", ["naive", "acme-tiled", "loop"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_any_key_and_no_rows_at_all(registry: OperatorRegistry, name: str, with_sink: bool) -> None:
    sizes = set()
    for seed in range(40):
        call = random_call(seed, 1, with_sink=with_sink)
        output = call.run(built(registry, name, call.problem))
        assert output.shape == call.arguments["q"].shape
        padding = call.batch.positions < 0
        assert torch.equal(output[padding], torch.zeros_like(output[padding]))
        sizes.add((len(output) == 0, bool(padding.any())))
    assert sizes == {(True, False), (False, False), (False, True)}


def test_the_guide_stays_short() -> None:
    """About forty lines of operator, blank ones not counted."""
    (operator,) = re.findall(r"```python\n# my_ops/loop.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len([line for line in operator.splitlines() if line.strip()]) <= 40


def test_the_configuration_of_the_guide_is_valid(registry: OperatorRegistry, tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n# engine.toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    file = tmp_path / "engine.toml"
    file.write_text(text)
    problem = random_call(0, 1).problem
    problems = {("attention", layer, phase): replace(problem, phase=phase) for layer in range(6) for phase in Phase}
    plan = resolve(registry, EngineConfig.from_file(file), problems)
    chosen = {
        phase: [plan.operators["attention", layer, phase].registered.name for layer in range(6)] for phase in Phase
    }
    assert chosen[Phase.PREFILL] == ["loop"] * 3 + ["naive"] * 3
    assert chosen[Phase.DECODE] == ["loop"] * 3 + ["naive"] * 2 + ["loop"]
