"""Checking an operator: every relation and explicit case of its family, with a report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from minideepinfer.errors import OperatorError
from minideepinfer.operators import FAMILIES, OperatorRegistry, OwnTolerance, RegisteredOperator
from minideepinfer.testing.chains import conformances, unfinished
from minideepinfer.testing.contract import Conformance, Crash, ExplicitCase, Refused, Relation, Unavailable, Violation
from minideepinfer.testing.coverage import MOST_REFUSED, is_built_in, packaged_configs, uncovered
from minideepinfer.testing.search import Failure, Profile, judging, search
from minideepinfer.testing.subject import Subject, Tally
from minideepinfer.testing.variants import plain, title, variants

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """What became of one relation or explicit case.

    Attributes:
        name: of the relation or case.
        status: `passed`, `failed` or `skipped`.
        reason: what failed, or why it was skipped.
        crash: whether the operator raised an exception.
        code: makes the failing call again, as Python one can paste; empty unless failed.
        note: what an explicit case measured.
        options: the operator's options that were not at their defaults, in words.
    """

    name: str
    status: str
    reason: str = ""
    crash: bool = False
    code: str = ""
    note: str = ""
    options: str = ""


@dataclass(frozen=True)
class Report:
    """What is known of one operator.

    Attributes:
        title: family, name, distribution and version.
        outcomes: of every relation and explicit case.
        calls: how often the operator was called.
        refused: reasons for which it refused a call, with counts.
        worst: largest error in units of its bound.
        seconds: it took.
        forms: which forms of the operator ran, with counts; empty if it does not say.
        drawn: problems drawn at random.
        declined: how many of these it refused, though it declares their phase.
        tolerances: the operator's own rows of the tolerance table.
    """

    title: str
    outcomes: tuple[Outcome, ...]
    calls: int
    refused: Counter[str]
    worst: float
    seconds: float
    forms: Counter[str] = field(default_factory=Counter)
    drawn: int = 0
    declined: int = 0
    tolerances: tuple[OwnTolerance, ...] = ()

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """What failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.status == FAILED)

    @property
    def held(self) -> tuple[str, ...]:
        """Names of what holds."""
        return tuple(outcome.name for outcome in self.outcomes if outcome.status == PASSED)

    @property
    def passed(self) -> bool:
        """Nothing failed; that an operator serves something is one of the outcomes."""
        return not self.failures


def check_operator(
    operator: RegisteredOperator, registry: OperatorRegistry, profile: Profile, seed: int = 0, device: str = "cpu"
) -> Report:
    """Check one operator against everything that the kit knows about its family, at each of its `variants`.

    Args:
        operator: what to check.
        registry: where the reference operators are found.
        profile: how hard to look.
        seed: the same seed finds the same.
        device: `cpu` or `cuda`.

    Raises:
        OperatorError: no reference operator of the family is registered.
    """
    start, tally, outcomes = time.perf_counter(), Tally(), []
    for changes in variants(operator):
        for family, relation in entries(operator, registry):
            try:
                subject = Subject(operator, registry, family, device, changes)
            except OperatorError as error:  # of a variant: the defaults were tried before
                tally.refused[str(error)] += 1
                outcomes.append(Outcome(relation.name, SKIPPED, str(error), options=title(changes)))
                continue
            outcomes.append(check_one(subject, relation, profile, seed))
            tally.add(subject.tally)
    outcomes += [Outcome("completed", FAILED, reason) for reason in unfinished(operator, registry)]
    if is_built_in(operator) and operator.declaration.support.serves(device):
        outcomes += _coverage(operator, tally, device)
    if not tally.ran and operator.declaration.support.serves(device):
        reasons = "; ".join(tally.refused) or "nothing was asked"
        outcomes.append(Outcome("serves-something", FAILED, f"every case was skipped on {device}: {reasons}"))
    seconds = time.perf_counter() - start
    return Report(
        operator.title,
        tuple(outcomes),
        tally.ran,
        tally.refused,
        tally.worst,
        seconds,
        tally.forms,
        tally.drawn,
        tally.declined,
        operator.declaration.tolerances,
    )


