"""Whole models in the conformance kit: where an operator is used, and what is noticed there; cases L1 and L2."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from minideepinfer.checkpoint import reader
from minideepinfer.cli.main import main
from minideepinfer.errors import MiniDeepInferError
from minideepinfer.operators import FAMILIES, OperatorRegistry, Phase, RegisteredOperator, Support, load_registry
from minideepinfer.testing import end_to_end, loading, rehearsal
from minideepinfer.testing.checking import FAILED, PASSED, Outcome, check_one
from minideepinfer.testing.contract import Violation
from minideepinfer.testing.models import MODELS, altered_copy, checkpoint
from minideepinfer.testing.plans import check_plan
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tolerances import conformance
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "examples/acme_ops"))
from acme_ops.plugin import minideepinfer_operators as acme_declarations

REGISTRY: OperatorRegistry = load_registry()


def subject_of(family: str = "attention", **changes: Any) -> Subject:
    """The reference operator under another name, with limits of its own."""
    naive = REGISTRY.get(family, "single" if family == "comm" else "naive").declaration
    changed = replace(naive, name="limited", **changes)
    return Subject(RegisteredOperator(changed, "odd", "1", "ops"), REGISTRY, conformance(family))


def check(subject: Subject, name: str = "end-to-end") -> Outcome:
    return check_one(subject, subject.family.relation(name), PROFILES["quick"], 0)


@pytest.mark.parametrize("family", ["attention", "indexer", "moe", "comm"])
@pytest.mark.parametrize("name", ["end-to-end", "L1", "L2"])
def test_every_family_is_run_in_a_model(family: str, name: str) -> None:
    subject = subject_of(family)
    assert check(subject, name).status == PASSED
    assert family == "comm" or subject.tally.ran >= 6


def test_an_operator_is_used_where_it_serves() -> None:
    decode = subject_of(support=Support(phases=(Phase.DECODE,)))
    stage, places = end_to_end.nearest_model(decode, "float32")
    assert stage.path == checkpoint("small")
    assert places == [("attention", layer, Phase.DECODE) for layer in range(5)]
    assert check(decode).status == PASSED
    # Decode rows come in three of the five steps, in both dtypes.
    assert decode.tally.ran == 2 * 3 * 5
    pooled = subject_of(refuses=lambda problem: [] if problem.compress_ratio == 2 else ["has no pairs"])
    assert {key[1] for key in end_to_end.nearest_model(pooled, "float32")[1]} == {1, 2}
    assert check(pooled).status == PASSED


@pytest.mark.parametrize(("head_dim", "name"), [(64, "middle"), (512, "wide")])
def test_the_nearest_model_is_taken(monkeypatch: pytest.MonkeyPatch, head_dim: int, name: str) -> None:
    taken = []
    monkeypatch.setattr(end_to_end, "compare_in_model", lambda subject, stage, places: taken.append(stage.path))
    narrow = subject_of(refuses=lambda problem: [] if problem.head_dim == head_dim else [f"needs {head_dim}"])
    assert check(narrow).status == PASSED
    assert taken == [checkpoint(name)] * 2


def test_an_operator_that_serves_no_model_fails() -> None:
    outcome = check(subject_of(refuses=lambda problem: ["has a face, needs none"]))
    assert outcome.status == FAILED and "serves no layer of any model that the kit makes: has a face" in outcome.reason


@pytest.mark.parametrize("name", MODELS)
def test_models_have_every_kind_of_layer(name: str) -> None:
    from minideepinfer.config import ModelConfig

    layers = ModelConfig.from_file(checkpoint(name)).text_config.layers
    assert {layer.compress_ratio for layer in layers} == {0, 1, 2}
    assert any(layer.is_candidate_source for layer in layers) and any(layer.uses_candidates for layer in layers)
    assert any(layer.index_source not in (None, layer.layer_id) for layer in layers)
    assert any(layer.engram_index is not None for layer in layers)


def off_by(monkeypatch: pytest.MonkeyPatch, change: Any) -> Subject:
    """`naive` attention whose result is changed, but only inside a model that has it in its place."""
    subject = subject_of()
    load = rehearsal.Stage.runner

    def with_change(stage: Any, ops: Any) -> Any:
        runner = load(stage, ops)
        if ops == end_to_end.reference_ops(subject):
            return runner
        for block in runner.model.blocks:
            for operator in block.attention.attention.values():
                run = operator.operator.run  # type: ignore[attr-defined]
                operator.operator.run = lambda *a, run=run, **k: change(run(*a, **k))  # type: ignore[attr-defined]
        return runner

    monkeypatch.setattr(rehearsal.Stage, "runner", with_change)
    return subject


def test_logits_may_move_as_far_as_legal_errors_move_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(heads: Tensor) -> Tensor:
        return (heads.double() * (1 + 2.0**-22)).to(heads.dtype)

    moved = off_by(monkeypatch, rounded)
    assert check(moved).status == PASSED
    assert 0 < moved.tally.worst < 1


def test_logits_that_move_further_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = check(off_by(monkeypatch, lambda heads: heads * 1.01))
    assert outcome.status == FAILED and "logits of step 0, row" in outcome.reason and not outcome.crash


# L1 and L2


def test_a_loader_that_guesses_the_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reader.decode_fp8_blocks

    def usual(codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Tensor:
        wide = exponents.repeat_interleave(4, 0).repeat_interleave(4, 1)
        return right(codes, wide, dtype, (32, 32))

    monkeypatch.setattr(reader, "decode_fp8_blocks", usual)
    with pytest.raises(Violation, match="not its codes times the scales of"):
        loading.l1(subject_of())


def test_a_loader_that_accepts_anything_is_noticed() -> None:
    stage, _ = end_to_end.nearest_model(subject_of(), "float32")
    stage = replace(stage, path=altered_copy(stage.path))
    with pytest.raises(Violation, match="a checkpoint that contradicts its config is loaded"):
        loading.must_refuse(stage, {}, ("a block size",))
    assert not stage.path.exists()


# Plans


def test_a_plan_of_several_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "check", "--plan", "attention=naive,moe=naive"]) == 0
    text = capsys.readouterr().out
    assert "plan attention=naive, moe=naive in tiny, float32: passed" in text and "1 of 1 plans passed" in text


def test_a_plan_fails_where_an_operator_of_it_is_wrong() -> None:
    acme = [RegisteredOperator(d, "acme-ops", "0", "attention") for d in acme_declarations()]
    registry = OperatorRegistry([*(o for family in FAMILIES for o in REGISTRY.operators(family)), *acme])
    good = check_plan(registry, {"attention": "acme-tiled"})
    assert good.passed and 0 < good.worst < 1
    layers = {"default": "naive", "layers": {"3": {"decode": "acme-broken"}}}
    bad = check_plan(registry, {"attention": layers, "moe": "naive"})
    (failure,) = bad.failures
    assert "logits of step" in failure.reason


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"attention": "nothing"}, "there is no attention operator 'nothing'"),
        ({"tensor": "naive"}, "ops.tensor: is no operator family"),
    ],
)
def test_a_plan_that_is_none(ops: dict[str, str], message: str) -> None:
    with pytest.raises(MiniDeepInferError, match=message):
        check_plan(REGISTRY, ops)
