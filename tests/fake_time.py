"""A clock for tests of instruments: nothing else that the machine does is measured."""

from __future__ import annotations

import time

import pytest


class FakeTime:
    """A clock that moves only when it is told to, or slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
