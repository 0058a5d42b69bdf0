"""Intermediates by name: whole, in order, request by request; a pattern that matches nothing is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from minideepinfer import LLM, EngineConfig, RequestError

IDS = json.loads((Path(__file__).parent / "data/trained/golden.json").read_text())["snippets"]["kjv-217"]["ids"]
EXACT = EngineConfig(dtype="float32", device="cpu", kv_quantization="none")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", EXACT.model_copy(update={"max_tokens_per_step": 11})) as llm:
        yield llm


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm())


def test_embedded_rows_are_those_of_the_tokens_in_order_whatever_the_steps(llm: LLM) -> None:
    sequences = [IDS[:37], IDS[50:51], IDS[60:85]]
    _, captured = llm.forward(sequences, capture=["embed"], num_prompt_tokens=[30, 1, 2])
    table = llm.engine.runner.model.weights.embed
    for ids, tensors in zip(sequences, captured, strict=True):
        assert set(tensors) == {"embed"}
        assert torch.equal(tensors["embed"], table[ids].float())


def test_rows_and_entries_of_a_neighbour_do_not_mix_in(llm: LLM) -> None:
    patterns = ["layers.*.attn.compressed_kv", "layers.5.index.keys", "layers.*.streams_out", "final.normed"]
    sequences = [IDS[:29], IDS[40:55]]
    logits, together = llm.forward(sequences, capture=patterns)
    for ids, captured, row in zip(sequences, together, logits, strict=True):
        _, (alone,) = llm.forward([ids], capture=patterns)
        assert set(captured) == set(alone)
        assert len(captured["layers.2.attn.compressed_kv"]) == len(ids) // 2, "one entry per pair"
        assert len(captured["layers.5.index.keys"]) == len(captured["layers.9.streams_out"]) == len(ids)
        for name in alone:
            assert distance(captured[name], alone[name]) < 1e-5, name
        head = llm.engine.runner.model.weights.head
        assert distance(captured["final.normed"].float() @ head.T, row) < 1e-6


def test_recording_changes_no_number(llm: LLM) -> None:
    assert torch.equal(llm.forward([IDS[:30]], capture=["*"])[0][0], llm.forward([IDS[:30]])[0])


@pytest.mark.parametrize("pattern", ["layers.*.attn.outt", "layers.10.attn.out", "attn.out", ""])
def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are(llm: LLM, pattern: str) -> None:
    with pytest.raises(RequestError, match=r"matches nothing; there are embed, final\.normed, layers\.L\.attn") as info:
        llm.forward([IDS[:3]], capture=["final.normed", pattern])
    assert repr(pattern) in str(info.value)
    assert "layers.L.ffn.expert_ids" in str(info.value)


def test_patterns_must_be_strings(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"capture is \['embed', 3\]; a list of patterns is needed"):
        llm.forward([IDS[:3]], capture=["embed", 3])  # type: ignore[list-item]


def test_nothing_to_run_captures_nothing(llm: LLM) -> None:
    assert llm.forward([], capture=["embed"]) == ([], [])
