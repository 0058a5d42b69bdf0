"""Making a failing call again, from what `mini-deepinfer ops check` printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minideepinfer.errors import OperatorError
from minideepinfer.operators import load_registry
from minideepinfer.testing.checking import entries, find_operators
from minideepinfer.testing.contract import ExplicitCase
from minideepinfer.testing.subject import Subject


def replay(
    operator: str, name: str, recipe: Any = None, device: str = "cpu", options: Mapping[str, Any] | None = None
) -> None:
    """Check one relation for one call, or one explicit case; returns if it holds.

    Args:
        operator: `family:name`.
        name: of the relation or explicit case.
        recipe: makes the call; None for an explicit case.
        device: where.
        options: those that are not at their defaults.

    Raises:
        Violation: it does not hold.
        Crash: the operator raised an exception; it is the cause.
        Refused: the operator does not support the call.
        OperatorError: there is no such operator, relation or option.
    """
    registry = load_registry()
    (registered,) = find_operators(registry, [operator])
    asked = {entry.name: (family, entry) for family, entry in entries(registered, registry)}
    if name not in asked:
        raise OperatorError(f"{registered.title} is not asked for {name!r}, but for {', '.join(asked)}")
    family, entry = asked[name]
    subject = Subject(registered, registry, family, device, options)
    if isinstance(entry, ExplicitCase):
        entry.check(subject)
    else:
        entry.check(subject, recipe.build())
