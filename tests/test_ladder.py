"""A ladder on the tiny config: one set of weights for all rungs, errors that mean something, rungs that fail."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import declaration
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import OperatorError
from minideepinfer.measure import rank
from minideepinfer.measure.ladder.errors import module_errors
from minideepinfer.measure.ladder.file import make_ladder
from minideepinfer.measure.ladder.reference import one_of_each_kind, record_reference
from minideepinfer.measure.ladder.session import run_ladder
from minideepinfer.measure.prefill import PRESETS, PrefillBench
from minideepinfer.measure.record import Record, read_records
from minideepinfer.operators import RegisteredOperator, load_registry
from minideepinfer.operators.build import _function
from minideepinfer.testing.subject import including

REGISTRY = load_registry()
TINY = ModelConfig.from_file(Path(__file__).parent / "data/config.tiny.json")
CPU = EngineConfig(device="cpu", ops=dict.fromkeys(("attention", "indexer", "moe", "residual"), "naive"))
CHOICES = ("selection", "candidates", "routing")


class Changed:
    """The naive operator, with a change to what one of its methods returns."""

    def __init__(self, operator: Any, method: str, change: Callable[[Any], Any]) -> None:
        self.operator = operator
        setattr(self, method, lambda *args, **kwargs: change(getattr(operator, method)(*args, **kwargs)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


Install = Callable[[str, str, Callable[[Any], Any]], EngineConfig]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a changed operator `odd` and choose it."""

    def make(family: str, method: str, change: Callable[[Any], Any]) -> EngineConfig:
        naive = REGISTRY.get(family, "naive")
        build = _function(naive)
        monkeypatch.setitem(globals(), "build", lambda context: Changed(build(context), method, change))
        odd = RegisteredOperator(declaration("odd", family, build=f"{__name__}:build"), "acme-ops", "0.3", "ops")
        for module in ("measure.rank", "measure.ladder.session"):
            monkeypatch.setattr(f"minideepinfer.{module}.load_registry", lambda ignore=(): including(REGISTRY, odd))
        return CPU.model_copy(update={"ops": {**CPU.ops, family: "odd"}})

    return make


@pytest.fixture
def bench() -> PrefillBench:
    return PrefillBench(TINY, CPU, PRESETS["tiny"])


def choose(bench: PrefillBench, config: EngineConfig) -> None:
    """Go over to a plan, with an operator that was installed meanwhile."""
    bench.rank.registry = rank.load_registry()
    bench.change(config, bench.problem)


def test_a_layer_of_each_kind_is_looked_at() -> None:
    assert [layer.layer_id for layer in one_of_each_kind(TINY.text_config.layers)] == [0, 1, 2, 3, 4, 6, 7, 8]
    full = ModelConfig.from_file(Path(__file__).parent / "data/config.full.json")
    assert [layer.layer_id for layer in one_of_each_kind(full.text_config.layers)] == [0, 1, 2, 3, 14, 20, 21, 24]


def test_a_repetition_of_the_reference_has_no_error(bench: PrefillBench) -> None:
    errors = module_errors(bench, record_reference(bench))
    assert {"block", "attention", "entries", "experts", "mixing", "Engram", "head", *CHOICES} <= set(errors)
    assert set(errors.values()) == {0.0}


@pytest.mark.parametrize(
    ("family", "method", "wrong", "sees"),
    [
        ("attention", "run", lambda heads: heads * 1.01, {"attention": 0.01, "block": None}),
        ("moe", "run", lambda output: output * 1.01, {"experts": 0.01, "block": None}),
        ("moe", "route", lambda routing: (routing[0] ^ 1, routing[1]), {"routing": None}),
        ("residual", "mix", lambda streams: streams * 1.01, {"mixing": 0.01, "block": None}),
        ("indexer", "run", lambda output: fewer(output), {"selection": 0.25}),
    ],
)
def test_a_wrong_operator_is_seen_in_its_module_alone(
    bench: PrefillBench,
    install: Install,
    family: str,
    method: str,
    wrong: Callable[[Any], Any],
    sees: dict[str, float | None],
) -> None:
    reference = record_reference(bench)
    choose(bench, install(family, method, wrong))
    errors = {name: error for name, error in module_errors(bench, reference).items() if "." not in name}
    for module, size in sees.items():
        assert errors.pop(module) == pytest.approx(size, rel=0.1) if size else errors.pop(module) > 1e-3
    assert set(errors.values()) == {0.0}


