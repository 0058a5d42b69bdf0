"""Timing, rates and facts, against delays, answers and checkouts that are known."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch
from minideepinfer.measure import facts
from minideepinfer.measure.rates import measured_rates, tflops
from minideepinfer.measure.timing import FEWEST, summary, time_calls

CPU = torch.device("cpu")
DRIVER = """#!/bin/sh
case "$*" in
  *counters*) echo "$COUNTED" ;;
  *clocks.sm*) echo "1980, $ACTIVE" ;;
  *driver_version*) echo "580.1, 700.00" ;;
esac
"""


def test_a_known_delay_is_what_is_timed() -> None:
    times = time_calls({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}, CPU, repeats=5, warmup=1)
    assert 2.0 <= times["short"].low <= times["short"].median < 15.0
    assert 20.0 <= times["long"].low <= times["long"].median <= times["long"].high
    assert times["long"].unit == "ms"
    assert times["long"].repeats == 5


def test_calls_take_turns_after_their_warm_up() -> None:
    order: list[str] = []
    time_calls({name: lambda name=name: order.append(name) for name in "ab"}, CPU, repeats=3, warmup=2)  # type: ignore[misc]
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]


def test_a_slow_call_sits_out_rounds_evenly() -> None:
    order: list[str] = []

    def slow() -> None:
        order.append("slow")
        time.sleep(0.02)

    times = time_calls({"slow": slow, "quick": lambda: order.append("quick")}, CPU, 12, warmup=1, seconds=0.001)
    assert times["slow"].repeats == FEWEST
    assert times["quick"].repeats == 12
    at = [order[2:][:i].count("quick") for i, name in enumerate(order[2:]) if name == "slow"]
    assert at == [0, 4, 8]


def test_a_summary_has_median_and_percentiles() -> None:
    found = summary([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 8.0, 7.0, 6.0, 10.0])
    assert (found.low, found.median, found.high, found.repeats) == (3.0, 5.5, 8.0, 10)
    assert found.spread == pytest.approx(5.0 / 5.5)
    assert summary([2.0]).spread == 0.0


def test_rates_of_a_cpu_are_those_of_a_copy_and_of_a_product() -> None:
    rates = measured_rates(CPU)
    assert set(rates) == {"copy_tb_s", "float32_tflops"}
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    mine = time_calls({"product": lambda: a @ b}, CPU, repeats=9)["product"].median
    assert rates["float32_tflops"] == pytest.approx(2 * 512**3 / mine / 1e9, rel=0.9)
    assert 1e-4 < rates["copy_tb_s"] < 10.0


def test_a_missing_rate_is_that_of_the_next_wider_arithmetic() -> None:
    assert tflops({"float32_tflops": 1.0}, "fp8") == 1.0
    assert tflops({"float32_tflops": 1.0, "bf16_tflops": 2.0}, "fp8") == 2.0
    assert tflops({"float32_tflops": 1.0, "bf16_tflops": 2.0, "fp8_tflops": 4.0}, "bf16") == 2.0


def test_a_cpu_is_named_with_its_threads() -> None:
    found = facts.machine(CPU)
    assert found.device.endswith(("thread", "threads"))
    assert (found.driver, found.sm_clock_mhz, found.throttled) == ("", None, ())


def test_software_is_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(facts.COMMIT_VARIABLE, raising=False)
    found = facts.software()
    here = Path(facts.__file__).parent
    head = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert found.commit == head.stdout.strip()
    assert found.versions["torch"] == torch.__version__
    assert "mini-deepinfer" in found.versions


@pytest.mark.parametrize(("said", "dirty"), [("abc1", False), ("abc1-dirty", True)])
def test_an_environment_that_is_no_checkout_says_its_commit(
    monkeypatch: pytest.MonkeyPatch, said: str, dirty: bool
) -> None:
    monkeypatch.setenv(facts.COMMIT_VARIABLE, said)
    assert facts.software().commit == "abc1"
    assert facts.software().dirty is dirty


def test_code_that_is_not_of_the_checkout_around_it_has_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    installed = tmp_path / "facts.py"
    installed.touch()
    monkeypatch.setattr(facts, "__file__", str(installed))
    monkeypatch.delenv(facts.COMMIT_VARIABLE, raising=False)
    assert facts.software().commit == ""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """A device whose driver's tool answers what ACTIVE and COUNTED say."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(DRIVER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ACTIVE", "0x0000000000000001")
    monkeypatch.setenv("COUNTED", "10, 0, 0, 0, 0")
    monkeypatch.setattr(facts, "_uuid", lambda device: "GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return torch.device("cuda")


def test_a_gpu_that_idles_is_not_throttled(gpu: torch.device) -> None:
    found = facts.machine(gpu)
    assert (found.device, found.driver, found.power_limit_watts) == ("NVIDIA H200", "580.1", 700.0)
    assert (found.sm_clock_mhz, found.throttled) == ((1980, 1980), ())


def test_reasons_that_are_active_or_were_counted_are_seen(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = facts.MachineWatch(gpu)
    monkeypatch.setenv("COUNTED", "10, 0, 0, 7, 0")
    monkeypatch.setenv("ACTIVE", "0x0000000000000004")
    assert watch.machine().throttled == ("hardware thermal slowdown", "power cap")


def test_a_driver_without_a_tool_is_no_error(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = facts.machine(gpu)
    assert (found.driver, found.power_limit_watts, found.sm_clock_mhz, found.throttled) == ("", None, None, ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_known_delay_on_the_gpu_is_what_is_timed() -> None:
    cycles = 20_000_000
    times = time_calls({"delay": lambda: torch.cuda._sleep(cycles), "twice": lambda: torch.cuda._sleep(2 * cycles)},
                       torch.device("cuda"), repeats=5)  # fmt: skip
    assert times["twice"].median == pytest.approx(2 * times["delay"].median, rel=0.1)
