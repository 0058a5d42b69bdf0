"""Where and with what a measurement ran, asked of the system."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import torch

from minideepinfer.measure.record import Machine, Software
from minideepinfer.operators import ENTRY_POINT_GROUP

COMMIT_VARIABLE = "MINIDEEPINFER_COMMIT"
"""Says the commit where the code is no checkout, e.g. in a container: `HASH`, or `HASH-dirty`."""
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "synchronised boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the driver's clock event reasons that make a busy GPU slower than it could be."""
COUNTERS = {
    "sw_power_cap": "power cap",
    "sync_boost": "synchronised boost",
    "sw_thermal_slowdown": "software thermal slowdown",
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}
"""Drivers that count the microseconds of each reason see what went on between two looks."""


class MachineWatch:
    """The machine from now on; `machine()` tells clocks and throttling since."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = _uuid(device) if device.type == "cuda" else ""
        self._device = device
        self._clock, self._reasons, self._counts = self._look()

    def machine(self) -> Machine:
        """What it is, with the SM clock then and now, and each reason for lower clocks that was seen."""
        if not self._gpu:
            return Machine(device=processor())
        clock, reasons, counts = self._look()
        seen = self._reasons | reasons | {name for name, count in counts.items() if count > self._counts.get(name, 0)}
        driver, limit = _query(self._gpu, "driver_version", "power.limit") or ("", "")
        return Machine(
            device=torch.cuda.get_device_name(self._device),
            driver=driver,
            power_limit_watts=_number(limit),
            sm_clock_mhz=None if self._clock is None or clock is None else (self._clock, clock),
            throttled=tuple(sorted(seen)),
        )

    def _look(self) -> tuple[int | None, set[str], dict[str, int]]:
        if not self._gpu:
            return None, set(), {}
        clock, active = _query(self._gpu, "clocks.sm", "clocks_event_reasons.active") or ("", "")
        mask = int(active, 16) if active.startswith("0x") else 0
        counted = _query(self._gpu, *(f"clocks_event_reasons_counters.{name}" for name in COUNTERS)) or ()
        counts = {reason: int(_number(text) or 0) for reason, text in zip(COUNTERS.values(), counted, strict=False)}
        mhz = _number(clock)
        return None if mhz is None else int(mhz), {name for bit, name in REASONS.items() if mask & bit}, counts


def machine(device: torch.device) -> Machine:
    """What a device is now."""
    return MachineWatch(device).machine()


def software() -> Software:
    """The commit of this project and the versions of everything that takes part."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", *sorted({point.dist.name for point in entry_points(group=ENTRY_POINT_GROUP) if point.dist})):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    commit, dirty = _commit()
    return Software(commit=commit, dirty=dirty, versions=versions)


def processor() -> str:
    """The name of the CPU and the threads that torch uses."""
    name = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    threads = torch.get_num_threads()
    return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"


def _commit() -> tuple[str, bool]:
    if said := os.environ.get(COMMIT_VARIABLE):
        return said.removesuffix("-dirty"), said.endswith("-dirty")
    here = Path(__file__)
    # A checkout of another project may hold the environment that this one is installed in.
    if _run("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return "", False
    commit = _run("git", "-C", str(here.parent), "rev-parse", "HEAD") or ""
    changed = _run("git", "-C", str(here.parent), "status", "--porcelain", "--untracked-files=no")
    return commit, bool(changed)


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _query(gpu: str, *fields: str) -> tuple[str, ...] | None:
    """Answers of the driver's tool; None where it is missing, or knows a field no longer or not yet."""
    found = _run("nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    return tuple(part.strip() for part in found.split(",")) if found else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _run(*command: str) -> str | None:
    """What a command prints; None if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
