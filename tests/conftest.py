"""One thread per process, since the tensors are small and test runs would fight for the cores; Triton interpreted."""

from __future__ import annotations

import os
from typing import Any

import measured

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, by this process or one it starts
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported; the GPU has `ops check`


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the run measured."""
    if measured.lines:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(measured.lines))