def fewer(output: Any) -> Any:
    """A selection of 8 that misses its two largest entries."""
    from dataclasses import replace

    indices = output.selection.indices.clone()
    for _ in range(2):
        indices.scatter_(1, indices.argmax(1, keepdim=True), -1)
    return replace(output, selection=replace(output.selection, indices=indices))


def test_bounded_replay_differs_behind_the_source_of_candidates_alone(bench: PrefillBench) -> None:
    reference = record_reference(bench)
    bench.change(CPU.model_copy(update={"replay": "bounded"}), bench.problem)
    errors = module_errors(bench, reference)
    source = TINY.text_config.candidate_source_layer_id
    assert all(
        errors[f"layers.{layer.layer_id}.block"] < 1e-6 for layer in reference.layers if layer.layer_id <= source
    )
    assert errors[f"layers.{source + 1}.attention"] > 1e-2


def test_a_change_of_plan_keeps_weights_cache_and_tokens(bench: PrefillBench, install: Install) -> None:
    bench.rewind()
    logits = bench.step()
    kept = bench.model.blocks[0].moe_weights
    bench.change(CPU.model_copy(update={"replay": "bounded"}), bench.problem)
    assert bench.model.blocks[0].moe_weights is kept
    choose(bench, install("moe", "run", lambda output: output))
    assert bench.model.blocks[0].moe_weights is not kept
    bench.rewind()
    assert torch.equal(bench.step(), logits)


def ladder_of(*rungs: dict[str, Any]) -> Any:
    first = {"name": "first", "engine": {"ops": CPU.ops}}
    return make_ladder(
        {"preset": "tiny", "steps": 1, "warmup": 1, "layers": 3, "engine": {"device": "cpu"}, "rung": [first, *rungs]}
    )


def test_a_rung_with_a_new_operator_has_three_layers_of_evidence(install: Install) -> None:
    install("attention", "run", lambda heads: heads)
    records: list[Record] = []
    run_ladder(TINY, ladder_of({"name": "+odd", "engine": {"ops": {"attention": "odd"}}, "layers": 2}), records.append)
    first, odd = records
    assert first.problem["builds_on"] is None and odd.problem["builds_on"] == "first"
    assert not [name for name in first.values if name.startswith("kernel ")]
    kernels = [name.removeprefix("kernel ") for name in odd.floors if name.startswith("kernel ")]
    assert kernels and all(name.startswith("attention:odd, ") for name in kernels)
    for name in kernels:
        assert odd.values[f"kernel {name}"].median > 0 < odd.values[f"kernel before {name}"].median
        assert odd.errors[f"kernel {name}"] == 0.0
    assert sum(odd.stages.values()) == pytest.approx(odd.values["step_with_stages"].median, rel=0.3)
    assert odd.errors["attention"] == 0.0
    assert any("first 2 layers; nothing is scaled" in note for note in odd.notes)


def test_a_module_that_is_not_finite_fails_its_rung(install: Install) -> None:
    def spoil(output: torch.Tensor) -> torch.Tensor:
        spoiled = output.clone()
        spoiled[0] = float("nan")  # not the row whose logits are looked at
        return spoiled

    install("moe", "run", spoil)
    records: list[Record] = []
    rung = {"name": "+odd", "engine": {"ops": {"moe": "odd"}}, "layers": 2}
    with pytest.raises(OperatorError, match=r"rung '\+odd': not finite .*: block, experts, layers\.0\.block"):
        run_ladder(TINY, ladder_of(rung), records.append)
    assert [record.name for record in records] == ["first"]


