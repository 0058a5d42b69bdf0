"""The fixed prefill benchmark, at the size of the tiny config."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from minideepinfer.checkpoint import Checkpoint
from minideepinfer.cli.main import main
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError, OperatorError
from minideepinfer.measure.made_up_ranks import MADE_UP, MadeUpRanks
from minideepinfer.measure.prefill import PRESETS, PrefillBench, measure_prefill
from minideepinfer.measure.rank_weights import checkpoint_config
from minideepinfer.measure.record import read_records
from minideepinfer.model.load import WeightLoader
from minideepinfer.operators import NoClock, Stage
from minideepinfer.quantization import decode_mxfp4

TINY = Path(__file__).parent / "data/config.tiny.json"
FULL = Path(__file__).parent / "data/config.full.json"
MODEL = ModelConfig.from_file(TINY)
CPU = EngineConfig(device="cpu")


@pytest.fixture(scope="module")
def bench() -> PrefillBench:
    return PrefillBench(MODEL, CPU, PRESETS["tiny"])


def test_every_step_computes_the_same(bench: PrefillBench) -> None:
    bench.rewind()
    first = bench.step()
    bench.rewind()
    assert first.shape == (1, MODEL.text_config.vocab_size)
    assert torch.equal(first, bench.step())
    assert 0.1 < float(first.std()) < 10


def test_the_other_ranks_rows_are_fresh_and_routed_by_each_gate(bench: PrefillBench) -> None:
    ranks = bench.rank.others
    before = ranks.strangers.clone()
    bench.renew()
    assert not torch.equal(before, ranks.strangers)
    bench.step()
    own = bench.problem.new_tokens
    for layer, block in enumerate(bench.model.blocks):
        phase, operator = next(iter(block.moe.items()))
        ids, _ = operator.route(ranks.strangers, block.moe_weights[phase])
        assert torch.equal(ranks.dispatched_ids[layer][own:], ids)


def test_a_rank_computes_the_rows_of_all_ranks(bench: PrefillBench) -> None:
    bench.check()
    dispatched = bench.rank.routing
    assert {len(ids) for ids in dispatched.values()} == {2 * bench.problem.new_tokens}
    assert list(dispatched) == list(range(MODEL.text_config.num_hidden_layers))
    low, mean, high = bench.rows_per_expert()
    text = MODEL.text_config
    wanted = 2 * bench.problem.new_tokens * text.num_experts_per_tok / text.n_routed_experts
    assert mean == pytest.approx(wanted, rel=0.15)
    assert low < mean < high


def test_a_gate_that_routes_strangely_is_refused(bench: PrefillBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "rows_per_expert", lambda: (0, 12.0, 99))
    with pytest.raises(ConfigError, match=r"experts have 12\.0 rows on average .* should have 24, within 5 %"):
        bench.check()


def test_bounded_replay_runs_fewer_rows_behind_the_candidate_source() -> None:
    bench = PrefillBench(MODEL, EngineConfig(device="cpu", replay="bounded"), PRESETS["tiny"])
    bench.step()
    dispatched = bench.rank.others.dispatched_ids
    last = len(bench.model.blocks) - 1
    assert len(dispatched[0]) == 2 * bench.problem.new_tokens
    assert len(dispatched[last]) == 2 * min(bench.problem.new_tokens, MODEL.text_config.sliding_window)


def test_experts_are_well_conditioned(bench: PrefillBench) -> None:
    moe = bench.model.blocks[0].moe_weights  # of the naive operator: as they were made
    experts = next(iter(moe.values())).experts
    w1, _ = decode_mxfp4(experts.w13[0], experts.w13_scale[0], torch.float32)
    assert float(w1.std()) * w1.shape[1] ** 0.5 == pytest.approx(1.0, rel=0.5)


def test_made_up_ranks_append_strangers_and_return_own_rows() -> None:
    ranks = MadeUpRanks(3, 4, torch.zeros(1, 5), NoClock())
    ranks.strangers.copy_(torch.arange(8.0)[:, None])
    ids, weights = torch.arange(12, dtype=torch.int32)[:, None], torch.arange(12.0)[:, None]
    ranks._routing = [(ids.clone(), weights.clone())]
    for tokens in (4, 2):
        ranks.next_layer = 0
        x = torch.full((tokens, 5), -1.0)
        sent = ranks.dispatch(x, torch.full((tokens, 1), -1, dtype=torch.int32), torch.full((tokens, 1), -1.0)).wait()
        assert torch.equal(sent.x[:tokens], x)
        assert sent.x[tokens:, 0].tolist() == list(range(2 * tokens))
        assert sent.topk_ids[:, 0].tolist() == [-1] * tokens + list(range(4, 4 + 2 * tokens))
        assert sent.topk_weights[:, 0].tolist() == [-1.0] * tokens + list(range(4, 4 + 2 * tokens))
        assert torch.equal(ranks.combine(sent.x, sent.handle).wait(), x)
    table = torch.arange(10, dtype=torch.uint8)[:, None]
    assert ranks.fetch_rows([table], torch.tensor([3, 13, 29]), 30).wait()[0][:, 0].tolist() == [3, 3, 9]


def test_a_record_says_everything(bench: PrefillBench) -> None:
    record = measure_prefill(bench, rates={"copy_tb_s": 1.0, "float32_tflops": 1.0})
    assert record.headline.startswith("one rank of 2, no network; dtype float32, ")
    assert "the other ranks' 64 tokens are random rows, fresh in each step" in record.headline
    assert record.values["step"].repeats == bench.problem.steps
    assert record.values["tokens_per_second"].median == pytest.approx(64e3 / record.values["step"].median)
    assert record.values["rows_per_expert_least"].median < record.values["rows_per_expert_mean"].median
    stages = {str(stage) for stage in Stage} - {Stage.COMMUNICATION}
    assert set(record.stages) == stages | {MADE_UP}, "what nobody does has no time, not zero"
    staged = sum(record.stages.values())
    assert staged == pytest.approx(record.values["step_with_stages"].median, rel=0.5)
    assert record.floors["step"] > 0
    assert not record.inside, "naive operators fuse nothing"


def test_experts_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be shared by 7 ranks"):
        PrefillBench(MODEL, CPU, replace(PRESETS["tiny"], world_size=7))


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(OperatorError, match="nonesuch"):
        PrefillBench(MODEL, EngineConfig(device="cpu", ops={"moe": "nonesuch"}), PRESETS["tiny"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "num_layers is 0; at least 1 is needed"),
        (["--layers", "-1"], "num_layers is -1; at least 1 is needed"),
        (["--layers", "99"], "num_layers is 99; the model has 12"),
        (["--steps", "0"], "steps is 0; at least 1 is needed"),
        (["--steps", "-1"], "steps is -1; at least 1 is needed"),
        (["--output", "/nonesuch/record.json"], "/nonesuch/record.json: cannot be written (No such file"),
        (["--output", "/"], "/: cannot be written (Is a directory)"),
        (["--profile", "trace", "/"], "/: cannot be written (Is a directory)"),
        (["--profile", "trace"], "--profile trace: known are `stages` and `trace FILE`"),
        (["--profile", "trace", "one", "--output", "./one"], "--profile trace one and --output ./one are one file"),
        (["--set", "cache.num_pages=2"], "--set cache.num_pages: the benchmark's problem decides it"),
        (["--set", "engram.placement=host"], "engram.placement is 'host'; random tables are made on the device"),
        (["--profile", "kernels"], "--profile kernels: known are `stages` and `trace FILE`"),
    ],
)
@pytest.mark.parametrize("benchmark", ["prefill", "decode"])
def test_impossible_arguments_are_refused_before_anything_is_measured(
    benchmark: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", benchmark, "--preset", "tiny", *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_a_device_that_is_too_small_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.\nAnd so on")

    monkeypatch.setattr("minideepinfer.measure.rank.fill_cache", full)
    assert main(["bench", "prefill", "--preset", "tiny", "--layers", "1"]) == 1
    told = capsys.readouterr().err
    assert "fewer layers or requests need less (CUDA out of memory. Tried to allocate 4 GiB.)" in told


def test_the_command_prints_and_keeps_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, trace = tmp_path / "record.json", tmp_path / "trace.json"
    arguments = ["--layers", "3", "--replay", "bounded", "--profile", "stages", "--profile", "trace", str(trace)]
    assert main(["bench", "prefill", "--preset", "tiny", *arguments, "--output", str(file)]) == 0
    out = capsys.readouterr().out
    first = out.splitlines()[0]
    assert first.startswith("one rank of 2, no network; dtype float32, cache float32, kv_quantization released, ")
    assert "replay bounded; 3 of 12 layers, random weights, random tokens and cache" in first
    assert "tokens/s" in out
    (record,) = read_records(file)
    assert "; 64 new tokens behind 128 cached ones; the other ranks' 64 tokens are random rows" in first
    assert "; 1 of the rank's" not in first and "all of the rank's Engram rows" in first
    assert record.problem["layers"] == 3
    assert (record.problem["page_tokens"], record.problem["engram_placement"]) == (64, "device")
    assert record.values["step"].repeats == 3
    assert record.plan
    for stage in record.stages:
        assert f"\n{stage} " in out
    assert "\ncommunication                    absent" in out
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert set(record.stages) <= names, "a trace has the same names"


def test_a_checkpoints_weights_are_those_of_its_first_rank(capsys: pytest.CaptureFixture[str]) -> None:
    config = checkpoint_config("tiny")
    problem = replace(PRESETS["tiny"], checkpoint="tiny", num_layers=2)
    bench = PrefillBench(config, CPU, problem)
    with Checkpoint.open("tiny") as checkpoint:
        layer = WeightLoader(checkpoint, torch.float32, torch.device("cpu"), CPU.engram).load(num_layers=2).layers[1]
    assert len(bench.model.blocks) == 2
    held = next(iter(bench.model.blocks[1].moe_weights.values()))
    whole = layer.moe
    assert whole is not None
    count = config.text_config.n_routed_experts // 2
    assert torch.equal(held.experts.w2, whole.experts.w2[:count])
    assert torch.equal(held.gate, whole.gate)
    assert torch.equal(bench.model.blocks[1].weights.attention.wq_a, layer.attention.wq_a)
    bench.check()
    assert main(["bench", "prefill", "--preset", "tiny", "--model", "tiny", "--layers", "2", "--steps", "1"]) == 0
    assert "2 of 10 layers, weights of tiny, random tokens and cache" in capsys.readouterr().out


def test_ranks_that_are_there_are_not_made_up(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "minideepinfer"]
    arguments = ["bench", "prefill", "--preset", "tiny", "--layers", "3", "--steps", "2", "--profile", "stages"]
    places = ["--set", "device=cpu", "--output", str(file)]
    done = subprocess.run([*command, *arguments, *places], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("2 ranks; dtype float32, ")
    assert done.stdout.count("rows per expert: ") == 1, "one rank reports"
    assert "64 new tokens behind 128 cached ones; each rank has as many of its own" in done.stdout
    (record,) = read_records(file)
    assert record.problem["ranks"] == 2
    assert record.stages[Stage.COMMUNICATION] > 0
    assert MADE_UP not in record.stages
    assert record.values["rows_per_expert_mean"].median == pytest.approx(24, rel=0.15)


def test_the_packaged_configs_are_those_of_the_tests() -> None:
    import minideepinfer

    data = Path(minideepinfer.__file__).parent / "data"
    assert (data / "config.full.json").read_bytes() == FULL.read_bytes()
    assert (data / "config.tiny.json").read_bytes() == TINY.read_bytes()


@pytest.mark.parametrize("benchmark", ["prefill", "decode"])
def test_a_whole_rank_is_refused_on_a_cpu(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", benchmark, "--set", "device=cpu"]) == 1
    assert "the device is cpu; --preset tiny runs on a CPU" in capsys.readouterr().err
