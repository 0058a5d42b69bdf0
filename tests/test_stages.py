"""Stage times are exclusive and add up."""

from __future__ import annotations

import time

import pytest
import torch
from minideepinfer.measure.stages import StageTimer

CPU = torch.device("cpu")


class FakeTime:
    """A clock that moves only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_stages_hold_the_time_of_their_kernels() -> None:
    timer = StageTimer(torch.device("cuda"))
    with timer.stage("outer"), timer.stage("sleep"):
        torch.cuda._sleep(100_000_000)
    rows = {row.stage: row for row in timer.table()}
    assert rows["sleep"].milliseconds > 10
    assert rows["outer"].milliseconds < 5
