"""Both golden models, every variant and sequence; and that the verification notices what is wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import minideepinfer.model.block as block_module
import pytest
import torch
from fake_plugins import FakeDistribution, Plugins, declaration
from golden_sets import GOLDEN, change_manifest, change_tensors, linked_set
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig
from minideepinfer.errors import ConfigError, OperatorError, VerificationError
from minideepinfer.operators import ENTRY_POINT_GROUP, Phase, Selection, load_registry
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.golden import Report, verify
from minideepinfer.testing.golden_bounds import Variant
from minideepinfer.testing.golden_measures import as_mask, jaccard_distance, relative_l2, relative_l2_rows
from minideepinfer.testing.golden_runs import run_sequence
from minideepinfer.testing.golden_set import GoldenSet
from minideepinfer_attention.naive import NaiveAttention
from minideepinfer_indexer.naive import NaiveIndexer
from minideepinfer_moe.naive import NaiveMoe
from torch import Tensor

SETS = ("tiny-a", "tiny-b")
TINY_A = GOLDEN / "tiny-a"
ACME = Path(__file__).parents[1] / "examples/acme_ops"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Everything of both sets."""
    return {name: verify(GOLDEN / name) for name in SETS}


def failed(report: Report) -> set[tuple[str, str]]:
    """Part and module of every failure."""
    return {(cell.part, cell.module) for cell in report.failures}


# What is right


@pytest.mark.parametrize("name", SETS)
def test_every_bound_holds(reports: dict[str, Report], name: str) -> None:
    assert not reports[name].failures
    assert reports[name].ok


@pytest.mark.parametrize("name", SETS)
def test_everything_is_compared(reports: dict[str, Report], name: str) -> None:
    """Every run of every sequence end to end; every layer and module where the set has module tensors."""
    golden, cells = GoldenSet(GOLDEN / name), reports[name].cells
    for sequence in golden.sequences.values():
        for run in sequence.files:
            assert any((c.sequence, c.variant, c.part) == (sequence.name, run, "prefill") for c in cells)
        if "fp32-noq" in sequence.files and len(sequence.token_ids) > 1:
            assert any((c.sequence, c.part) == (sequence.name, "prefill+decode") for c in cells)
    layers = golden.config.text_config.layers
    for variant in ("fp32-noq", "fp32-q", "bf16-q"):
        found = {(c.layer, c.module) for c in cells if c.part == "modules" and c.variant == variant}
        for layer in layers:
            modules = {"mhc", "attention", "window kv", "routing", "experts"}
            modules |= {"engram", "hash"} if layer.engram_index is not None else set()
            modules |= {"global kv", "index keys"} if layer.is_kv_source else set()
            # bf16 and fp32-q have long sequences, in which selections leave something out.
            modules |= {"selection"} if layer.is_index_source else set()
            modules |= {"candidates"} if layer.is_candidate_source else set()
            assert {(layer.layer_id, module) for module in modules} <= found, variant
        assert {(None, "embed"), (None, "norm"), (None, "head")} <= found
    bounded = {c.variant for c in cells if c.part == "bounded"}
    assert bounded == {"fp32-noq", "fp32-q", "fp32-q-a8"}


def test_bounds_are_those_of_the_issue(reports: dict[str, Report]) -> None:
    cells = [cell for report in reports.values() for cell in report.cells]
    logits = {(c.part, c.measure): c.bound for c in cells if c.variant == "fp32-noq" and c.module == "logits"}
    for part in ("prefill", "prefill+decode"):
        assert logits[part, "median token"] == 1e-5
        assert logits[part, "whole"] == 1e-4
    assert logits["bounded", "whole"] == 1e-4
    assert all(c.bound is None for c in cells if c.part != "modules" and c.variant != "fp32-noq")
    modules = [c for c in cells if c.part == "modules" and c.module not in ("embed", "hash")]
    for variant, bound in (("fp32-noq", 1e-5), ("fp32-q", 1e-3), ("fp32-q-a8", 1e-3)):
        assert {c.bound for c in modules if c.variant == variant} == {bound}
    bf16 = {(c.sequence, c.layer, c.module): c.bound for c in modules if c.variant == "bf16-q"}
    assert {bound for (_, _, module), bound in bf16.items() if module == "attention"} == {0.10}
    assert {bound for (_, _, module), bound in bf16.items() if module == "mhc"} == {0.0035}
    assert {bound for (_, _, module), bound in bf16.items() if module == "experts"} == {0.006}
    assert {bound for (_, _, module), bound in bf16.items() if module == "selection"} == {0.09}
    # One recorded figure, 0.0405, is above the 0.04 that the sets' README rounds it to.
    above = {key: bound for key, bound in bf16.items() if key[2] == "engram" and bound != 0.04}
    assert above == {("s1", 4, "engram"): pytest.approx(0.04055)}


