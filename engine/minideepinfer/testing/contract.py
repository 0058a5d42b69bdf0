"""What the conformance module of a family consists of, and the ways in which an operator can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy
    from torch import Tensor

    from minideepinfer.operators import RegisteredOperator
    from minideepinfer.testing.subject import Subject

Outputs = dict[str, "Tensor"]
"""What an operator returned, by name."""


class Violation(AssertionError):
    """An operator returned something that the contract forbids."""


class Crash(Exception):
    """An operator raised an exception on a problem that it claims to support."""


class Refused(Exception):
    """An operator said, with reasons, that it does not support the problem; a skip, counted."""


class Unavailable(Exception):
    """This machine cannot hold what a case needs; a skip, with the reason."""


@dataclass(frozen=True)
class Tolerance:
    """How far an operator of a family may be from the reference in one compute dtype.

    Attributes:
        dtype: compute dtype of the operator; the reference is always float32.
        compares: what is compared.
        bound: the bound, as a formula.
        derivation: where it comes from.
    """

    dtype: str
    compares: str
    bound: str
    derivation: str


@dataclass(frozen=True)
class Relation:
    """Something that holds for every call of a correct operator.

    Attributes:
        name: unique in its family; lower case and hyphens.
        fault: the fault behind it: what goes wrong in an operator that breaks it.
        check: raises `Violation` if the operator breaks it for one call.
        needs: the declared property without which it is not asked for; empty = asked of every operator.
    """

    name: str
    fault: str
    check: Callable[[Subject, Any], None]
    needs: str = ""


@dataclass(frozen=True)
class ExplicitCase:
    """An input that broke other engines; parametrised in its dims, so that no operator may skip it.

    Attributes:
        name: e.g. `A1`.
        fault: what went wrong there.
        check: raises `Violation`; may return what it measured, for the report.
        heavy: too large for a quick look on a CPU: it is asked on cuda and in the `thorough` profile only, and reported
            as skipped elsewhere.
    """

    name: str
    fault: str
    check: Callable[[Subject], str | None]
    heavy: bool = False


@dataclass(frozen=True)
class Conformance:
    """All that the kit knows about one family; `minideepinfer.testing.families.<family>` has one as FAMILY.

    Attributes:
        family: its name.
        recipes: a strategy of recipes in the given compute dtypes. A recipe is a frozen dataclass of plain values whose
            `repr` is code, with `build() -> case`; a case has `problem`, `units` and `take` (see `Subject`).
        edges: recipes tried first, in every compute dtype: edge cases that random search may miss.
        outputs: calls a built operator with a case.
        widen: the same case for the float32 reference.
        compare: raises `Violation` if the outputs differ from the expected ones by more than `slack` bounds.
        relations: what is checked of each case; the comparison with the reference is one of them.
        cases: explicit cases.
        tolerances: the rows of the family in the tolerance table.
        packs: whether recipes can have pools in cache layout `released` (they have `packed()`).
        partner: for a chain, the operator of another family with which results are completed (see
            `minideepinfer.testing.chains`); a case then has `partner_problem` too.
    """

    family: str
    recipes: Callable[[tuple[str, ...]], SearchStrategy[Any]]
    edges: tuple[Any, ...]
    outputs: Callable[[Subject, Any, Any], Outputs]
    widen: Callable[[Any], Any]
    compare: Callable[[Subject, Any, Mapping[str, Tensor], Mapping[str, Tensor], float], None]
    relations: tuple[Relation, ...]
    cases: tuple[ExplicitCase, ...]
    tolerances: tuple[Tolerance, ...]
    packs: bool = False
    partner: RegisteredOperator | None = None

    @property
    def entries(self) -> tuple[Relation | ExplicitCase, ...]:
        """All relations and explicit cases."""
        return (*self.relations, *self.cases)

    def relation(self, name: str) -> Relation | ExplicitCase:
        """The relation or explicit case of a name; KeyError if there is none."""
        return {entry.name: entry for entry in self.entries}[name]
