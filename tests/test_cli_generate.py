"""The command `mini-deepinfer generate`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from minideepinfer import LLM
from minideepinfer.cli.generate import DEFAULT_PROMPT
from minideepinfer.cli.main import main
from minideepinfer.operators import FAMILIES, Stage

SQLITE = json.loads((Path(__file__).parent / "data" / "trained" / "golden.json").read_text())["greedy"]["sqlite3-open"]
EXACT = ["--set", "dtype=float32", "--set", "device=cpu", "--set", "kv_quantization=none"]
STAGES = {str(stage) for stage in Stage} - {Stage.COMMUNICATION} | {"sampling"}


def data_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", "--json", *EXACT, *arguments]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_text_is_shown_with_plan_stages_rates_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "tiny", SQLITE["prompt_text"], "--max-tokens", "6", *EXACT]) == 0
    out, err = capsys.readouterr()
    assert "attention  layers 0-9" in out
    assert out.index("attention  layers") < out.index(SQLITE["prompt_text"] + " is used to open the database")
    for stage in STAGES:
        assert f" {stage} " in out
    assert "prefill: 8 tokens, " in out
    assert "decode: 5 tokens, " in out
    assert "peak memory: " in out
    assert err == "", "no progress bars where stderr is no terminal"


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert SQLITE["prompt_text"] == DEFAULT_PROMPT
    data = data_of(capsys, "--max-tokens", "4", "--logprobs", "1")
    assert data["token_ids"] == SQLITE["new_ids"][:4]
    assert SQLITE["new_text"].startswith(data["text"])
    assert data["finish_reason"] == "length"
    assert [next(iter(entry)) for entry in data["logprobs"]] == [str(i) for i in data["token_ids"]]
    assert {row["stage"] for row in data["stages"]} == STAGES
    assert sum(row["share"] for row in data["stages"]) == pytest.approx(1)
    assert (data["prefill_tokens"], data["decode_tokens"]) == (8, 3)
    seconds = sum(data[f"{phase}_tokens"] / data[f"{phase}_tokens_per_s"] for phase in ("prefill", "decode"))
    assert sum(row["milliseconds"] for row in data["stages"]) == pytest.approx(1e3 * seconds, rel=0.05)
    assert data["peak_memory_bytes"] > 1 << 20
    assert {row["family"] for row in data["plan"]} == set(FAMILIES)
    assert data["work"] == {"encoder_rows": 11, "decoder_rows": 11, "layer_rows": 110}
    assert data["prefix"] is None
    assert data["other_continuations"] == []


def test_continuations_share_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ("--max-tokens", "6", "--temperature", "1", "--ignore-eos", "--seed")
    data = data_of(capsys, "--n", "3", *sampled, "4")
    others = data["other_continuations"]
    assert [data["token_ids"], *(other["token_ids"] for other in others)] == [
        data_of(capsys, *sampled, seed)["token_ids"] for seed in ("4", "5", "6")
    ]
    assert data["prefill_tokens"] == 8 and data["decode_tokens"] == 15
    assert data["forks"] == {"forks": 2, "shared_pages": 0, "copied_pages": 2, "started_over": 0}
    assert main(["generate", *EXACT, "--n", "3", *sampled, "4", "--set", "cache.prefix=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index(f"[1] {others[0]['text']}".splitlines()[0]) > 0
    assert "work: 23 rows before the candidate source, 23 from it on; 230 rows x layers" in lines
    assert "prefix cache: 0 hits of 1 prompts, 0 of 8 tokens; 0 pages evicted" in lines
    assert "forks: 2, 0 pages shared, 2 copied; 0 started over" in lines
    assert any(line.startswith("caches (float32): ") and line.endswith(" a request") for line in lines)


def test_ids_sampling_and_stop_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    ids = ",".join(map(str, SQLITE["prompt_ids"]))
    data = data_of(capsys, "--ids", ids, "--stop", "never", "--stop", "to open")
    assert (data["text"], data["finish_reason"]) == (" is used ", "stop")
    sampled = ("--ids", ids, "--max-tokens", "5", "--temperature", "1.2", "--top-p", "0.9", "--top-k", "50", "--seed")
    first, again, other = (data_of(capsys, *sampled, seed)["token_ids"] for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "0,99999"], "token 1 of the prompt is 99999"),
        (["--ids", "0,4"], "is the image token 4"),
        (["--temperature", "-1"], "sampling parameters: temperature"),
        (["--n", "0"], "sampling parameters: n: "),
        (["--max-tokens", "5000"], "the model has 1024"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--set", "cache.pages=3"], "unknown key"),
        (["--ops", "attention=fast"], "fast"),
        (["--nproc", "2", "--set", "parallel.expert=4"], "--nproc is 2, but the engine config asks for 4 ranks"),
    ],
)
def test_mistakes_give_a_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", *arguments]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [["--ids", "1,x"], ["text", "--ids", "1"], ["--max-tokens", "many"], ["--nproc", "x"], ["--nproc", "0"]],
)
def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["generate", *arguments]) == 2
    assert "usage: mini-deepinfer generate" in capsys.readouterr().err


def test_ctrl_c_ends_cleanly_and_keeps_what_came() -> None:
    command = [sys.executable, "-m", "minideepinfer", "generate", "--ids", "0,396", "--max-tokens", "1000"]
    process = subprocess.Popen(
        [*command, "--ignore-eos", *EXACT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell's background job ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    plan_and_first_text = "".join(process.stdout.readline() for _ in FAMILIES) + process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "mini-deepinfer: interrupted\n"
    assert plan_and_first_text.startswith("attention  layers 0-9")
    assert "decode: " in rest


def test_ctrl_c_still_gives_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = LLM.step, iter(range(3))

    def interrupted(llm: LLM) -> bool:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return run(llm)

    monkeypatch.setattr(LLM, "step", interrupted)
    assert main(["generate", "--json", *EXACT]) == 130
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["token_ids"] == SQLITE["new_ids"][:3]
    assert data["finish_reason"] is None
    assert err == "mini-deepinfer: interrupted\n"
