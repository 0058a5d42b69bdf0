"""Steps with known stages: what is measured, and the report of recorded data."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_time import FakeTime
from minideepinfer.measure.record import Machine, Measurement, Record, Software, read_records, write_records
from minideepinfer.measure.stages import UNSEEN, SwitchedClock
from minideepinfer.measure.step_report import BETWEEN_KERNELS, prefill_lines, stage_lines
from minideepinfer.measure.steps import (
    WITH_STAGES,
    KernelTimes,
    StepTimes,
    _sum_of_parts,
    _with_gaps,
    fused_stages,
    time_steps,
)
from minideepinfer.operators import NoClock, Stage


class FakeRank:
    """A rank whose step sleeps in stages."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock = SwitchedClock(NoClock())
        self.setup = SimpleNamespace(device=torch.device("cpu"))
        self.rewound = 0
        self.time = clock

    def synchronize(self) -> None:
        pass

    meet = synchronize

    def rewind(self) -> None:
        self.rewound += 1
        self.time.sleep(0.02)

    def step(self) -> None:
        with self.clock.stage(Stage.ATTENTION):
            self.time.sleep(0.004)
            with self.clock.stage(Stage.KEY_GATHER):
                self.time.sleep(0.02)
        self.time.sleep(0.006)


def fake_times(rank: Any, steps: int = 3) -> StepTimes:
    return time_steps(rank, rank.step, rank.rewind, steps=steps, warmup=1, profile=WITH_STAGES)


def test_a_stage_with_a_known_delay_shows_that_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = FakeRank(FakeTime(monkeypatch))
    times = fake_times(rank)
    assert rank.rewound == 1 + 2 * 3, "before each step, and not a part of it"
    expected = {Stage.KEY_GATHER: 20, Stage.ATTENTION: 4, Stage.OTHER: 6}
    assert times.stages == pytest.approx({str(stage): milliseconds for stage, milliseconds in expected.items()})
    assert times.steps == pytest.approx([30] * 3)


def test_stages_sum_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = fake_times(FakeRank(FakeTime(monkeypatch)), steps=5)
    assert sum(times.stages.values()) == pytest.approx(statistics.median(times.staged))
    assert times.covered == pytest.approx([1.0] * 5)
    assert len(times.steps) == len(times.staged) == 5


def test_a_step_is_the_sum_of_its_parts() -> None:
    first = [{"a": 30.0, UNSEEN: 12.0}, {"a": 900.0, UNSEEN: 12.0}, {"a": 32.0, "b": 1.0, UNSEEN: 13.0}]
    second = [{UNSEEN: 30.0, "a": 2.0, "b": 10.0}, {UNSEEN: 31.0, "b": 12.0}]
    assert _sum_of_parts([first, second]) == {"a": 33.0, "b": 11.0}
    assert _sum_of_parts([[{"a": 30.0, "b": 10.0}]]) == {"a": 30.0, "b": 10.0}
    assert _sum_of_parts([[]]) == {}


def test_time_without_kernels_is_a_stage_of_its_own() -> None:
    events = {"attention core": 10.0, "gate": 3.0, "communication": 4.0, "other": 1.0}
    kernels = KernelTimes({"attention core": 9.0, "gate": 3.5, "communication": 1.0}, hidden=0.0)
    stages = _with_gaps(events, kernels, 17.5)
    assert stages == {
        "attention core": 9.0,
        "gate": 3.0,
        "communication": 4.0,  # waiting for other ranks is communication
        "other": 0.0,
        BETWEEN_KERNELS: 1.5,  # of the step in which nothing was timed, 17.5
    }
    assert _with_gaps(events, kernels, 15.0)[BETWEEN_KERNELS] == 0.0


def test_fused_stages_are_those_that_operators_name() -> None:
    fused = SimpleNamespace(fuses={Stage.FP4_DECODING: Stage.GROUPED_GEMM})
    assert fused_stages([SimpleNamespace(), fused]) == {"FP4 decoding": "grouped GEMM"}


def value(median: float, unit: Any = "ms") -> Measurement:
    return Measurement(median=median, low=median, high=median, repeats=10, unit=unit)


RECORD = Record(
    benchmark="prefill",
    name="prefill",
    headline="one rank of 4, no network",
    machine=Machine(device="a GPU"),
    software=Software(commit="", dirty=False, versions={}),
    problem={
        "context": 131072,
        "new_tokens": 4096,
        "world_size": 4,
        "layers": 40,
        "hidden_size": 5120,
        "experts": 384,
    },
    precision={"replay": "bounded"},
    seed=0,
    values={
        "step": value(224.0),
        "tokens_per_second": value(18285.7, "tokens/s"),
        "rows_per_expert_least": value(170, "rows"),
        "rows_per_expert_mean": value(256.1, "rows"),
        "rows_per_expert_most": value(340, "rows"),
        "peak_memory": value(94.5 * 2**30, "bytes"),
        "step_with_stages": value(226.0),
        "stage_overhead": value(0.009, "1"),
        "stages_covered": value(0.991, "1"),
        "kernels": value(210.0),
    },
    stages={"grouped GEMM": 100.0, "attention core": 60.0, "key gather": 40.0, "other": 10.0, BETWEEN_KERNELS: 14.0},
    inside={"FP4 decoding": "grouped GEMM", "key gather": "attention core"},
    floors={"grouped GEMM": 50.0, "attention core": 40.0, "FP4 decoding": 7.0, "step": 90.0},
    rates={"copy_tb_s": 4.3},
)


def test_a_report_is_rendered_from_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_records(path, [RECORD])
    (record,) = read_records(path)
    text = "\n".join(prefill_lines(record))
    assert "step 224.0 ms (224.0 to 224.0, 10 steps): 18,286 tokens/s" in text
    assert "rows per expert: min 170, mean 256.1, max 340; peak memory 94.5 GiB" in text
    assert "spec section 7: 112 ms in bf16, 73 ms with FP8 products; the step takes 2.00 and 3.07 times" in text
    assert "floor of all stages 90.0 ms, 2.49 times" in text


def test_the_table_shows_what_is_fused_and_what_is_absent() -> None:
    rows = {line[:22].strip(): line[22:].split() for line in stage_lines(RECORD)}
    assert rows["grouped GEMM"] == ["100.00", "44.6%", "50.00", "2.00"]
    assert rows["key gather"] == ["40.00", "17.9%", "none", "(more", "of", "it", "in", "attention", "core)"]
    assert rows["FP4 decoding"] == ["in", "grouped", "GEMM"]
    assert rows["communication"] == ["absent"]
    assert rows["sum"] == ["224.00", "90.00"], "the floor of a fused stage is not counted"
    order = [line[:22].strip() for line in stage_lines(RECORD)[1:6]]
    assert order == ["grouped GEMM", "attention core", "key gather", "other", BETWEEN_KERNELS]
    text = "\n".join(stage_lines(RECORD))
    assert "+0.9% (+0.9% to +0.9%) against the step before it, 99.1% of it between events" in text
    assert "kernels of a traced step 210.0 ms, the step 224.0 ms: +14.0 ms" in text


def test_communication_is_shown_as_far_as_it_is_exposed_and_as_far_as_it_is_hidden() -> None:
    record = RECORD.model_copy(
        update={
            "stages": RECORD.stages | {"communication": 5.0},
            "values": RECORD.values | {"communication_hidden": value(7.25)},
        }
    )
    (row,) = (line for line in stage_lines(record) if line.startswith("communication"))
    assert " 5.00 " in row
    assert row.endswith("(exposed; 7.25 ms hidden behind other stages)")
