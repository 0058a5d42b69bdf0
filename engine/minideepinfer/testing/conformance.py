"""The conformance kit as tests: one per operator, relation and set of options.

pytest --pyargs minideepinfer.testing.conformance --operator acme_ops:attention/acme-tiled
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from minideepinfer.errors import OperatorError
from minideepinfer.operators import OperatorRegistry, RegisteredOperator, load_registry
from minideepinfer.testing.chains import conformances
from minideepinfer.testing.checking import FAILED, SKIPPED, check_one, entries, find_operators
from minideepinfer.testing.contract import Conformance, ExplicitCase, Relation
from minideepinfer.testing.coverage import is_built_in, packaged_configs, uncovered
from minideepinfer.testing.search import PROFILES, edge_recipes
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.variants import title, variants


@cache
def _registry() -> OperatorRegistry:
    return load_registry()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each operator and each relation or explicit case of its family."""
    operators = find_operators(_registry(), metafunc.config.getoption("--operator"))
    if "entry" not in metafunc.fixturenames:
        metafunc.parametrize("operator", [pytest.param(operator, id=operator.name) for operator in operators])
        return
    combinations = [
        pytest.param(operator, changes, family, entry, id=_id(operator, changes, family, entry))
        for operator in operators
        for changes in variants(operator)
        for family, entry in entries(operator, _registry())
    ]
    metafunc.parametrize(("operator", "changes", "family", "entry"), combinations)


def _id(
    operator: RegisteredOperator, changes: Mapping[str, Any], family: Conformance, entry: Relation | ExplicitCase
) -> str:
    options = f"{{{title(changes)}}}" if changes else ""
    return f"{family.family}/{operator.name}{options}-{entry.name}"


def test_it_holds(
    operator: RegisteredOperator,
    changes: Mapping[str, Any],
    family: Conformance,
    entry: Relation | ExplicitCase,
    pytestconfig: pytest.Config,
) -> None:
    """The relation or explicit case holds for the operator with these options changed."""
    try:
        subject = Subject(operator, _registry(), family, pytestconfig.getoption("--operator-device"), changes)
    except OperatorError as error:  # of a variant: collection built the defaults
        pytest.skip(str(error))
    profile = PROFILES[pytestconfig.getoption("--operator-profile")]
    outcome = check_one(subject, entry, profile, pytestconfig.getoption("--operator-seed"))
    if outcome.status == SKIPPED:
        pytest.skip(outcome.reason)
    if outcome.status == FAILED:
        pytest.fail(f"{operator.title}: {outcome.reason}\n\n{outcome.code}", pytrace=False)


def test_it_serves_something(operator: RegisteredOperator, pytestconfig: pytest.Config) -> None:
    """An operator serves at least one of the kit's edge cases on a device that it claims."""
    device = pytestconfig.getoption("--operator-device")
    if not operator.declaration.support.serves(device):
        pytest.skip(f"the operator does not claim {device}")
    reasons = []
    for family in conformances(operator, _registry()):
        subject = Subject(operator, _registry(), family, device)
        reasons += [subject.obstacles(recipe.build()) for recipe in edge_recipes(subject)]
    if all(reasons):
        pytest.fail(f"{operator.title} refuses every edge case: {reasons[0]}", pytrace=False)


def test_it_covers_the_packaged_models(operator: RegisteredOperator, pytestconfig: pytest.Config) -> None:
    """A built-in operator serves every layer of the models that this package carries, where it claims the device."""
    device = pytestconfig.getoption("--operator-device")
    if not is_built_in(operator) or not operator.declaration.support.serves(device):
        pytest.skip("asked of built-in operators, on devices that they claim")
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    if refused := uncovered(operator, packaged_configs(), device, capability):
        pytest.fail(f"{operator.title} refuses {refused[0]}", pytrace=False)