def test_w8a8_in_bfloat16_stays_within_its_figures() -> None:
    report = verify(TINY_A, variants=["bf16-q-a8"])
    assert report.ok
    bounds = {c.module: c.bound for c in report.cells if c.part == "modules"}
    assert bounds["attention"] == 0.11
    assert bounds["experts"] == 0.08


@pytest.mark.parametrize(
    ("name", "sequence", "chunks"),
    [
        ("tiny-a", "s101", [13, 1, 1, 20, 7, 1, 30, 2, 26]),
        ("tiny-a", "s7", [1] * 7),
        ("tiny-b", "s151", [64, 1, 31, 32, 6, 17]),
        ("tiny-b", "s5", [2, 3]),
    ],
)
def test_chunks_reproduce_the_same_rows(name: str, sequence: str, chunks: list[int]) -> None:
    golden = GoldenSet(GOLDEN / name)
    runner = Runner(GOLDEN / name, Variant.parse("fp32-noq").engine_config(EngineConfig(), 8, "full"))
    token_ids = golden.sequences[sequence].token_ids
    assert sum(chunks) == len(token_ids)
    expected = golden.run(golden.sequences[sequence], "fp32-noq").tensors["logits"]
    logits = run_sequence(runner, token_ids, chunks)
    assert relative_l2_rows(logits, expected).median() <= 1e-5
    assert relative_l2(logits, expected) <= 1e-4


def test_the_draft_is_skipped_with_a_reason(reports: dict[str, Report]) -> None:
    skipped = reports["tiny-a"].skipped
    assert set(skipped) == {f"dspark.s37.{run}.safetensors" for run in ("fp32-q", "fp32-noq", "fp32-q-a8")}
    assert all("not run by this version" in reason for reason in skipped.values())


def test_only_what_a_file_holds_is_compared(tmp_path: Path) -> None:
    path = linked_set(TINY_A, tmp_path / "set")
    kept = ("layers.0.attn.in", "layers.0.attn.out", "layers.1.ffn.in", "layers.1.ffn.out")

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in set(tensors) - set(kept):
            del tensors[name]

    change_tensors(path, "golden.s7.fp32-noq.safetensors", strip)
    report = verify(path, variants=["fp32-noq"], sequences=["s7"])
    # Without ids there is no routing to force, so that the experts' output is not comparable.
    assert {(cell.part, cell.tensor) for cell in report.cells if cell.part == "modules"} == {("modules", kept[1])}
    assert report.ok
    assert report.not_compared()["layers.*.ffn.in"] == 1


def test_nothing_compared_is_a_failure() -> None:
    report = verify(TINY_A, sequences=["s37"])  # of which this set has the draft only
    assert not report.cells
    assert not report.ok


# What is wrong


def sinkless(self: NaiveAttention, **arguments: Any) -> Tensor:
    return NAIVE_ATTENTION(self, **{**arguments, "sink": None})


def sinkless_decode(self: NaiveAttention, **arguments: Any) -> Tensor:
    decode = arguments["metadata"].batch.phase == Phase.DECODE
    return NAIVE_ATTENTION(self, **(arguments | {"sink": None} if decode else arguments))


def newest(self: NaiveIndexer, *arguments: Any) -> Any:
    output = NAIVE_INDEXER(self, *arguments)
    visible = arguments[-1].visible.unsqueeze(1)
    indices = visible - 1 - torch.arange(output.selection.indices.shape[1])
    return type(output)(Selection(indices.clamp(min=-1).int()), output.candidates)


