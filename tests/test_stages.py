"""Stage times are exclusive and add up."""

from __future__ import annotations

import time

import pytest
import torch
from fake_time import FakeTime
from minideepinfer.measure.stages import UNSEEN, StageTimer

CPU = torch.device("cpu")


def test_inner_stages_are_not_counted_in_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = FakeTime(monkeypatch), StageTimer(CPU)
    for _ in range(2):
        with timer.stage("outer"):
            clock.now += 1
            with timer.stage("inner"):
                clock.now += 4
                with timer.stage("outer"):
                    clock.now += 2
            clock.now += 0.5
        clock.now += 50  # nobody's
    rows = {row.stage: row for row in timer.table()}
    assert rows["inner"].milliseconds == pytest.approx(8000)
    assert rows["outer"].milliseconds == pytest.approx(7000)
    assert (rows["inner"].calls, rows["outer"].calls) == (2, 4)
    assert rows["inner"].share == pytest.approx(8 / 15)
    assert [row.stage for row in timer.table()] == ["inner", "outer"]


def test_an_exception_closes_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = FakeTime(monkeypatch), StageTimer(CPU)
    with pytest.raises(RuntimeError), timer.stage("a"), timer.stage("b"):
        clock.now += 1
        raise RuntimeError
    clock.now += 10
    with timer.stage("c"):
        clock.now += 3
    assert {row.stage: row.milliseconds for row in timer.table()} == pytest.approx({"a": 0, "b": 1000, "c": 3000})


def test_a_real_sleep_shows_and_the_sum_is_the_whole() -> None:
    timer = StageTimer(CPU)
    begin = time.perf_counter()
    with timer.stage("whole"):
        with timer.stage("sleep"):
            time.sleep(0.05)
        sum(range(10000))
    elapsed = 1e3 * (time.perf_counter() - begin)
    rows = {row.stage: row for row in timer.table()}
    assert rows["sleep"].milliseconds >= 50
    total = sum(row.milliseconds for row in rows.values())
    assert rows["whole"].milliseconds > 0
    assert total <= elapsed
    assert total == pytest.approx(elapsed, abs=5)
    assert sum(row.share for row in rows.values()) == pytest.approx(1)


def test_reset_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = FakeTime(monkeypatch), StageTimer(CPU)
    with timer.stage("a"):
        clock.now += 1
    timer.reset()
    assert timer.table() == []
    with timer.stage("b"):
        clock.now += 1
    assert [row.stage for row in timer.table()] == ["b"]


class FakeEvent:
    """An event that is counted."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        FakeEvent.recorded += 1
        self.at = time.perf_counter()

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StageTimer:
    """A timer whose events are counted, on a GPU that needs no time."""
    monkeypatch.setattr(FakeEvent, "recorded", 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return StageTimer(torch.device("cuda"))


def repeated_step(timer: StageTimer, clock: FakeTime, layers: int = 10) -> None:
    with timer.stage("step"):
        clock.now += 3
        for _ in range(layers):
            with timer.stage("experts"):
                clock.now += 1
                with timer.stage("gate"):
                    clock.now += 2
                with timer.stage("experts"):
                    clock.now += 4
            clock.now += 0.5
            with timer.stage("norms"):
                clock.now += 8


WHOLE = {"step": 3 + 5, "experts": 50, "gate": 20, "norms": 80}


def test_a_stage_inside_itself_needs_no_marks(cuda: StageTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated_step(cuda, FakeTime(monkeypatch))
    rows = {row.stage: row for row in cuda.table()}
    assert {name: row.milliseconds / 1e3 for name, row in rows.items()} == pytest.approx(WHOLE)
    assert rows["experts"].calls == 20
    assert FakeEvent.recorded == 2 + 10 * 6, "the ends of the step, and six of the eight of each layer"


@pytest.mark.parametrize("parts", [1, 3, 5, 20, 33])
def test_parts_add_up_to_the_step(cuda: StageTimer, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    repeated_step(cuda, clock)
    assert cuda.entered == 20
    found: dict[str, float] = {}
    for part in range(parts):
        cuda.look_at(part, parts)
        repeated_step(cuda, clock)
        table = {row.stage: row.milliseconds / 1e3 for row in cuda.table()}
        assert sum(table.values()) == pytest.approx(sum(WHOLE.values())), "nothing is lost between the ends of a step"
        for name, seconds in table.items():
            found[name] = found.get(name, 0.0) + seconds
    unseen = found.pop(UNSEEN, 0.0)
    assert found == pytest.approx(WHOLE)
    assert unseen == pytest.approx((parts - 1) * sum(WHOLE.values()))


def test_a_part_has_its_share_of_the_events(cuda: StageTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts = FakeTime(monkeypatch), []
    repeated_step(cuda, clock)
    for part in range(5):
        cuda.look_at(part, 5)
        before = FakeEvent.recorded
        repeated_step(cuda, clock)
        counts.append(FakeEvent.recorded - before)
    assert max(counts) <= 62 / 5 + 4
    assert cuda.table(), "and they are read"


def test_a_step_with_more_stages_than_the_one_before_is_looked_at_to_its_end(
    cuda: StageTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, total = FakeTime(monkeypatch), 0.0
    repeated_step(cuda, clock, layers=2)
    for part in range(3):
        cuda.look_at(part, 3)
        repeated_step(cuda, clock)
        total += sum(row.milliseconds / 1e3 for row in cuda.table() if row.stage != UNSEEN)
        cuda.entered = 4  # as if the one before had been short again
    assert total == pytest.approx(sum(WHOLE.values()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_stages_hold_the_time_of_their_kernels() -> None:
    timer = StageTimer(torch.device("cuda"))
    with timer.stage("outer"), timer.stage("sleep"):
        torch.cuda._sleep(100_000_000)
    rows = {row.stage: row for row in timer.table()}
    assert rows["sleep"].milliseconds > 10
    assert rows["outer"].milliseconds < 5
