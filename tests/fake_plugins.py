"""Installed distributions that exist only in memory, for tests of the plugin loader."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pytest
from minideepinfer.operators import ENTRY_POINT_GROUP, TOKEN_INDICES, OperatorDeclaration, Tier, hookimpl


class FakeDistribution(Distribution):
    """A distribution whose metadata is a string; `importlib.metadata` does the rest."""

    def __init__(self, name: str, entry_points: dict[str, str], version: str = "1.0") -> None:
        lines = [f"{name} = {module}" for name, module in entry_points.items()]
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "entry_points.txt": "\n".join([f"[{ENTRY_POINT_GROUP}]", *lines]),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path("/nowhere") / path

    @property
    def points(self) -> list[EntryPoint]:
        return list(self.entry_points.select(group=ENTRY_POINT_GROUP))


class Plugins:
    """Makes plugin modules and the distributions that announce them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._count = 0

    def module(self, **content: Any) -> str:
        """Make an importable module; returns its name."""
        self._count += 1
        module = types.ModuleType(f"fake_plugin_{self._count}")
        vars(module).update(content)
        self._monkeypatch.setitem(sys.modules, module.__name__, module)
        return module.__name__

    def hook(self, declare: Callable[[], Any]) -> str:
        """A plugin module whose hook calls `declare`; returns its name."""

        @hookimpl
        def minideepinfer_operators() -> Any:
            return declare()

        return self.module(minideepinfer_operators=minideepinfer_operators)

    def points(
        self, declarations: Sequence[Any], distribution: str = "acme", entry_point: str = "ops", version: str = "1.0"
    ) -> list[EntryPoint]:
        """The entry point of a distribution that declares these operators."""
        module = self.hook(lambda: list(declarations))
        return FakeDistribution(distribution, {entry_point: module}, version).points


def declaration(name: str = "fast", family: str = "attention", **changes: Any) -> OperatorDeclaration:
    """An operator that serves everything, with some fields changed."""
    layouts: dict[str, Any] = {
        "attention": {"accepts": {"cache": ("float32", "bf16"), "selection": (TOKEN_INDICES,)}},
        "indexer": {"accepts": {"cache": ("float32", "bf16")}, "emits": {"selection": (TOKEN_INDICES,)}},
    }
    fields: dict[str, Any] = {
        "summary": "A test operator.",
        "build": "fake_operators:build",
        "tier": Tier.OPTIMIZED,
        **layouts.get(family, {}),
        **changes,
    }
    return OperatorDeclaration(family=family, name=name, **fields)
