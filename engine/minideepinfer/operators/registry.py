"""Loading plugins, and the registry of what they declare. Imports no operator code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

import pluggy

from minideepinfer.errors import OperatorError, PluginError
from minideepinfer.operators import hookspecs
from minideepinfer.operators.declaration import OperatorDeclaration
from minideepinfer.operators.families import FAMILIES
from minideepinfer.operators.validation import faults


@dataclass(frozen=True, eq=False)
class RegisteredOperator:
    """A declaration and where it came from.

    Attributes:
        declaration: what the plugin said.
        distribution: normalised name of the installed distribution.
        version: its version.
        entry_point: name of the entry point.
    """

    declaration: OperatorDeclaration
    distribution: str
    version: str
    entry_point: str

    @property
    def name(self) -> str:
        """The operator's name within its family."""
        return self.declaration.name

    @property
    def title(self) -> str:
        """`family:name (distribution version)`, as messages call it."""
        return f"{self.declaration.family}:{self.name} ({self.distribution} {self.version})"


class OperatorRegistry:
    """All operators of the loaded plugins, by family and name."""

    def __init__(self, operators: Iterable[RegisteredOperator]) -> None:
        """Collect operators.

        Raises:
            PluginError: two have the same family and name.
        """
        self._operators: dict[str, dict[str, RegisteredOperator]] = {family: {} for family in FAMILIES}
        for operator in operators:
            family = self._operators[operator.declaration.family]
            if (other := family.setdefault(operator.name, operator)) is not operator:
                raise PluginError(
                    f"operator {operator.declaration.family}:{operator.name} is declared by both "
                    f"{_origin(other)} and {_origin(operator)}; leave one of them out with plugins.ignore"
                )

    def operators(self, family: str) -> tuple[RegisteredOperator, ...]:
        """All operators of a family, by name.

        Raises:
            OperatorError: there is no such family.
        """
        if family not in self._operators:
            raise OperatorError(f"there is no operator family {family!r}; families are {', '.join(FAMILIES)}")
        return tuple(sorted(self._operators[family].values(), key=lambda operator: operator.name))

    def get(self, family: str, name: str) -> RegisteredOperator:
        """The operator of a name.

        Raises:
            OperatorError: there is none; lists what is registered.
        """
        known = self.operators(family)
        if name not in self._operators[family]:
            listed = ", ".join(f"{operator.name} ({operator.distribution})" for operator in known) or "none"
            raise OperatorError(f"there is no {family} operator {name!r}; registered are: {listed}")
        return self._operators[family][name]


def load_registry(ignore: Sequence[str] = (), points: Iterable[EntryPoint] | None = None) -> OperatorRegistry:
    """Load every plugin that an installed distribution announces.

    Args:
        ignore: entry points to leave out, as `distribution:entry-point` or a whole `distribution`.
        points: entry points to load, each with its distribution; None = all that are installed.

    Raises:
        PluginError: a plugin cannot be imported or declares something illegal; names its distribution.
    """
    if points is None:
        points = entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    chosen = _without_ignored(_by_name(points), ignore)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name, point in chosen.items():
        _register(manager, name, point)
    operators: list[RegisteredOperator] = []
    for implementation in manager.hook.minideepinfer_operators.get_hookimpls():
        name = implementation.plugin_name
        operators += _declared(name, chosen[name], implementation.function)
    return OperatorRegistry(operators)


def _by_name(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    named: dict[str, EntryPoint] = {}
    for point in points:
        name = f"{_normalised(_distribution(point).name)}:{point.name}"
        if (other := named.setdefault(name, point)) is not point:
            raise PluginError(_blame(name, f"is announced twice, as {other.value!r} and as {point.value!r}"))
    return named


def _without_ignored(points: dict[str, EntryPoint], ignore: Sequence[str]) -> dict[str, EntryPoint]:
    unmatched = set(ignore)
    kept = {}
    for name, point in sorted(points.items()):
        distribution, _, entry_point = name.partition(":")
        matches = {item for item in ignore if _ignores(item, distribution, entry_point)}
        unmatched -= matches
        if not matches:
            kept[name] = point
    if unmatched:
        installed = ", ".join(sorted(points)) or "none"
        raise PluginError(f"plugins.ignore: {sorted(unmatched)} is not installed; plugins are: {installed}")
    return kept


def _ignores(item: str, distribution: str, entry_point: str) -> bool:
    ignored_distribution, colon, ignored_entry_point = item.partition(":")
    return _normalised(ignored_distribution) == distribution and (not colon or ignored_entry_point == entry_point)


def _register(manager: pluggy.PluginManager, name: str, point: EntryPoint) -> None:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            _blame(name, f"{point.value!r} cannot be imported: {type(error).__name__}: {error}")
        ) from error
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(_blame(name, " ".join(str(error).split()))) from error
    if not manager.get_hookcallers(plugin):
        raise PluginError(
            _blame(name, f"{point.value!r} implements no hook; mark minideepinfer_operators with @hookimpl")
        )


def _declared(name: str, point: EntryPoint, hook: Any) -> list[RegisteredOperator]:
    try:
        declarations = hook()
    except (Exception, SystemExit) as error:
        raise PluginError(_blame(name, f"minideepinfer_operators raised {type(error).__name__}: {error}")) from error
    if not isinstance(declarations, (list, tuple)):
        found = type(declarations).__name__
        raise PluginError(_blame(name, f"minideepinfer_operators returned {found}; a list of declarations is needed"))
    distribution = _distribution(point)
    for declaration in declarations:
        if not isinstance(declaration, OperatorDeclaration):
            found = type(declaration).__name__
            raise PluginError(_blame(name, f"declares a {found}; an OperatorDeclaration is needed"))
        if found_faults := faults(declaration):
            title = f"operator {declaration.family}:{declaration.name}"
            raise PluginError(_blame(name, f"{title} {'; '.join(found_faults)}"))
    return [
        RegisteredOperator(declaration, _normalised(distribution.name), distribution.version, point.name)
        for declaration in declarations
    ]


def _distribution(point: EntryPoint) -> Distribution:
    if point.dist is None:
        raise PluginError(f"entry point {point.name!r} ({point.value}) belongs to no installed distribution")
    return point.dist


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _origin(operator: RegisteredOperator) -> str:
    return f"{operator.distribution}:{operator.entry_point}"


def _blame(name: str, fault: str) -> str:
    distribution = name.partition(":")[0]
    return f"plugin {name}: {fault} (repair or remove {distribution}, or leave it out with plugins.ignore)"
