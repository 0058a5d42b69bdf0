"""The fixed prefill benchmark, at the size of the tiny config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError, OperatorError
from minideepinfer.measure.made_up_ranks import MadeUpRanks
from minideepinfer.measure.prefill import PRESETS, PrefillBench
from minideepinfer.quantization import decode_mxfp4

TINY = Path(__file__).parent / "data/config.tiny.json"
FULL = Path(__file__).parent / "data/config.full.json"


@pytest.fixture(scope="module")
def bench() -> PrefillBench:
    return PrefillBench(ModelConfig.from_file(TINY), EngineConfig(device="cpu"), PRESETS["tiny"])


def test_every_step_computes_the_same(bench: PrefillBench) -> None:
    bench.rewind()
    first = bench.step()
    bench.rewind()
    assert first.shape == (1, bench.config.vocab_size)
    assert torch.equal(first, bench.step())
    assert 0.1 < float(first.std()) < 10


def test_a_rank_computes_the_rows_of_all_ranks(bench: PrefillBench) -> None:
    bench.rewind()
    bench.step()
    rows = {len(ids) for ids in bench.ranks.dispatched_ids}
    assert rows == {2 * bench.problem.new_tokens}
    assert len(bench.ranks.dispatched_ids) == bench.config.num_hidden_layers
    low, mean, high = bench._rows_per_expert()
    wanted = 2 * bench.problem.new_tokens * bench.config.num_experts_per_tok / bench.config.n_routed_experts
    assert mean == pytest.approx(wanted, rel=0.15)
    assert low < mean < high


def test_stages_add_up_to_the_step(bench: PrefillBench) -> None:
    result = bench.run()
    assert len(result.milliseconds) == bench.problem.steps
    staged = sum(row.milliseconds for row in result.stages)
    assert 0.7 * result.staged_milliseconds < staged <= result.staged_milliseconds


def test_bounded_replay_runs_fewer_rows_behind_the_candidate_source() -> None:
    bench = PrefillBench(ModelConfig.from_file(TINY), EngineConfig(device="cpu", replay="bounded"), PRESETS["tiny"])
    bench.rewind()
    bench.step()
    rows = [len(ids) for ids in bench.ranks.dispatched_ids]
    assert rows[0] == 2 * bench.problem.new_tokens
    assert rows[-1] == 2 * min(bench.problem.new_tokens, bench.config.sliding_window)


def test_experts_are_well_conditioned(bench: PrefillBench) -> None:
    moe = bench.model.blocks[0].moe_weights  # of the naive operator: as they were made
    experts = next(iter(moe.values())).experts
    w1, _ = decode_mxfp4(experts.w13[0], experts.w13_scale[0], torch.float32)
    assert float(w1.std()) * w1.shape[1] ** 0.5 == pytest.approx(1.0, rel=0.5)


def test_made_up_ranks_append_strangers_and_return_own_rows() -> None:
    strangers = torch.full((6, 4), 7.0)
    ranks = MadeUpRanks(3, strangers)
    ranks.set_routing([(torch.ones(6, 2, dtype=torch.int32), torch.ones(6, 2))])
    x, ids, weights = torch.zeros(2, 4), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    sent = ranks.dispatch(x, ids, weights)
    assert torch.equal(sent.x, torch.cat([x, strangers[:4]]))
    assert sent.topk_ids[2:].eq(1).all()
    assert torch.equal(ranks.combine(sent.x, sent.handle), x)
    table = torch.arange(10, dtype=torch.uint8)[:, None]
    assert ranks.fetch_rows(table, torch.tensor([3, 13, 29]))[:, 0].tolist() == [3, 3, 9]


def test_experts_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be shared by 7 ranks"):
        PrefillBench(ModelConfig.from_file(TINY), EngineConfig(device="cpu"), replace(PRESETS["tiny"], world_size=7))


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(OperatorError, match="nonesuch"):
        PrefillBench(ModelConfig.from_file(TINY), EngineConfig(device="cpu", ops={"moe": "nonesuch"}), PRESETS["tiny"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "num_layers is 0; at least 1 is needed"),
        (["--layers", "-1"], "num_layers is -1; at least 1 is needed"),
        (["--layers", "99"], "num_layers is 99; the model has 12"),
        (["--steps", "0"], "steps is 0; at least 1 is needed"),
        (["--steps", "-1"], "steps is -1; at least 1 is needed"),
        (["--output", "/nonesuch/record.json"], "--output /nonesuch/record.json: cannot be written (No such file"),
        (["--output", "/"], "--output /: cannot be written (Is a directory)"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prefill", "--preset", "tiny", *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_the_command_prints_and_keeps_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    code = main(["bench", "prefill", "--preset", "tiny", "--layers", "3", "--replay", "bounded", "--output", str(file)])
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("one rank of 2, no network; float32, kv released, activations none; replay bounded; 3 of 12")
    assert "tokens/s" in out
    record = json.loads(file.read_text())
    assert record["layers"] == 3
    assert len(record["milliseconds"]) == 3
    assert record["plan"]


def test_the_packaged_configs_are_those_of_the_tests() -> None:
    import minideepinfer

    data = Path(minideepinfer.__file__).parent / "data"
    assert (data / "config.full.json").read_bytes() == FULL.read_bytes()
    assert (data / "config.tiny.json").read_bytes() == TINY.read_bytes()


def test_a_whole_rank_is_refused_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--set", "device=cpu"]) == 1
    assert "the device is cpu; --preset tiny runs on a CPU" in capsys.readouterr().err
