"""The operator under test, the reference beside it, and what was learned about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from minideepinfer.errors import OperatorError
from minideepinfer.operators import (
    FAMILIES,
    OperatorOptions,
    OperatorRegistry,
    PlannedOperator,
    Problem,
    Properties,
    RegisteredOperator,
    Tier,
)
from minideepinfer.operators.build import build
from minideepinfer.operators.support import obstacles
from minideepinfer.testing.contract import Conformance, Crash, Outputs, Refused, Unavailable, Violation
from minideepinfer.testing.ranks import RankComm, World
from minideepinfer.testing.recipes.batch import PACKED, PLAIN
from minideepinfer.testing.tensors import map_tensors, same_bits
from minideepinfer.testing.variants import own_factor, plain, with_options

C = TypeVar("C")


@dataclass
class Tally:
    """What a check counts."""

    ran: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    drawn: int = 0
    """Problems drawn at the default options, and how many were refused although the operator declares their phase."""
    declined: int = 0
    worst: float = 0.0
    """Largest error, in units of its bound."""
    forms: Counter[str] = field(default_factory=Counter)
    """Which form of the operator ran (a built operator may say so in `form`, e.g. `gluon` or `interpreted`)."""

    def add(self, other: Tally) -> None:
        """Count what another tally counted."""
        self.ran += other.ran
        self.refused += other.refused
        self.drawn += other.drawn
        self.declined += other.declined
        self.worst = max(self.worst, other.worst)
        self.forms += other.forms


class Subject:
    """An operator of a family. Cases are made on the CPU, run on the device, and judged on the CPU.

    A *case* has `problem`; `units`, how many requests or tokens it consists of; and `take(order)`, the case of some
    units in another order together with the old row of each new row.
    """

    def __init__(
        self,
        registered: RegisteredOperator,
        registry: OperatorRegistry,
        family: Conformance,
        device: torch.device | str = "cpu",
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.registered, self.family, self.device = registered, family, torch.device(device)
        self.changes = changes or {}
        """Options that differ from the defaults."""
        self.options = with_options(registered, self.changes)
        self.properties = _properties(registered, family.partner)
        self.tally = Tally()
        self._references = registry
        self.registry = including(registry, registered)
        self._built: dict[tuple[RegisteredOperator, Problem, int], Any] = {}

    @property
    def interpreted(self) -> bool:
        """Whether the operator does not run here natively, but through Triton's interpreter."""
        return self.device.type not in self.registered.declaration.support.devices

    @property
    def choice(self) -> str | dict[str, Any]:
        """The operator with its options, as an engine configuration names it."""
        options = {name: plain(value) for name, value in self.changes.items()}
        return {"name": self.registered.name, "options": options} if options else self.registered.name

    @property
    def narrowest(self) -> str:
        """bfloat16 if the operator declares it, else what it declares first."""
        return "bfloat16" if "bfloat16" in self.dtypes else self.dtypes[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The compute dtypes that the operator declares."""
        return self.registered.declaration.support.dtypes

    @property
    def cache_layouts(self) -> tuple[str, ...]:
        """Cache layouts of recipes that the operator is asked about: `released` only if it declares that."""
        return (PLAIN, PACKED) if PACKED in self.registered.declaration.accepts.get("cache", ()) else (PLAIN,)

    def asks(self, recipe: Any) -> bool:
        """Whether the operator declares the cache layout of a recipe."""
        return getattr(recipe, "cache_layout", PLAIN) in self.cache_layouts

    def count_drawn(self, case: Any) -> None:
        """Note that a case was drawn, and whether it is refused; options are there to serve less than the defaults."""
        if self.changes:
            return
        self.tally.drawn += 1
        if case.problem.phase in self.registered.declaration.support.phases and self.obstacles(case):
            self.tally.declined += 1

    def problem(self, case: Any) -> Problem:
        """A case's problem on the device under test."""
        return on_device(case.problem, self.device)

    def obstacles(self, case: Any) -> tuple[str, ...]:
        """Why the operator does not serve a case; empty if it does."""
        problem = self.problem(case)
        found = obstacles(self.registered.declaration, problem) or self.refused_options(problem)
        if (partner := self.family.partner) is not None:
            problem = on_device(case.partner_problem, self.device)
            found += tuple(f"{partner.title} {reason}" for reason in obstacles(partner.declaration, problem))
        return found

    def serves(self, problem: Problem) -> bool:
        """Whether the operator serves a problem; if not, that is counted."""
        if reasons := obstacles(self.registered.declaration, on_device(problem, self.device)):
            self.tally.refused["; ".join(reasons)] += 1
        return not reasons

    def slack(self, case: Any) -> float:
        """The operator's own factor on the family's bound for a case."""
        return own_factor(self.registered.declaration, case.problem.dtype, self.options)

    def nearest(self, cases: Iterable[C]) -> C:
        """The first of some cases, ordered by distance from the one wanted, whose problem the operator serves.

        Raises:
            Refused: none.
        """
        reasons: tuple[str, ...] = ()
        for case in cases:
            if not (reasons := self.obstacles(case)):
                return case
        raise Refused("; ".join(reasons))

    def run(self, case: Any) -> Outputs:
        """Call the operator.

        Raises:
            Refused: it does not serve the problem.
            Crash: it raised an exception.
        """
        return {name: tensor.cpu() for name, tensor in self.run_on_device(case).items()}

    def run_on_device(self, case: Any) -> Outputs:
        """Like `run`; the outputs stay where the operator put them."""
        self._count(case)
        outputs = self._call(self.registered, case)
        self._note_form(self.operator(case))
        return outputs

    def run_together(
        self, cases: Sequence[C], world: World, call: Callable[[Any, C, RankComm], Outputs]
    ) -> list[Outputs]:
        """Call the operator on every rank of a world, each with an operator of its own.

        Args:
            cases: one for each rank.
            world: where the ranks meet.
            call: calls a built operator with a case and its rank's comm operator.

        Raises:
            Refused, Crash: see `run`.
            Violation: the ranks do not meet, see `World`.
        """
        for case in cases:
            self._count(case)

        def rank(comm: RankComm) -> Outputs:
            case = cases[comm.rank]
            with crashing(self.registered):
                operator = self._operator(self.registered, self.problem(case), comm.rank)
                outputs = call(operator, map_tensors(case, lambda tensor: tensor.to(self.device)), comm)
                self._note_form(operator)
                return {name: tensor.cpu() for name, tensor in _tensors(outputs).items()}

        return world.run(rank)

    def operator(self, case: Any) -> Any:
        """The built operator of a case."""
        return self._operator(self.registered, self.problem(case))

    def reference(self, case: Any) -> Outputs:
        """What the reference operator returns, in float32, on the same numbers."""
        outputs = self._call(self.reference_operator(self.family.family), self.family.widen(case))
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    def naive(self, case: Any) -> Outputs:
        """What the reference operator returns in the case's own dtype."""
        return {
            name: tensor.cpu() for name, tensor in self._call(self.reference_operator(self.family.family), case).items()
        }

    def peer(self, family: str, problem: Problem) -> Any:
        """The built reference operator of another family, for operators that call one."""
        return self.built(self.reference_operator(family), problem)

    def built(self, registered: RegisteredOperator, problem: Problem) -> Any:
        """Any operator, built for a problem on the device under test."""
        return self._operator(registered, on_device(problem, self.device))

    def equal(self, case: Any, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
        """Two results of this operator must have the same bits.

        Raises:
            Violation: they have not.
        """
        for name, tensor in expected.items():
            if not same_bits(found[name], tensor):
                raise Violation(f"{what}: {name} has other bits, {difference(found[name], tensor)}")

    def agree(
        self, case: Any, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, *, exact: bool
    ) -> None:
        """Two results of this operator: bit by bit if it promises that, else each within its bound of the truth."""
        if exact:
            self.equal(case, found, expected, what)
            return
        try:
            self.family.compare(self, case, found, expected, 2.0)
        except Violation as violation:
            raise Violation(f"{what}: {violation}") from None

    def measure(self, error: Tensor, bound: Tensor, what: str) -> None:
        """Errors against bounds of the same shape; NaN in place of a number is a violation."""
        self.tally.worst = max(self.tally.worst, in_bounds(error, bound, what))

    def reference_operator(self, family: str) -> RegisteredOperator:
        """The operator of a family that the others are compared with."""
        return reference_operator(self._references, family)

    def refused_options(self, problem: Problem) -> tuple[str, ...]:
        """Why `build` refuses a problem with changed options, by an `OperatorError`; the defaults must serve."""
        if not self.changes:
            return ()
        try:
            self._operator(self.registered, problem)
        except OperatorError as error:
            return (str(error),)
        except Exception:  # the call meets it again, and reports it
            return ()
        return ()

    def _operator(self, registered: RegisteredOperator, problem: Problem, rank: int = 0) -> Any:
        if (registered, problem, rank) not in self._built:
            options = self.options if registered is self.registered else registered.declaration.options()
            self._built[registered, problem, rank] = build(_planned(registered, problem, options), self.device)
        return self._built[registered, problem, rank]

    def _call(self, registered: RegisteredOperator, case: Any) -> Outputs:
        with crashing(registered):
            operator = self._operator(registered, self.problem(case))
            moved = map_tensors(case, lambda tensor: tensor.to(self.device))
            return _tensors(self.family.outputs(self, operator, moved))

    def _count(self, case: Any) -> None:
        if reasons := self.obstacles(case):
            self.tally.refused["; ".join(reasons)] += 1
            raise Refused("; ".join(reasons))
        self.tally.ran += 1

    def _note_form(self, operator: Any) -> None:
        if form := getattr(operator, "form", ""):
            self.tally.forms[form] += 1


def in_bounds(error: Tensor, bound: Tensor, what: str) -> float:
    """The largest error in units of its bound.

    Args:
        error: any shape.
        bound: same shape.
        what: is compared, for the message.

    Raises:
        Violation: an error is larger than its bound, or NaN.
    """
    if not error.numel():
        return 0.0
    ratio = (error / bound.clamp(min=1e-300)).nan_to_num(nan=torch.inf)
    worst = float(ratio.max())
    if worst > 1.0:
        place = torch.unravel_index(ratio.argmax(), ratio.shape)
        where = [int(i) for i in place]
        raise Violation(f"{what} at {where}: error {float(error[place]):.3g}, bound {float(bound[place]):.3g}")
    return worst


def reference_operator(registry: OperatorRegistry, family: str) -> RegisteredOperator:
    """The operator of a family that the others are compared with.

    Raises:
        OperatorError: none is registered.
    """
    for operator in registry.operators(family):
        if operator.declaration.tier is Tier.REFERENCE:
            return operator
    raise OperatorError(f"no {family} operator of tier reference is registered; mini-deepinfer's own plugin has one")


@contextmanager
def crashing(registered: RegisteredOperator) -> Iterator[None]:
    """Whatever an operator's code raises inside becomes a `Crash` that names it."""
    try:
        yield
    except (Violation, Refused, Unavailable, Crash):
        raise
    except (Exception, SystemExit) as error:
        raise Crash(f"{registered.title} raised {type(error).__name__}: {error}") from error


def _tensors(outputs: Outputs) -> Outputs:
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise Violation(f"{name} is {value!r:.80}; a tensor is needed")
    return outputs


def _properties(registered: RegisteredOperator, partner: RegisteredOperator | None) -> Properties:
    """What an operator promises; with a partner, what both do."""
    own = registered.declaration.properties
    if partner is None:
        return own
    other = partner.declaration.properties
    return Properties(*(getattr(own, f.name) and getattr(other, f.name) for f in fields(Properties)))


def including(registry: OperatorRegistry, operator: RegisteredOperator) -> OperatorRegistry:
    """A registry that has an operator, in place of another one of its name."""
    names = {(operator.declaration.family, operator.name)}
    others = [other for family in FAMILIES for other in registry.operators(family) if (family, other.name) not in names]
    return OperatorRegistry([*others, operator])


def on_device(problem: Problem, device: torch.device) -> Problem:
    """The problem on a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return replace(problem, device=device.type, capability=capability)


def difference(found: Tensor, expected: Tensor) -> str:
    """In words, where two tensors differ first."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    differs = (
        (found != expected) & ~(found.isnan() & expected.isnan()) if found.is_floating_point() else found != expected
    )
    places = differs.nonzero()
    if not len(places):
        return "only in NaN payloads or signs of zero"
    place = tuple(places[0].tolist())
    return f"first at {list(place)}: {found[place].item()} instead of {expected[place].item()}"


def _planned(registered: RegisteredOperator, problem: Problem, options: OperatorOptions) -> PlannedOperator:
    return PlannedOperator(registered, options, problem, "explicit: conformance kit", {})
