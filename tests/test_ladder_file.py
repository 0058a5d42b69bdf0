"""What a ladder file may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from minideepinfer.errors import ConfigError
from minideepinfer.measure.ladder.file import PRESETS, make_ladder, packaged_ladder, read_ladder
from minideepinfer.measure.prefill import PRESETS as PROBLEMS

FIRST = {"name": "first", "engine": {"ops": {"attention": "naive", "moe": "naive"}}}


def test_the_packaged_ladders_are_those_of_the_prefill_presets() -> None:
    assert set(PRESETS) == set(PROBLEMS)
    for preset in PRESETS:
        ladder = packaged_ladder(preset)
        assert ladder.preset == preset
        assert ladder.rungs[0].engine.replay == "full"
        assert {rung.engine.replay for rung in ladder.rungs} == {"full", "bounded"}


def test_the_ladder_of_the_fixed_benchmark_changes_one_thing_at_a_time() -> None:
    rungs = {rung.name: rung for rung in packaged_ladder("v41-rank").rungs}
    for rung in list(rungs.values())[1:]:
        assert rung.builds_on is not None
        now, before = rung.engine, rungs[rung.builds_on].engine
        families = [family for family in now.ops if now.ops[family] != before.ops[family]]
        assert len(families) + (now.replay != before.replay) == 1, rung.name


def test_a_rung_starts_from_the_one_that_it_builds_on() -> None:
    fused = {"name": "fused", "options": {"gate": "torch"}}
    ladder = make_ladder(
        {
            "steps": 4,
            "engine": {"kv_quantization": "none"},
            "rung": [
                FIRST,
                {"name": "second", "engine": {"ops": {"moe": fused}}, "steps": 1},
                {"name": "third", "engine": {"ops": {"moe": "fused"}}},
                {"name": "fourth", "engine": {"replay": "bounded"}, "builds_on": "first", "layers": 3},
            ],
        }
    )
    first, second, third, fourth = ladder.rungs
    assert [rung.builds_on for rung in ladder.rungs] == [None, "first", "second", "first"]
    assert {rung.engine.kv_quantization for rung in ladder.rungs} == {"none"}
    assert second.engine.ops["moe"].options == {"gate": "torch"}  # type: ignore[union-attr]
    assert third.engine.ops == {"attention": "naive", "moe": "fused"}
    assert fourth.engine.ops == first.engine.ops
    assert (second.steps, third.steps, second.layers, fourth.layers) == (1, 4, None, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "rung: Field required"),
        ({"rung": []}, "rung is empty, needs at least one"),
        ({"rung": [FIRST], "preset": "big"}, "preset is 'big', needs v41-rank or tiny"),
        ({"rung": [FIRST], "speed": 1}, "speed: unknown key"),
        ({"rung": [FIRST, {"name": "+A", "ops": {}}]}, "rung '+A': ops: unknown key"),
        ({"rung": [FIRST, {"name": "+A", "steps": 0}]}, "rung '+A': steps: Input should be greater than 0 (found 0)"),
        (
            {"rung": [FIRST, {"name": "+A", "warmup": -1}]},
            "rung '+A': warmup: Input should be greater than or equal to 0",
        ),
        ({"rung": [{"says": "nothing"}]}, "rung.0.name: Field required"),
        ({"rung": [FIRST, FIRST]}, "rung 'first': name is that of an earlier rung"),
        (
            {"rung": [FIRST, {"name": "+A", "builds_on": "+B"}]},
            "rung '+A': builds_on is '+B', needs an earlier rung: fi",
        ),
        ({"rung": [FIRST, {"name": "+A", "engine": {"opps": 1}}]}, "rung '+A': engine: opps: unknown key"),
        ({"rung": [FIRST, {"name": "+A", "engine": {"replay": "half"}}]}, "rung '+A': engine: replay: Input should be"),
        ({"rung": [FIRST, {"name": "+A", "engine": {"dtype": "bfloat16"}}]}, "rung '+A': engine.dtype is 'bfloat16'"),
        (
            {"rung": [FIRST], "engine": {"parallel": {"expert": 2}}},
            "a ladder runs in one process, needs none",
        ),
        (
            {"rung": [{"name": "+A", "engine": {"replay": "bounded"}}]},
            "rung '+A': engine.replay is 'bounded', the first",
        ),
    ],
)
def test_errors_name_the_rung_and_the_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_ladder(data, "l.toml")
    assert str(caught.value).startswith("l.toml: ")
    assert message in str(caught.value)


def test_a_file_that_is_no_ladder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        read_ladder(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_text("[[rung]\n")
    with pytest.raises(ConfigError, match=r"odd\.toml: cannot be parsed"):
        read_ladder(tmp_path / "odd.toml")