def test_a_kernel_that_cannot_be_timed_is_told(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("residual", "mix", lambda streams: streams)
    monkeypatch.setattr("minideepinfer.measure.ladder.kernels.time_calls", lambda *args, **kwargs: 1 / 0)
    records: list[Record] = []
    run_ladder(TINY, ladder_of({"name": "+odd", "engine": {"ops": {"residual": "odd"}}}), records.append)
    assert any("kernel times of residual" in note and "ZeroDivisionError" in note for note in records[1].notes)
    assert not [name for name in records[1].values if name.startswith("kernel ")]


def test_a_rung_that_cannot_be_served_is_refused_before_anything_runs() -> None:
    records: list[Record] = []
    with pytest.raises(OperatorError, match=r"rung '\+odd': .*nonesuch"):
        run_ladder(TINY, ladder_of({"name": "+odd", "engine": {"ops": {"moe": "nonesuch"}}}), records.append)
    assert not records


def test_a_rung_that_fails_is_named_and_the_others_are_kept(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(output: Any) -> Any:
        raise RuntimeError("no tile fits")

    install("moe", "run", fail)
    file = tmp_path / "l.toml"
    file.write_text(
        'preset = "tiny"\nsteps = 1\nwarmup = 1\nlayers = 2\n[engine]\ndevice = "cpu"\n'
        '[[rung]]\nname = "first"\n[[rung]]\nname = "second"\n[[rung]]\nname = "third"\nengine.ops.moe = "odd"\n'
    )
    assert main(["bench", "ladder", str(file), "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "rung 'third': moe:odd (acme-ops 0.3)" in told and "no tile fits" in told
    assert f"{tmp_path / 'ladder.json'} has the records of the rungs before it" in told
    assert [record.name for record in read_records(tmp_path / "ladder.json")] == ["first", "second"]
    assert main(["bench", "report", str(tmp_path / "ladder.json"), "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["ladder.json", "ladder.md", "ladder-steps.png"])
def test_what_cannot_be_written_is_known_before_anything_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert main(["bench", "ladder", "--preset", "tiny", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told == f"mini-deepinfer: {tmp_path / name}: cannot be written (Is a directory)\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_interrupted_ladder_says_where_its_rungs_are(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(output: Any) -> Any:
        raise KeyboardInterrupt

    install("moe", "run", interrupt)
    file = tmp_path / "l.toml"
    file.write_text(
        'preset = "tiny"\nsteps = 1\nwarmup = 0\nlayers = 1\n[engine]\ndevice = "cpu"\n'
        '[[rung]]\nname = "first"\n[[rung]]\nname = "second"\nengine.ops.moe = "odd"\n'
    )
    assert main(["bench", "ladder", str(file), "--out", str(tmp_path)]) == 130
    told = capsys.readouterr().err
    assert "ladder.json has the records of the rungs before it; `bench report` makes a report of them" in told
    assert [record.name for record in read_records(tmp_path / "ladder.json")] == ["first"]


def test_the_tiny_ladder_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.perf_counter()
    assert main(["bench", "ladder", "--preset", "tiny", "--out", str(tmp_path)]) == 0
    assert time.perf_counter() - begin < 60
    names = {"ladder.json", "ladder.md"}
    names |= {f"ladder-{what}.{kind}" for what in ("steps", "throughput") for kind in ("svg", "png")}
    assert {path.name for path in tmp_path.iterdir()} == names
    records = read_records(tmp_path / "ladder.json")
    assert [record.name for record in records] == ["all naive", "+bounded replay"]
    assert all(record.headline.startswith("one rank of 2, no network") for record in records)
    assert all(record.plan and record.rates and record.stages for record in records)


def test_experts_in_the_form_of_the_plan_before_are_gone(bench: PrefillBench, install: Install) -> None:
    kept = [weakref.ref(experts.experts.w13) for block in bench.model.blocks for experts in block.moe_weights.values()]
    odd = install("moe", "run", lambda output: output)
    gc.disable()
    try:
        choose(bench, odd)
        assert not [ref for ref in kept if ref() is not None]
    finally:
        gc.enable()
