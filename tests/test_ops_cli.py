"""`ops explain`, `config show`, and the arguments that every command shares."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.cli.config import toml_lines
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig
from minideepinfer.operators import FAMILIES

GOLDEN = Path(__file__).parent / "data/golden/tiny-a"


def test_explain_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "explain", "--ops", "moe=naive", "--set", "device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "device cpu, dtype float32, cache layout float32" in text
    assert "naive (mini-deepinfer" in text and "explicit: ops.moe" in text
    assert main(["ops", "explain", "--model", str(GOLDEN), "--set", "device=cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {entry["family"] for entry in data["operators"]} == set(FAMILIES)
    assert data["dtype"] == "float32"


def test_a_wrong_choice_is_a_message_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "explain", "--ops", "attention=nothing", "--set", "device=cpu"]) == 1
    assert capsys.readouterr().err.startswith("mini-deepinfer: ops.attention: there is no attention operator 'nothing'")
    for wrong in (["--ops", "attention"], ["--set", "dtype"], ["--set", "=3"], ["--set", "a..b=3"]):
        assert main(["ops", "explain", *wrong]) == 2


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=6)
OPTION = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(TEXT, OPTION, max_size=3))
def test_config_show_can_be_read_back(options: dict[str, Any]) -> None:
    choice = {"name": "fast", "options": options}
    config = EngineConfig(dtype="float32", ops={"attention": {"layers": {"0-2": {"decode": choice}}}, "moe": choice})
    text = "\n".join(toml_lines(config.model_dump(mode="json", exclude_none=True)))
    assert EngineConfig.from_dict(tomllib.loads(text)) == config


def test_settings_change_the_file_in_order(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('dtype = "float32"\n[cache]\nnum_pages = 7\npage_tokens = 32\n[ops]\nattention = "naive"\n')
    arguments = ["--config", str(file), "--set", "cache.num_pages=9", "--ops", "moe=naive,comm=single"]
    assert main(["config", "show", *arguments, "--set", "ops.moe=auto", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dtype"] == "float32"
    assert (data["cache"]["num_pages"], data["cache"]["page_tokens"]) == (9, 32)
    assert data["ops"] == {"attention": "naive", "moe": "auto", "comm": "single"}
    assert main(["config", "show", *arguments, "--set", "ops.attention.decode=naive"]) == 1
    assert "ops.attention is 'naive', not a table" in capsys.readouterr().err
    assert main(["config", "show", "--set", "cache.pages=9"]) == 1
    assert "cache.pages: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--seed", "-1"], 1, "--seed -1: a number from 0 to 2**32 - 1 is needed"),
        (["--seed", "99999999999999999999"], 1, "a number from 0 to 2**32 - 1 is needed"),
        (["--plan", "moe=fused,moe=naive"], 2, "names a family twice"),
    ],
)
def test_check_refuses_impossible_arguments(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "check", "comm:single", *arguments]) == code
    assert message in capsys.readouterr().err
