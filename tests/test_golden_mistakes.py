"""The verification notices deliberate mistakes, and says in which module they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import FakeDistribution, Plugins, declaration
from golden_sets import GOLDEN, change_tensors, linked_set
from minideepinfer.cli.main import main
from minideepinfer.operators import ENTRY_POINT_GROUP, Phase, Selection, load_registry
from minideepinfer.testing.golden import Report, verify
from minideepinfer_attention.naive import NaiveAttention
from minideepinfer_epilogue.naive import NaiveEpilogue
from minideepinfer_indexer.naive import NaiveIndexer
from minideepinfer_moe.naive import NaiveMoe
from minideepinfer_residual.naive import NaiveResidual
from torch import Tensor

TINY_A = GOLDEN / "tiny-a"
ACME = Path(__file__).parents[1] / "examples/acme_ops"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def failed(report: Report) -> set[tuple[str, str]]:
    """Part and module of every failure."""
    return {(cell.part, cell.module) for cell in report.failures}


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


def transposed(self: NaiveResidual, streams: Tensor, output: Tensor, site: Any) -> Tensor:
    return MIX(self, streams, output, type(site)(site.pre, site.post, site.comb.mT))


def doubled(self: NaiveEpilogue, streams: Tensor, *arguments: Any) -> Tensor:
    return streams + 1.01 * (INJECT(self, streams, *arguments) - streams)


NAIVE_ATTENTION, NAIVE_INDEXER = NaiveAttention.run, NaiveIndexer.run
NAIVE_MOE, NAIVE_ROUTE = NaiveMoe.run, NaiveMoe.route
MIX, INJECT = NaiveResidual.mix, NaiveEpilogue.inject
MISTAKES: list[tuple[Any, str, Callable[..., Any], set[str]]] = [
    (NaiveAttention, "run", sinkless, {"attention"}),
    (NaiveAttention, "run", sinkless_decode, {"attention"}),
    (NaiveIndexer, "run", newest, {"selection"}),
    (NaiveIndexer, "run", one_candidate_less, {"candidates"}),
    (NaiveMoe, "run", without_shared, {"experts"}),
    (NaiveMoe, "route", unbiased, {"routing"}),
    (NaiveResidual, "mix", transposed, {"mhc"}),
    (NaiveEpilogue, "inject", doubled, {"engram"}),
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
        "minideepinfer.runtime.setup.load_registry", lambda ignore: load_registry(ignore, [*known, *points])
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
    module = plugins.module(build=lambda context: Sinkless(context.problem, context.clock))
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
