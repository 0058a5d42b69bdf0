"""The prefix benchmark, at the size of the tiny config."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.prefix import PRESETS, PrefixBench, measure_prefix, rows_by_formula
from minideepinfer.measure.record import read_records

MODEL = ModelConfig.from_file(Path(__file__).parent / "data/config.tiny.json")
CPU = EngineConfig(device="cpu")
TINY = PRESETS["tiny"]
REPLAYS = ("full", "halo", "bounded")


@pytest.fixture(scope="module")
def bench() -> PrefixBench:
    return PrefixBench(MODEL, CPU, TINY)


def arrived(bench: PrefixBench, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Own rows that reach the experts of each layer from now on."""
    others, rows = bench.rank.others, Counter[int]()
    assert others is not None
    dispatch = others.dispatch

    def counted(x: Any, *rest: Any) -> Any:
        rows[others.next_layer] += len(x)
        return dispatch(x, *rest)

    monkeypatch.setattr(others, "dispatch", counted)
    return rows


@pytest.mark.parametrize("replay", REPLAYS)
def test_rows_that_reach_the_experts_are_those_counted_and_those_of_the_formula(
    bench: PrefixBench, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = bench.engine(replay), MODEL.text_config
    for run, hit in ((bench.cold, 0), (bench.hit, TINY.hit)):
        with monkeypatch.context() as patch:
            rows = arrived(bench, patch)
            found = run(engine)
        encoder, decoder = rows_by_formula(text, replay, TINY.prompt, hit)
        assert found.hit == hit
        assert [rows[layer] for layer in (0, text.candidate_source_layer_id)] == [encoder, decoder]
        assert found.layer_rows == sum(rows.values())


def test_formulas_at_the_released_sizes() -> None:
    text = ModelConfig.from_file(Path(__file__).parent / "data/config.full.json").text_config
    rows = {(replay, hit): rows_by_formula(text, replay, 131072, hit) for replay in REPLAYS for hit in (0, 126976)}
    assert {rows[replay, 0][0] for replay in REPLAYS} == {131072}
    assert [rows[replay, 0][1] for replay in REPLAYS] == [131072, 2414, 128]
    assert rows["full", 126976] == (4096 + 127 * 40, 4096 + 127 * 40)
    assert rows["halo", 126976] == (4096 + 127 * 20, 2414)
    assert rows["bounded", 126976] == (4096 + 128, 128)


def test_every_hit_is_the_same_one_and_a_cold_run_has_none(bench: PrefixBench) -> None:
    engine = bench.engine("bounded")
    bench.warm_up(engine)
    cold = bench.cold(engine)
    hits = [bench.hit(engine) for _ in range(2)]
    assert (cold.hit, [run.hit for run in hits]) == (0, [TINY.hit] * 2)
    assert (len(cold.steps), {len(run.steps) for run in hits}) == (3, {2})
    assert cold.milliseconds == pytest.approx(1e3 * engine.throughput.prefill_seconds, rel=0.9)


def test_records_of_several_replays(bench: PrefixBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "problem", replace(TINY, replays=("full", "bounded"), repeats=2))
    full, bounded = measure_prefix(bench)
    assert (full.name, bounded.name) == ("prefix, full", "prefix, bounded")
    assert (full.precision["replay"], bounded.precision["replay"]) == ("full", "bounded")
    assert bounded.headline.startswith("one rank of 2, no network; dtype float32, ")
    assert "replay bounded; 12 of 12 layers" in bounded.headline
    for record in (full, bounded):
        values = record.values
        assert values["cold_layer_rows"] == values["cold_layer_rows_by_formula"]
        assert values["hit_layer_rows"] == values["hit_layer_rows_by_formula"]
        assert (values["cold"].repeats, values["hit"].repeats, values["cold_step"].repeats) == (1, 2, 3)
        assert values["cold_tokens_per_second"].median == pytest.approx(1e3 * TINY.prompt / values["cold"].median)
        assert (
            values["hit_over_cold"].low <= values["hit"].median / values["cold"].median <= values["hit_over_cold"].high
        )
    assert "step_over_full" not in full.values
    assert bounded.values["step_over_full"].repeats == 2, "the last chunk has rows for the decoder"
    assert 0 < bounded.values["step_over_full"].median < 1


def test_the_command_prints_keeps_and_compares_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "records.json"
    arguments = ["--replay", "bounded,full", "--repeats", "1", "--layers", "8", "--output", str(file)]
    assert main(["bench", "prefix", "--preset", "tiny", *arguments]) == 0
    out = capsys.readouterr().out
    assert (
        "the same prompt of 192 tokens cold and with a hit of 128, in steps of at most 64 rows, in replay full, then"
        in out
    )
    assert "prefix, full: cold rows x layers 1,536, by formula 1,536" in out, "8 of 12 layers"
    assert "prefix, bounded: hit rows x layers 448, by formula 448" in out
    assert "prefix, bounded: the decoder skip saves " in out
    assert [record.name for record in read_records(file)] == ["prefix, full", "prefix, bounded"]
    assert main(["bench", "compare", str(file), str(file)]) == 0
    assert "prefix prefix, bounded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "prefix benchmark: repeats is 0; at least 1 is needed"),
        (["--layers", "0"], "prefix benchmark: num_layers is 0; at least 1 is needed"),
        (["--replay", "full,full"], "replay full,full; each is measured once"),
        (["--set", "replay=full"], "--set replay: the benchmark's problem decides it"),
        (["--set", "max_tokens_per_step=9"], "--set max_tokens_per_step: the benchmark's problem decides it"),
        (["--set", "cache.page_tokens=48"], "a hit of 128 tokens in a prompt of 192 is not made of whole pages"),
        (["--output", "/"], "/: cannot be written (Is a directory)"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prefix", "--preset", "tiny", *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_an_unknown_replay_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefix", "--preset", "tiny", "--replay", "half"]) == 2
    assert "'half' is none of full, halo, bounded" in capsys.readouterr().err


def test_a_hit_of_another_length_is_no_result(bench: PrefixBench, monkeypatch: pytest.MonkeyPatch) -> None:
    hit = bench.hit
    monkeypatch.setattr(bench, "hit", lambda engine: replace(hit(engine), hit=64))
    with pytest.raises(ConfigError, match="64 tokens were found, not those of the problem"):
        next(measure_prefix(bench))
