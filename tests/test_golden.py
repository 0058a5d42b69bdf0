"""Both golden models, every variant and sequence, whole and chunked; the command; the measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sets import GOLDEN, change_tensors, linked_set
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.golden import Report, verify
from minideepinfer.testing.golden_bounds import Variant
from minideepinfer.testing.golden_measures import as_mask, jaccard_distance, relative_l2, relative_l2_rows
from minideepinfer.testing.golden_runs import run_sequence
from minideepinfer.testing.golden_set import GoldenSet
from torch import Tensor

SETS = ("tiny-a", "tiny-b")
TINY_A = GOLDEN / "tiny-a"


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
    kept = ["layers.0.attn.in", "layers.0.attn.out", "layers.1.ffn.in", "layers.1.ffn.out"]
    kept += ["layers.3.attn.in", "layers.3.attn.out", "layers.2.index.topk", "layers.2.attn.compressed_kv"]

    def strip(tensors: dict[str, Tensor]) -> None:
        for name in set(tensors) - set(kept):
            del tensors[name]

    change_tensors(path, "golden.s7.fp32-noq.safetensors", strip)
    report = verify(path, variants=["fp32-noq"], sequences=["s7"])
    # Without ids there is no routing to force, so that the experts' output is not comparable.
    # Nor are layer 3's attention and selection, since nothing can publish the entries of its source, layer 2.
    assert {cell.tensor for cell in report.cells if cell.part == "modules"} == {kept[1]}
    assert report.ok
    assert report.not_compared()["layers.*.ffn.in"] == 1


def test_nothing_compared_is_a_failure() -> None:
    report = verify(TINY_A, sequences=["s37"])  # of which this set has the draft only
    assert not report.cells
    assert not report.ok


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
