"""The options under which an operator is checked, and the tolerance it declares for them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from minideepinfer.config.model import describe
from minideepinfer.errors import OperatorError
from minideepinfer.operators import OperatorDeclaration, OperatorOptions, OwnTolerance, RegisteredOperator


def with_options(operator: RegisteredOperator, changes: Mapping[str, Any]) -> OperatorOptions:
    """The operator's default options with some changed.

    Raises:
        OperatorError: its model refuses them.
    """
    try:
        return operator.declaration.options(**changes)
    except ValidationError as error:
        where = title(changes) or "at their defaults"
        raise OperatorError(f"{operator.title}, options {where}: {describe(error)}") from None


def variants(operator: RegisteredOperator) -> list[dict[str, Any]]:
    """The defaults, then each other value of each option that can be enumerated, one option changed at a time.

    Enumerable are `Literal`, `bool` and `Enum`, also as parts of a union; of other types only the default is tried.
    """
    default = with_options(operator, {})
    found: list[dict[str, Any]] = [{}]
    for name, field in operator.declaration.options.model_fields.items():
        found += [{name: value} for value in _values(field.annotation) if value != getattr(default, name)]
    return found


def title(changes: Mapping[str, Any]) -> str:
    """Changed options in words; empty for none."""
    return ", ".join(f"{name}={plain(value)}" for name, value in changes.items())


def plain(value: Any) -> Any:
    """An option's value as config files write it."""
    return value.value if isinstance(value, Enum) else value


def own_tolerance(declaration: OperatorDeclaration, dtype: str, options: OperatorOptions) -> OwnTolerance | None:
    """The operator's own row for a compute dtype, the first that its options match; None = the family's bound."""
    for row in declaration.tolerances:
        if row.dtype == dtype and all(plain(getattr(options, name)) == plain(v) for name, v in row.options.items()):
            return row
    return None


def own_factor(declaration: OperatorDeclaration, dtype: str, options: OperatorOptions) -> float:
    """The factor of `own_tolerance` on the family's bound; 1 without a row."""
    row = own_tolerance(declaration, dtype, options)
    return 1.0 if row is None else row.factor


def _values(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin in (Union, types.UnionType):
        return tuple(value for part in get_args(annotation) for value in _values(part))
    if annotation is bool:
        return (False, True)
    if annotation is types.NoneType:
        return (None,)
    return tuple(annotation) if isinstance(annotation, type) and issubclass(annotation, Enum) else ()
