"""Faults that fresh readers found: threads on one model, tokenizer settings, plugins that exit."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import minideepinfer
import pytest
import torch
from fake_plugins import FakeDistribution
from minideepinfer import LLM, EngineConfig, SamplingParams
from minideepinfer.config import ModelConfig
from minideepinfer.errors import CheckpointError, PluginError, RequestError
from minideepinfer.operators import load_registry
from minideepinfer.runtime.tokenizer import load_tokenizer

TINY = Path(minideepinfer.__file__).parent / "data/tiny"
TEXT = "To create a new database, you must call it"


def copied(directory: Path, **settings: object) -> Path:
    """Tokenizer files of the packaged checkpoint with changed entries of `tokenizer.json`."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, directory / name)
    data = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(data | settings))
    return directory


@pytest.mark.parametrize(
    "settings",
    [
        {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 50},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 2,
                "pad_type_id": 0,
                "pad_token": "<|pad|>",
            }
        },
    ],
    ids=["truncation", "padding"],
)
def test_a_prompt_is_taken_whole(tmp_path: Path, settings: dict[str, object]) -> None:
    config = ModelConfig.from_file(TINY)
    expected = load_tokenizer(TINY, config).encode(TEXT)
    assert load_tokenizer(copied(tmp_path, **settings), config).encode(TEXT) == expected


def test_a_begin_token_setting_that_is_no_bool(tmp_path: Path) -> None:
    copied(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": "true"}')
    with pytest.raises(CheckpointError, match="true or false is needed"):
        load_tokenizer(tmp_path, ModelConfig.from_file(TINY))


def test_a_dangling_tokenizer_is_damage(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, ModelConfig.from_file(TINY))


def test_a_plugin_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaver.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"acme.*SystemExit"):
        load_registry(points=FakeDistribution("acme", {"ops": "leaver"}, "1.0").points)


def test_another_thread_gives_up_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step it took the pages away that the step was about to publish."""
    cache = {"prefix": True, "page_tokens": 8}
    with LLM("tiny", EngineConfig(dtype="float32", cache=cache)) as llm:
        doomed, other = (llm.start([0, *range(5, 30)], SamplingParams(max_tokens=n, ignore_eos=True)) for n in (9, 3))
        thread, forward = threading.Thread(target=llm.abort, args=(doomed,)), llm.engine.runner.model.forward

        def in_the_middle(step: Any) -> torch.Tensor:
            thread.start()
            thread.join(0.2)
            assert doomed.finish_reason is None, "it waits"
            return forward(step)

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner.model, "forward", in_the_middle)
            llm.step()
        thread.join()
        while llm.step():
            pass
        assert (doomed.finish_reason, other.finish_reason) == ("abort", "length")
        assert len(doomed.token_ids) >= 1


def test_one_thread_at_a_time() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    refused: list[RequestError] = []

    def other() -> None:
        try:
            llm.generate([[0, 5]], params)
        except RequestError as error:
            refused.append(error)

    with LLM("tiny", EngineConfig(dtype="float32")) as llm:
        expected = llm.generate([[0, 396]], params)[0].token_ids
        stream = llm.stream([0, 396], params)
        tokens = list(next(stream).token_ids)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        tokens += [token for chunk in stream for token in chunk.token_ids]
        assert tokens == expected
        assert "another thread" in str(refused[0])
        refused.clear()
        thread = threading.Thread(target=other)  # nothing runs any more: another thread may take over
        thread.start()
        thread.join()
        assert refused == []


def test_two_threads_may_step_together() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            barrier.wait()
            while llm.step():
                pass
        except BaseException as error:
            failed.append(error)

    with LLM("tiny", EngineConfig(dtype="float32")) as llm:
        expected = llm.generate([[0, 396]], params)[0].token_ids
        for _ in range(3):
            generation, barrier = llm.start([0, 396], params), threading.Barrier(2)
            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failed == [] and generation.output().token_ids == expected


def test_a_model_does_not_keep_experts_that_an_operator_holds_in_its_own_form() -> None:
    with LLM("tiny", EngineConfig(device="cpu")) as llm:
        model = llm.engine.runner.model
        assert all(layer.moe is None for layer in model.weights.layers)
        assert all(block.weights.moe is None for block in model.blocks)
        assert all(block.moe_weights for block in model.blocks)
