"""What a declaration must look like; each fault is one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from minideepinfer.operators.declaration import (
    CONTRACT_VERSION,
    OperatorDeclaration,
    OperatorOptions,
    OwnTolerance,
    Phase,
    Properties,
    Support,
    Tier,
)
from minideepinfer.operators.families import BITWISE, FAMILIES

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*", re.ASCII)
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def faults(declaration: OperatorDeclaration) -> list[str]:
    """Everything that makes a declaration illegal; of one for another contract only that is said."""
    if declaration.contract_version != CONTRACT_VERSION:
        return [
            f"was written for operator contract {declaration.contract_version!r}, this engine has contract "
            f"{CONTRACT_VERSION}; install a version of the plugin for it"
        ]
    return [
        *_identity(declaration),
        *_types(declaration),
        *_layouts(declaration),
        *_support(declaration.support),
        *_tolerances(declaration),
    ]


def _identity(declaration: OperatorDeclaration) -> list[str]:
    found = []
    if declaration.family not in FAMILIES:
        found.append(f"has family {declaration.family!r}; families are {', '.join(FAMILIES)}")
    if not _matches(_NAME, declaration.name) or declaration.name == "auto":
        found.append(
            f"has name {declaration.name!r}; a name is lower-case letters, digits, '-' and '_', and not 'auto'"
        )
    if not _matches(_IMPORT_PATH, declaration.build):
        found.append(f"has build {declaration.build!r}; an import path 'package.module:callable' is needed")
    return found


def _types(declaration: OperatorDeclaration) -> list[str]:
    found = []
    options = declaration.options
    if not (isinstance(options, type) and issubclass(options, OperatorOptions)):
        found.append(f"has options {options!r}; a subclass of OperatorOptions is needed")
    if declaration.refuses is not None and not callable(declaration.refuses):
        found.append(f"has refuses {declaration.refuses!r}; a function of the problem, or None, is needed")
    for name, kind in (
        ("summary", str),
        ("source", str),
        ("tier", Tier),
        ("priority", int),
        ("support", Support),
        ("properties", Properties),
    ):
        value = getattr(declaration, name)
        if not isinstance(value, kind):
            found.append(f"has {name} {value!r}; {kind.__name__} is needed")
    return found


def _layouts(declaration: OperatorDeclaration) -> list[str]:
    found = []
    for name in ("accepts", "emits"):
        layouts = getattr(declaration, name)
        if not isinstance(layouts, dict) or not all(_strings(value) for value in layouts.values()):
            found.append(f"has {name} {layouts!r}; a dict from role to a tuple of layout names is needed")
    return found


def _support(support: Any) -> list[str]:
    if not isinstance(support, Support):
        return []
    found = [
        f"has support.{name} {getattr(support, name)!r}; a tuple of strings is needed"
        for name in ("devices", "dtypes", "requires")
        if not _strings(getattr(support, name))
    ]
    if not isinstance(support.phases, tuple) or not all(isinstance(phase, Phase) for phase in support.phases):
        found.append(f"has support.phases {support.phases!r}; a tuple of Phase is needed")
    for name in ("min_capability", "max_capability"):
        value = getattr(support, name)
        if value is not None and not (isinstance(value, tuple) and [type(part) for part in value] == [int, int]):
            found.append(f"has support.{name} {value!r}; (major, minor) or None is needed")
    if not isinstance(support.interpreted, bool):
        found.append(f"has support.interpreted {support.interpreted!r}; True or False is needed")
    if _strings(support.requires) and (dotted := [name for name in support.requires if not name.isidentifier()]):
        found.append(f"has support.requires {dotted!r}; only top-level modules can be looked up without importing")
    return found


def _tolerances(declaration: OperatorDeclaration) -> Iterator[str]:
    rows = declaration.tolerances
    if not isinstance(rows, tuple) or not all(isinstance(row, OwnTolerance) for row in rows):
        yield f"has tolerances {rows!r}; a tuple of OwnTolerance is needed"
        return
    if rows and declaration.family in BITWISE:
        yield f"has tolerances, but results of family {declaration.family} are compared bit by bit; none is possible"
    for number, row in enumerate(rows):
        for fault in _tolerance(row, declaration):
            yield f"has tolerances[{number}]{fault}"
        if any(row.dtype == other.dtype and _within(row.options, other.options) for other in rows[:number]):
            yield f"has tolerances[{number}] behind one that stands wherever it would; the special row comes first"


def _tolerance(row: OwnTolerance, declaration: OperatorDeclaration) -> Iterator[str]:
    dtypes, fields = getattr(declaration.support, "dtypes", ()), getattr(declaration.options, "model_fields", {})
    if row.dtype not in dtypes:
        yield f".dtype {row.dtype!r}; one of its support.dtypes {dtypes!r} is needed"
    factor = row.factor
    if type(factor) not in (int, float) or not math.isfinite(factor) or factor <= 0:
        yield f".factor {factor!r}; a finite number above 0 is needed"
    elif factor > 1 and not (isinstance(row.reason, str) and row.reason.strip()):
        yield f".factor {factor} without a reason; a looser bound needs one, every report prints it"
    if not isinstance(row.options, dict) or not set(row.options) <= set(fields):
        yield f".options {row.options!r}; a dict of its own options ({', '.join(fields) or 'it has none'}) is needed"


def _within(special: Any, general: Any) -> bool:
    return isinstance(special, dict) and isinstance(general, dict) and general.items() <= special.items()


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
