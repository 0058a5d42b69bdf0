"""Mutants of a whole package, by name, for processes that import their operators: `mutants.made:NAME`."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minideepinfer.operators import OperatorDeclaration, RegisteredOperator


@dataclass(frozen=True)
class PackageMutant:
    """A broken operator, made of a copy of its package in which one module is changed.

    Attributes:
        name: the fault, in words.
        killed_by: the relation or explicit case that must fail, other than by an exception.
        module: of the package, in which the texts are.
        changes: what is replaced by what in the source; each text must occur once.
    """

    name: str
    killed_by: str
    module: str
    changes: tuple[tuple[str, str], ...]

    def build(self, origin: OperatorDeclaration) -> RegisteredOperator:
        """An operator that any process can import which has this package in its path."""
        build = f"{__name__}:{origin.name}/{self.name}"
        return RegisteredOperator(replace(origin, name=self.name, build=build), "mutants", "0", origin.family)


def package_mutant(name: str, killed_by: str, module: str, *texts: str) -> PackageMutant:
    """A mutant from alternating old and new texts."""
    return PackageMutant(name, killed_by, module, tuple(zip(texts[::2], texts[1::2], strict=True)))


def __getattr__(name: str) -> Callable[[Any], Any]:
    """The `build` of `operator/mutant`."""
    from mutants import comm

    if "/" not in name:
        raise AttributeError(name)
    operator, _, wanted = name.partition("/")
    found = {mutant.name: mutant for mutant in (*comm.COLLECTIVE, *comm.ALL_TO_ALL)}[wanted]
    original = Path(importlib.import_module("minideepinfer_comm").__file__ or "").parent
    package = f"mutant_{wanted}".replace("-", "_")
    if package not in sys.modules:
        _copy(original, Path(tempfile.mkdtemp()) / package, found)
    build: Callable[[Any], Any] = importlib.import_module(f"{package}.{operator}").build
    return build


def _copy(original: Path, copy: Path, mutant: PackageMutant) -> None:
    copy.mkdir()
    for file in original.glob("*.py"):
        source = file.read_text(encoding="utf-8")
        for old, new in mutant.changes if file.stem == mutant.module else ():
            assert source.count(old) == 1, f"{mutant.name}: {file.name} has {source.count(old)} times {old!r}"
            source = source.replace(old, new)
        source = source.replace(original.name, copy.name)
        source = source.replace(f"{copy.name}.options", f"{original.name}.options")  # whose class the plan has
        (copy / file.name).write_text(source, encoding="utf-8")
    sys.path.insert(0, str(copy.parent))
    importlib.invalidate_caches()
    importlib.import_module(copy.name)
    sys.path.remove(str(copy.parent))
