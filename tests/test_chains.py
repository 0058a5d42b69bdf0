"""Operators with a selection layout of their own, which the kit completes and compares at their ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_plugins import declaration
from mask_pair import LAYOUT
from minideepinfer import LLM, EngineConfig
from minideepinfer.operators import OperatorRegistry, Properties, RegisteredOperator, Tier, load_registry
from minideepinfer.runtime import setup
from minideepinfer.testing.chains import conformances
from minideepinfer.testing.checking import check_operator
from minideepinfer.testing.recipes.batch import BatchRecipe
from minideepinfer.testing.recipes.chain import ChainRecipe
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import including

NAIVE = load_registry()
SMALL = replace(PROFILES["quick"], examples=8, shrink=False)
CACHES = ("float32", "bf16")


def operator(family: str, name: str, build: str, layouts: tuple[str, ...] = (LAYOUT,)) -> RegisteredOperator:
    roles = (
        {"accepts": {"cache": CACHES}, "emits": {"selection": layouts}}
        if family == "indexer"
        else {"accepts": {"cache": CACHES, "selection": layouts}}
    )
    promises = Properties(deterministic=True, batch_invariant=family == "attention")
    made = declaration(name, family, build=f"mask_pair:{build}", tier=Tier.EXPERIMENTAL, properties=promises, **roles)
    return RegisteredOperator(made, "odd", "1", "ops")


INDEXER = operator("indexer", "mask", "build_indexer")
ATTENTION = operator("attention", "mask", "build_attention")
SHIFTED = operator("attention", "shifted", "build_shifted")


def registry_of(*operators: RegisteredOperator) -> OperatorRegistry:
    registry = NAIVE
    for each in operators:
        registry = including(registry, each)
    return registry


@pytest.mark.parametrize("tested", [INDEXER, ATTENTION], ids=["indexer", "attention"])
def test_a_pair_with_a_layout_of_its_own_passes(tested: RegisteredOperator) -> None:
    report = check_operator(tested, registry_of(INDEXER, ATTENTION), SMALL)
    assert report.passed, report.failures
    assert {"mask/matches-reference", "mask/I1", "mask/I2", "mask/end-to-end"} <= set(report.held)
    assert all(name.startswith("mask/") for name in report.held)
    assert report.calls > 300 and not report.refused and report.worst > 0


def test_a_broken_partner_fails_at_the_end() -> None:
    report = check_operator(INDEXER, registry_of(INDEXER, SHIFTED), SMALL)
    failed = {outcome.name: outcome for outcome in report.failures}
    assert {"shifted/matches-reference", "shifted/I1", "shifted/end-to-end"} <= set(failed)
    assert not any(outcome.crash for outcome in failed.values())
    assert "ChainRecipe(" in failed["shifted/matches-reference"].code


def test_each_partner_makes_a_chain() -> None:
    chains = conformances(INDEXER, registry_of(INDEXER, ATTENTION, SHIFTED))
    assert [chain.partner.name for chain in chains if chain.partner] == ["mask", "shifted"] and len(chains) == 2
    both = operator("attention", "both", "build_attention", (LAYOUT, "token_indices/1"))
    chains = conformances(both, registry_of(INDEXER, both))
    assert [chain.partner and chain.partner.name for chain in chains] == [None, "mask"]


def test_a_layout_that_nobody_completes_fails() -> None:
    report = check_operator(INDEXER, registry_of(INDEXER), SMALL)
    reasons = {outcome.name: outcome.reason for outcome in report.failures}
    assert reasons["completed"] == (
        f"selection layout {LAYOUT} cannot be judged: no attention operator that knows it is registered"
    )


def test_both_calls_of_a_chain_share_pages() -> None:
    case = ChainRecipe(BatchRecipe((3, 2), (9, 4)), compress_ratio=2).build()
    assert torch.equal(case.indexer.batch.block_table, case.attention.batch.block_table)
    assert torch.equal(case.indexer.batch.ring_table, case.attention.batch.ring_table)


def test_a_model_runs_with_the_pair_and_its_selection_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_registry", lambda ignore: registry_of(INDEXER, ATTENTION))
    ids = [[5 + 3 * i for i in range(20)]]
    logits = {}
    for name in ("naive", "mask"):
        config = EngineConfig(dtype="float32", device="cpu", ops={"indexer": name, "attention": name})
        with LLM("tiny", config) as llm:
            logits[name], captured = llm.forward(ids, capture=["layers.*.index.*"])
            assert any("topk" in key for key in captured[0]) == (name == "naive")
    assert torch.allclose(logits["mask"][0], logits["naive"][0], atol=1e-4)