def _coverage(operator: RegisteredOperator, tally: Tally, device: str) -> list[Outcome]:
    """What is asked of built-in operators only: they serve this package's models, and refuse little."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    refused = uncovered(operator, packaged_configs(), device, capability)
    reason = f"refuses {len(refused)} problems of the packaged models, e.g. {refused[0]}" if refused else ""
    found = [Outcome("covers-models", FAILED if refused else PASSED, reason)]
    if tally.drawn:
        too_many = tally.declined > MOST_REFUSED * tally.drawn
        reason = f"refuses {tally.declined} of {tally.drawn} drawn problems; at most {MOST_REFUSED:.0%} may be"
        found.append(Outcome("refuses-few", FAILED if too_many else PASSED, reason if too_many else ""))
    return found


def entries(
    operator: RegisteredOperator, registry: OperatorRegistry
) -> list[tuple[Conformance, Relation | ExplicitCase]]:
    """Everything that is asked of an operator."""
    return [(family, entry) for family in conformances(operator, registry) for entry in family.entries]


def check_one(subject: Subject, relation: Relation | ExplicitCase, profile: Profile, seed: int) -> Outcome:
    """One relation or explicit case of one operator with one set of options."""
    return replace(_check(subject, relation, profile, seed), options=title(subject.changes))


def _check(subject: Subject, relation: Relation | ExplicitCase, profile: Profile, seed: int) -> Outcome:
    torch.manual_seed(seed)
    support = subject.registered.declaration.support
    if not support.serves(subject.device.type):
        return Outcome(relation.name, SKIPPED, f"the operator serves {' and '.join(support.devices)} only")
    if isinstance(relation, ExplicitCase):
        return _explicit(subject, relation, profile)
    if relation.needs and not getattr(subject.properties, relation.needs):
        return Outcome(relation.name, SKIPPED, f"the operator does not declare {relation.needs}")
    failure = search(subject, relation, profile, seed)
    if failure is not None:
        return _failed(subject, relation.name, failure)
    if not subject.tally.ran:
        return Outcome(relation.name, SKIPPED, "the operator refuses every call")
    return Outcome(relation.name, PASSED)


def _explicit(subject: Subject, case: ExplicitCase, profile: Profile) -> Outcome:
    if subject.interpreted and subject.changes:
        return Outcome(case.name, SKIPPED, "asked on cuda, or with default options: here the operator is interpreted")
    if case.heavy and (why := _too_heavy(subject, profile)):
        return Outcome(case.name, SKIPPED, why)
    try:
        with judging(subject):
            note = case.check(subject)
    except Refused as refused:
        if subject.changes:
            return Outcome(case.name, SKIPPED, str(refused))
        return Outcome(case.name, FAILED, f"the operator refuses the case at all dims that the kit tries: {refused}")
    except Unavailable as reason:
        return Outcome(case.name, SKIPPED, str(reason))
    except (Violation, Crash) as error:
        return _failed(subject, case.name, Failure(str(error), isinstance(error, Crash)))
    return Outcome(case.name, PASSED, note=note or "")


def _too_heavy(subject: Subject, profile: Profile) -> str:
    """Why a heavy case is not asked here; empty if it is."""
    if subject.device.type != "cpu":
        return ""
    if subject.interpreted:
        return "heavy: asked on cuda only, here the operator is interpreted"
    return "" if profile.name == "thorough" else "heavy: asked on cuda, or with the profile thorough"


def _failed(subject: Subject, name: str, failure: Failure) -> Outcome:
    return Outcome(name, FAILED, failure.message, failure.crash, pasteable(subject, name, failure.recipe))


def pasteable(subject: Subject, name: str, recipe: Any) -> str:
    """Python that makes a failing call again."""
    operator = f"{subject.registered.declaration.family}:{subject.registered.name}"
    where = "" if subject.device.type == "cpu" else f", device={str(subject.device)!r}"
    changes = {option: plain(value) for option, value in subject.changes.items()}
    where += f", options={changes!r}" if changes else ""
    lines = ["from minideepinfer.testing.replay import replay"]
    argument = ""
    if recipe is not None:
        kinds = {type(recipe), *(type(v) for v in vars(recipe).values() if is_dataclass(v))}
        lines += sorted(f"from {kind.__module__} import {kind.__name__}" for kind in kinds)
        argument = f", {_code(recipe)}"
    return "\n".join([*lines, "", f"replay({operator!r}, {name!r}{argument}{where})"])


def _code(recipe: Any) -> str:
    """The call that makes a recipe; what has its default value is left out."""
    given = [(each, getattr(recipe, each.name)) for each in fields(recipe)]
    written = [
        f"{each.name}={_code(value) if is_dataclass(value) else repr(value)}"
        for each, value in given
        if value != each.default
    ]
    return f"{type(recipe).__name__}({', '.join(written)})"


def find_operators(registry: OperatorRegistry, wanted: Iterable[str] = ()) -> list[RegisteredOperator]:
    """The operators that are named; all of them if none is.

    Args:
        registry: where to look.
        wanted: `family`, `family:name`, or `distribution:family/name`.

    Raises:
        OperatorError: there is no such operator, or it comes from another distribution.
    """
    names = list(wanted) or list(FAMILIES)
    found: list[RegisteredOperator] = []
    for name in names:
        found += [operator for operator in _find(registry, name) if operator not in found]
    return found


def _find(registry: OperatorRegistry, wanted: str) -> list[RegisteredOperator]:
    first, colon, rest = wanted.partition(":")
    if not colon:
        return list(registry.operators(first))
    family, slash, name = rest.partition("/")
    if not slash:
        return [registry.get(first, rest)]
    operator = registry.get(family, name)
    distribution = first.replace("_", "-").replace(".", "-").lower()
    if operator.distribution != distribution:
        raise OperatorError(f"{wanted}: {operator.title} does not come from {distribution}")
    return [operator]