def one_candidate_less(self: NaiveIndexer, *arguments: Any) -> Any:
    output = NAIVE_INDEXER(self, *arguments)
    if output.candidates is not None:
        output.candidates[:, -1] = -1
    return output


def without_shared(self: NaiveMoe, x: Tensor, weights: Any, *arguments: Any) -> Tensor:
    return NAIVE_MOE(self, x, type(weights)(weights.gate, weights.gate_bias, weights.experts, None), *arguments)


def unbiased(self: NaiveMoe, x: Tensor, weights: Any) -> Any:
    zero = torch.zeros_like(weights.gate_bias)
    return NAIVE_ROUTE(self, x, type(weights)(weights.gate, zero, weights.experts, weights.shared))


def transposed(streams: Tensor, output: Tensor, site: Any) -> Tensor:
    return MIX(streams, output, type(site)(site.pre, site.post, site.comb.mT))


def doubled(streams: Tensor, *arguments: Any) -> Tensor:
    return streams + 1.01 * (INJECT(streams, *arguments) - streams)


NAIVE_ATTENTION, NAIVE_INDEXER = NaiveAttention.run, NaiveIndexer.run
NAIVE_MOE, NAIVE_ROUTE = NaiveMoe.run, NaiveMoe.route
MIX, INJECT = block_module.mix, block_module.inject
MISTAKES: list[tuple[Any, str, Callable[..., Any], set[str]]] = [
    (NaiveAttention, "run", sinkless, {"attention"}),
    (NaiveAttention, "run", sinkless_decode, {"attention"}),
    (NaiveIndexer, "run", newest, {"selection"}),
    (NaiveIndexer, "run", one_candidate_less, {"candidates"}),
    (NaiveMoe, "run", without_shared, {"experts"}),
    (NaiveMoe, "route", unbiased, {"routing"}),
    (block_module, "mix", transposed, {"mhc"}),
    (block_module, "inject", doubled, {"engram"}),
]


@pytest.mark.parametrize(("owner", "name", "mistake", "modules"), MISTAKES, ids=[m[2].__name__ for m in MISTAKES])
def test_a_mistake_fails_in_its_own_column(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mistake: Callable[..., Any], modules: set[str]
) -> None:
    """Golden inputs keep a mistake from spreading: only the module that makes it is past its bound."""
    monkeypatch.setattr(owner, name, mistake)
    report = verify(TINY_A, variants=["fp32-q"], sequences=["s101"])
    assert {module for part, module in failed(report) if part == "modules"} == modules


def test_a_mistake_in_decode_shows_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NaiveAttention, "run", sinkless_decode)
    report = verify(TINY_A, variants=["fp32-noq"], sequences=["s7"])
    parts = {part for part, module in failed(report) if module == "logits"}
    assert parts == {"prefill+decode"}
    assert ("modules", "attention") in failed(report)


def install(monkeypatch: pytest.MonkeyPatch, points: list[Any]) -> None:
    """More entry points for the runner."""
    known = list(entry_points(group=ENTRY_POINT_GROUP))
    monkeypatch.setattr(
        "minideepinfer.runtime.runner.load_registry", lambda ignore: load_registry(ignore, [*known, *points])
    )


def test_a_strangers_operator_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ACME))
    install(monkeypatch, FakeDistribution("acme-ops", {"ops": "acme_ops.plugin"}).points)
    choice = {"attention": {"name": "acme-tiled", "options": {"tile_size": 3}}}
    report = verify(TINY_A, variants=["fp32-noq"], sequences=["s7"], ops=choice)
    assert report.ok
    assert "acme-tiled" in report.plans["fp32-noq"][0]


