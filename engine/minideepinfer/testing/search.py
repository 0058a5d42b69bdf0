"""Looking for a call that breaks a relation: edge cases first, then hypothesis, which also shrinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, strategies
from hypothesis.strategies import SearchStrategy

from minideepinfer.testing.contract import Crash, Refused, Relation, Unavailable, Violation
from minideepinfer.testing.recipes.batch import PACKED
from minideepinfer.testing.subject import Subject


@dataclass(frozen=True)
class Profile:
    """How hard to look.

    Attributes:
        name: `quick` or `thorough`.
        examples: drawn for each relation, after the edge cases.
        few_examples: the same where options are not the defaults, or the operator is interpreted.
        shrink: whether to look for a smaller failing call.
    """

    name: str
    examples: int
    few_examples: int
    shrink: bool = True


PROFILES = {profile.name: profile for profile in (Profile("quick", 30, 6), Profile("thorough", 500, 100))}


@dataclass(frozen=True)
class Failure:
    """A call that breaks a relation.

    Attributes:
        message: what is wrong.
        crash: whether the operator raised an exception.
        recipe: makes the call; None for an explicit case.
    """

    message: str
    crash: bool
    recipe: Any = None


def search(subject: Subject, relation: Relation, profile: Profile, seed: int) -> Failure | None:
    """The smallest failing call found, or None.

    Args:
        subject: the operator.
        relation: what must hold.
        profile: how hard to look.
        seed: of hypothesis.
    """
    if subject.changes or subject.interpreted:
        profile = replace(profile, examples=profile.few_examples)
    edge = _first_failing_edge(subject, relation)
    if edge is not None and not profile.shrink:
        return edge
    return _drawn(subject, relation, profile, seed) or edge


def attempt(subject: Subject, relation: Relation, recipe: Any) -> None:
    """Check one recipe; a problem that the operator refuses is counted and passes.

    Raises:
        Violation: the relation does not hold.
        Crash: the operator raised an exception.
    """
    case = recipe.build()
    with suppress(Refused), judging(subject):
        relation.check(subject, case)


@contextmanager
def judging(subject: Subject) -> Iterator[None]:
    """What the kit itself trips over inside, e.g. rows that are missing, is a `Crash` of the operator too."""
    try:
        yield
    except (Violation, Crash, Refused, Unavailable):
        raise
    except Exception as error:
        what = f"what {subject.registered.title} returned cannot be judged: {type(error).__name__}: {error}"
        raise Crash(what) from error


def edge_recipes(subject: Subject) -> list[Any]:
    """The family's edge cases in every compute dtype; in cache layouts that the operator declares."""
    edges = filter(subject.asks, subject.family.edges)
    return [replace(recipe, dtype=dtype) for recipe in edges for dtype in subject.dtypes]


def _edges(subject: Subject, relation: Relation) -> list[Any]:
    """Every edge case in every dtype.

    Where an interpreter would make a relation slow, in one dtype by turns, and with changed options every third one;
    which ones differs between relations.
    """
    recipes, count = edge_recipes(subject), len(subject.dtypes)
    if not subject.interpreted or relation.name == "matches-reference":
        return recipes
    turn, kept = len(relation.name), []
    for i, recipe in enumerate(recipes):
        edge, dtype = divmod(i, count)
        if dtype == (edge + turn) % count and (not subject.changes or edge % 3 == turn % 3):
            kept.append(recipe)
    return kept


def _first_failing_edge(subject: Subject, relation: Relation) -> Failure | None:
    for recipe in _edges(subject, relation):
        try:
            attempt(subject, relation, recipe)
        except (Violation, Crash) as error:
            return Failure(str(error), isinstance(error, Crash), recipe)
    return None


def _recipes(subject: Subject) -> SearchStrategy[Any]:
    """The family's recipes; half of them with packed pools, where the operator declares these and dims allow it."""
    recipes = subject.family.recipes(subject.dtypes)
    if not subject.family.packs or PACKED not in subject.cache_layouts:
        return recipes
    return strategies.builds(lambda recipe, pack: recipe.packed() if pack else recipe, recipes, strategies.booleans())


def _drawn(subject: Subject, relation: Relation, profile: Profile, seed: int) -> Failure | None:
    last: list[Any] = [None]

    def check(recipe: Any) -> None:
        last[0] = recipe
        subject.count_drawn(recipe.build())
        attempt(subject, relation, recipe)

    phases = [Phase.generate, Phase.shrink] if profile.shrink else [Phase.generate]
    settings = hypothesis.settings(
        max_examples=profile.examples,
        deadline=None,
        database=None,
        phases=phases,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    drawn = hypothesis.given(_recipes(subject))(check)
    try:
        hypothesis.seed(seed)(settings(drawn))()
    except (Violation, Crash) as error:
        # The last recipe tried is the smallest one: hypothesis ends by running it again.
        return Failure(str(error), isinstance(error, Crash), last[0])
    except hypothesis.errors.Flaky:
        return Failure("fails and passes for the same call: not deterministic", False, last[0])
    return None
