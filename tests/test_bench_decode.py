"""The decode benchmark, at the size of the tiny config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.decode import PRESETS, DecodeBench, measure_decode
from minideepinfer.measure.record import read_records
from minideepinfer.operators import Phase
from minideepinfer.runtime.scheduler import ScheduledRequest

MODEL = ModelConfig.from_file(Path(__file__).parent / "data/config.tiny.json")
CPU = EngineConfig(device="cpu")


@pytest.fixture(scope="module")
def bench() -> DecodeBench:
    return DecodeBench(MODEL, CPU, PRESETS["tiny"])


def test_every_request_decodes_one_token_behind_its_own_context(bench: DecodeBench) -> None:
    requests = bench.requests(4, 192)
    step, rows = bench.rank.new_step([ScheduledRequest(request, 1) for request in requests])
    assert step.encoder.phase == Phase.DECODE
    assert step.encoder.positions.tolist() == [192] * 4
    assert rows.tolist() == [0, 1, 2, 3]
    pages = [page for request in requests for page in request.pages]
    assert len(set(pages)) == len(pages)
    assert len({tuple(request.token_ids) for request in requests}) == 4


def test_every_step_computes_the_same(bench: DecodeBench) -> None:
    scheduled = [ScheduledRequest(request, 1) for request in bench.requests(3, 64)]
    bench.rank.rewind()
    first = bench.rank.run(scheduled)
    bench.rank.rewind()
    assert first.shape == (3, MODEL.text_config.vocab_size)
    assert torch.equal(first, bench.rank.run(scheduled))


def test_records_hold_bytes_and_their_floor(bench: DecodeBench) -> None:
    rates = {"copy_tb_s": 2.0, "float32_tflops": 1.0}
    problem = replace(bench.problem, batch_sizes=(1, 4), contexts=(64,))
    bench.problem = problem
    one, four = measure_decode(bench, rates=rates)
    assert (one.name, four.name) == ("batch 1, context 64", "batch 4, context 64")
    for record, batch in ((one, 1), (four, 4)):
        step, moved = record.values["step"].median, record.values["bytes"].median
        assert record.values["tokens_per_second"].median == pytest.approx(1e3 * batch / step)
        assert record.floors["step"] == pytest.approx(moved / 2e9)
        assert record.values["bandwidth"].median == pytest.approx(moved / step / 1e6)
        assert record.headline.startswith("one rank of 2, no network; dtype float32, ")
    assert four.values["bytes"].median > one.values["bytes"].median


def test_the_command_prints_and_keeps_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace = tmp_path / "records.json", tmp_path / "trace.json"
    arguments = ["--batch", "1,2", "--context", "70", "--layers", "3", "--steps", "2", "--profile", "stages"]
    arguments += ["--profile", "trace", str(trace), "--output", str(file)]
    assert main(["bench", "decode", "--preset", "tiny", *arguments]) == 0
    out = capsys.readouterr().out
    assert "batch 2, context 70: step " in out
    assert out.count("attention core") == 2
    assert [record.name for record in read_records(file)] == ["batch 1, context 70", "batch 2, context 70"]
    assert trace.stat().st_size


@pytest.mark.parametrize(("name", "value"), [("batch_sizes", (1, 0)), ("contexts", ()), ("steps", 0)])
def test_nothing_to_measure_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"decode benchmark: .* is 0; at least 1 is needed"):
        replace(PRESETS["tiny"], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "what"), [("batch_sizes", "batch size 8"), ("contexts", "context 8")])
def test_two_records_of_a_name_are_not_measured(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"decode benchmark: {what} is given twice"):
        replace(PRESETS["tiny"], **{name: (8, 1, 8)})  # type: ignore[arg-type]
