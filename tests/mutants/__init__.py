"""Deliberately broken operators: a correct one with a few characters changed, and what must notice it.

A mutant is text replaced in the source of a correct operator, so that the fault is all there is to read.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from dataclasses import dataclass, replace

from minideepinfer.operators import OperatorDeclaration, RegisteredOperator


@dataclass(frozen=True)
class Mutant:
    """A broken operator.

    Attributes:
        name: the fault, in words.
        killed_by: the relation or explicit case that must fail, other than by an exception.
        changes: what is replaced by what in the source; each text must occur once.
    """

    name: str
    killed_by: str
    changes: tuple[tuple[str, str], ...]

    def build(self, origin: OperatorDeclaration) -> RegisteredOperator:
        """Make an importable module of the changed source, and an operator of it.

        Args:
            origin: declaration of the correct operator.
        """
        source_module = origin.build.partition(":")[0]
        source = inspect.getsource(importlib.import_module(source_module))
        for old, new in self.changes:
            assert source.count(old) == 1, f"{self.name}: {source_module} has {source.count(old)} times {old!r}"
            source = source.replace(old, new)
        module = types.ModuleType(f"mutant_{origin.family}_{self.name}".replace("-", "_"))
        sys.modules[module.__name__] = module
        exec(compile(source, f"<{self.name}>", "exec"), vars(module))
        declaration = replace(origin, name=self.name, build=f"{module.__name__}:build")
        return RegisteredOperator(declaration, "mutants", "0", origin.family)


def mutant(name: str, killed_by: str, *texts: str) -> Mutant:
    """A mutant from alternating old and new texts."""
    return Mutant(name, killed_by, tuple(zip(texts[::2], texts[1::2], strict=True)))