def test_a_strangers_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Sinkless(NaiveAttention):
        run = sinkless  # type: ignore[assignment]

    plugins = Plugins(monkeypatch)
    module = plugins.module(build=lambda context: Sinkless(context.problem))
    install(monkeypatch, plugins.points([declaration("sinkless", build=f"{module}:build")]))
    arguments = ["verify", str(TINY_A), "--variant", "fp32-noq", "--sequence", "s7", "--json"]
    assert main([*arguments, "--ops", "attention=sinkless"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"]
    wrong = [cell for cell in data["cells"] if cell["failed"] and cell["part"] == "modules"]
    assert {cell["module"] for cell in wrong} == {"attention"}
    assert {cell["layer"] for cell in wrong} == set(range(9))
    assert main([*arguments, "--ops", "attention={}"]) == 1  # no such operator


def test_a_changed_golden_tensor_is_noticed_where_it_is(tmp_path: Path) -> None:
    path = linked_set(TINY_A, tmp_path / "set")

    def negate(tensors: dict[str, Tensor]) -> None:
        tensors["layers.3.ffn.out"] *= -1

    change_tensors(path, "golden.s7.fp32-noq.safetensors", negate)
    report = verify(path, variants=["fp32-noq"], sequences=["s7"])
    wrong = {(cell.layer, cell.tensor.split(".", 2)[2]) for cell in report.failures if cell.part == "modules"}
    assert wrong == {(3, "ffn.out"), (3, "streams_out")}  # mixing takes the golden output


def test_flipped_codes_are_listed(tmp_path: Path) -> None:
    path = linked_set(TINY_A, tmp_path / "set")

    def flip(tensors: dict[str, Tensor]) -> None:
        row = tensors["layers.2.attn.window_kv"][4]
        row[int(row.abs().argmax())] *= 1.125

    change_tensors(path, "golden.s7.fp32-q.safetensors", flip)
    report = verify(path, variants=["fp32-q"], sequences=["s7"])
    (cell,) = [c for c in report.cells if c.tensor == "layers.2.attn.window_kv"]
    assert cell.rows == (4,)
    assert all(not c.rows for c in report.cells if c.module == "window kv" and c.layer != 2)


def test_a_number_that_is_none_fails(tmp_path: Path) -> None:
    path = linked_set(TINY_A, tmp_path / "set")

    def poison(tensors: dict[str, Tensor]) -> None:
        tensors["logits"][2, 5] = torch.nan

    change_tensors(path, "golden.s7.fp32-q.safetensors", poison)
    report = verify(path, variants=["fp32-q"], sequences=["s7"])
    assert ("prefill", "logits") in failed(report)  # although nothing bounds it
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


# What is no golden set


def drop(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda path: change_manifest(path, change)


def tensors(change: Callable[[dict[str, Tensor]], object], *, sign: bool = True) -> Callable[[Path], object]:
    return lambda path: change_tensors(path, "golden.s7.fp32-noq.safetensors", change, sign=sign)


def garbage(path: Path) -> None:
    """No safetensors, but with the right checksum."""
    name, content = "golden.s7.fp32-noq.safetensors", b"no safetensors"
    (path / name).unlink()
    (path / name).write_bytes(content)
    change_manifest(path, lambda m: m["sha256"].update({name: hashlib.sha256(content).hexdigest()}))


FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no manifest": (drop("manifest.json"), ("manifest.json", "cannot be read")),
    "missing file": (drop("golden.s7.fp32-noq.safetensors"), ("golden.s7.fp32-noq.safetensors", "cannot be read")),
    "missing shard": (drop("model-00001-of-00002.safetensors"), ("model-00001-of-00002.safetensors",)),
    "other bytes": (
        tensors(lambda t: t["logits"].mul_(2), sign=False),
        ("golden.s7.fp32-noq.safetensors", "sha256"),
    ),
    "wrong checksum": (
        manifest(lambda m: m["sha256"].update({"tokenizer.json": "0" * 64})),
        ("tokenizer.json", "sha256"),
    ),
    "no checksum": (
        manifest(lambda m: m["sha256"].pop("golden.s7.fp32-noq.safetensors")),
        ("golden.s7.fp32-noq.safetensors", "no sha256"),
    ),
    "other config": (
        manifest(lambda m: m["config"]["text_config"].update(swiglu_limit=3.0)),
        ("manifest.json", "text_config.swiglu_limit"),
    ),
    "no sequences": (manifest(lambda m: m.pop("sequences")), ("manifest.json", "sequences")),
    "outside": (
        manifest(lambda m: m["sequences"][1]["files"].update({"fp32-q": "../golden.safetensors"})),
        ("manifest.json", "../golden.safetensors"),
    ),
    "token id": (manifest(lambda m: m["sequences"][1]["token_ids"].append(512)), ("manifest.json", "s7", "512")),
    "probes": (
        manifest(lambda m: m["sequences"][1].update(probe_positions=[3, 9])),
        ("manifest.json", "s7", "probe_positions"),
    ),
    "prompt": (manifest(lambda m: m["sequences"][3]["bounded"].update(prompt=500)), ("manifest.json", "s101", "500")),
    "other prompt": (
        manifest(lambda m: m["sequences"][3]["bounded"].update(prompt=70)),
        ("bounded.s101.safetensors", "rows"),
    ),
    "longer": (
        manifest(lambda m: m["sequences"][1]["token_ids"].append(5)),
        ("golden.s7.fp32-noq.safetensors", "rows"),
    ),
    "row width": (
        tensors(lambda t: t.update({"layers.2.attn.in": t["layers.2.attn.in"][:, :64].contiguous()})),
        ("golden.s7.fp32-noq.safetensors", "layers.2.attn.in"),
    ),
    "compared width": (
        tensors(lambda t: t.update({"logits": t["logits"][:, :64].contiguous()})),
        ("golden.s7.fp32-noq.safetensors", "logits"),
    ),
    "too few rows": (
        tensors(lambda t: t.update({"layers.2.attn.out": t["layers.2.attn.out"][:5].contiguous()})),
        ("golden.s7.fp32-noq.safetensors", "layers.2.attn.out"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_set_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    change, words = FAULTS[fault]
    path = linked_set(TINY_A, tmp_path / "set")
    change(path)
    with pytest.raises(VerificationError) as caught:
        verify(path, variants=["fp32-noq"])
    assert all(word in str(caught.value) for word in words), caught.value
    assert main(["verify", str(path), "--variant", "fp32-noq"]) == 1
    assert str(caught.value) in capsys.readouterr().err


def test_a_manifest_that_is_not_json(tmp_path: Path) -> None:
    path = linked_set(TINY_A, tmp_path / "set")
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_text("{")
    with pytest.raises(VerificationError, match="not JSON"):
        verify(path)


def test_what_is_asked_for_must_be_there() -> None:
    with pytest.raises(VerificationError, match=r"no sequence \['s9'\].*'s101'"):
        verify(TINY_A, sequences=["s9"])
    with pytest.raises(VerificationError, match="variant 'fp16-q' is unknown"):
        verify(TINY_A, variants=["fp16-q"])
    with pytest.raises(VerificationError, match="nothing could be compared in variant fp32-noq-a8"):
        verify(TINY_A, variants=["fp32-noq-a8"])
    with pytest.raises(ConfigError, match="dtype, replay cannot be set"):
        verify(TINY_A, config=EngineConfig(dtype="bfloat16", replay="bounded"))
    with pytest.raises(OperatorError, match="no attention operator 'none'"):
        verify(TINY_A, ops={"attention": "none"})


# The command


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(TINY_A), "--variant", "fp32-noq", "--sequence", "s1,s7", "--set", "cache.page_tokens=4"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "fp32-noq: modules on golden inputs" in printed
    for head in ("layer", "engram", "mhc", "attn", "window", "global", "keys", "select", "route", "moe"):
        assert head in printed
    assert "verified; " in printed
    assert main(["verify"]) == 2


# Measures


def test_relative_l2() -> None:
    golden = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert relative_l2(golden, golden) == 0
    assert relative_l2(golden * 1.1, golden) == pytest.approx(0.1)
    assert relative_l2(golden[1:] + 1, golden[1:]) == torch.inf
    assert relative_l2(golden[1:], golden[1:]) == 0
    rows = relative_l2_rows(golden + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), golden)
    assert rows.tolist() == [pytest.approx(0.2), 0.0]
    assert relative_l2(golden * torch.nan, golden) != 0


def test_sets() -> None:
    one = as_mask(torch.tensor([[0, 2, -1], [5, 1, 7]]), 6)
    other = as_mask(torch.tensor([[2, 0], [1, 3]]), 6)
    assert one.nonzero().tolist() == [[0, 0], [0, 2], [1, 1], [1, 5]]
    assert jaccard_distance(one[:1], other[:1]) == 0
    assert jaccard_distance(one[1:], other[1:]) == pytest.approx(1 - 1 / 3)
    assert jaccard_distance(one[:, :0], other[:, :0]) == 0
