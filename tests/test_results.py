"""Operators that return something else than the contract says are stopped, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from minideepinfer import LLM, EngineConfig
from minideepinfer.errors import OperatorError
from minideepinfer.operators import Arrived, IndexerOutput, Phase, Selection


class Wrapped:
    """An operator whose result is changed on the way out."""

    def __init__(self, operator: Any, change: Any) -> None:
        self._operator, self._change = operator, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def run(self, *arguments: Any, **named: Any) -> Any:
        return self._change(self._operator.run(*arguments, **named))


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("tiny", EngineConfig(dtype="float32")) as model:
        yield model


@pytest.mark.parametrize(
    ("family", "layer", "change", "words"),
    [
        ("attention", 3, lambda o: o[:1], r"attention operator of layers.3 \(prefill\) returned \[1, 8, 64\]"),
        ("attention", 3, lambda o: o.flatten(1), r"\[4, 512\] in torch.float32; \[4, 8, 64\]"),
        ("attention", 0, lambda o: o.double(), "torch.float64"),
        ("attention", 0, lambda o: None, "returned NoneType"),
        ("attention", 0, lambda o: o.to("meta"), r"\[4, 8, 64\] in torch.float32 on meta; .* on cpu is needed"),
        ("moe", 5, lambda o: o.to_sparse(), "returned sparse"),
        ("moe", 5, lambda o: o[:, :1], r"moe operator of layers.5 \(prefill\) returned \[4, 1\]"),
        ("moe", 5, lambda o: o.bfloat16(), "torch.bfloat16"),
        ("indexer", 2, lambda o: (o.selection, None), "indexer of layers.2 .* returned tuple"),
        ("indexer", 2, lambda o: IndexerOutput(Selection(o.selection.indices.long())), "torch.int64"),
        ("indexer", 5, lambda o: IndexerOutput(o.selection), "returned NoneType"),
        ("indexer", 5, lambda o: IndexerOutput(o.selection, o.candidates[:1]), r"returned \[1, 12\]"),
    ],
)
def test_a_wrong_result_is_named(
    llm: LLM, family: str, layer: int, change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = llm.engine.runner.model.blocks[layer]
    table: Any = block.moe if family == "moe" else getattr(block.attention, family)
    monkeypatch.setitem(table, Phase.PREFILL, Wrapped(table[Phase.PREFILL], change))
    with pytest.raises(OperatorError, match=words):
        llm.forward([[0, 396, 739, 23]])
    monkeypatch.undo()
    assert torch.isfinite(llm.forward([[0, 396, 739, 23]])[0]).all()


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("advance", lambda entered: entered._replace(x=entered.x[:1]), r"residual operator \(prefill\) returned \[1,"),
        ("enter", lambda entered: entered._replace(site=None), "returned NoneType"),
        ("enter", lambda entered: entered.x, "returned Tensor; an Entered is needed"),
        ("mix", lambda streams: streams.double(), "torch.float64"),
        ("mix", lambda streams: streams.to("meta"), "on meta"),
        ("collapse", lambda x: x[:, :1], r"returned \[4, 1\]"),
    ],
)
def test_a_wrong_residual_result_is_named(
    llm: LLM, method: str, change: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = llm.engine.runner.model.mixing.operators[Phase.PREFILL]
    right = getattr(operator, method)
    monkeypatch.setattr(operator, method, lambda *arguments: change(right(*arguments)))
    with pytest.raises(OperatorError, match=words):
        llm.forward([[0, 396, 739, 23]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: None, "returned NoneType"),
        (lambda rows: rows[:1], "returned 1 tensors; a tensor for each of 2 tables is needed"),
        (lambda rows: (rows[0], None), "returned NoneType"),
        (lambda rows: (rows[0][:1], rows[1]), r"returned \[1, "),
        (lambda rows: (rows[0], rows[1].double()), "torch.float64"),
        (lambda rows: (rows[0].to("meta"), rows[1]), "on meta"),
    ],
)
def test_wrong_rows_of_a_table_are_named(llm: LLM, change: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = llm.engine.runner.model.blocks[0].comm
    right = comm.fetch_rows
    monkeypatch.setattr(comm, "fetch_rows", lambda *arguments: Arrived(change(right(*arguments).wait())))
    with pytest.raises(OperatorError, match=rf"comm operator \(fetch_rows\).*{words}"):
        llm.forward([[0, 396, 739, 23]])
