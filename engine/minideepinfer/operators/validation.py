"""What a declaration must look like; each fault is one sentence."""

from __future__ import annotations

import re
from typing import Any

from minideepinfer.operators.declaration import (
    CONTRACT_VERSION,
    OperatorDeclaration,
    OperatorOptions,
    Phase,
    Properties,
    Support,
    Tier,
)
from minideepinfer.operators.families import FAMILIES

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*", re.ASCII)
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def faults(declaration: OperatorDeclaration) -> list[str]:
    """Everything that makes a declaration illegal; of one for another contract only that is said."""
    if declaration.contract_version != CONTRACT_VERSION:
        return [
            f"was written for operator contract {declaration.contract_version!r}, this engine has contract "
            f"{CONTRACT_VERSION}; install a version of the plugin for it"
        ]
    return [*_identity(declaration), *_types(declaration), *_layouts(declaration), *_support(declaration.support)]


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


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
