"""The operator under test, the reference beside it, and what was learned about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from minideepinfer.errors import OperatorError
from minideepinfer.operators import (
    OperatorOptions,
    OperatorRegistry,
    PlannedOperator,
    Problem,
    RegisteredOperator,
    Tier,
)
from minideepinfer.operators.build import build
from minideepinfer.operators.support import obstacles
from minideepinfer.testing.contract import Conformance, Crash, Outputs, Refused, Violation
from minideepinfer.testing.tensors import map_tensors, same_bits
from minideepinfer.testing.variants import own_tolerance, with_options

C = TypeVar("C")


@dataclass
class Tally:
    """What a check counts."""

    ran: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    """Largest error, in units of its bound."""
    forms: Counter[str] = field(default_factory=Counter)
    """Which form of the operator ran (a built operator may say so in `form`, e.g. `gluon` or `interpreted`)."""

    def add(self, other: Tally) -> None:
        """Count what another tally counted."""
        self.ran += other.ran
        self.refused += other.refused
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
        self.properties = registered.declaration.properties
        self.tally = Tally()
        self._registry = registry
        self._built: dict[tuple[RegisteredOperator, Problem], Any] = {}

    @property
    def interpreted(self) -> bool:
        """Whether the operator does not run here natively, but through Triton's interpreter."""
        return self.device.type not in self.registered.declaration.support.devices

    @property
    def narrowest(self) -> str:
        """bfloat16 if the operator declares it, else what it declares first."""
        return "bfloat16" if "bfloat16" in self.dtypes else self.dtypes[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The compute dtypes that the operator declares."""
        return self.registered.declaration.support.dtypes

    def problem(self, case: Any) -> Problem:
        """A case's problem on the device under test."""
        return on_device(case.problem, self.device)

    def obstacles(self, case: Any) -> tuple[str, ...]:
        """Why the operator does not serve a case; empty if it does."""
        problem = self.problem(case)
        return obstacles(self.registered.declaration, problem) or self._refused_options(problem)

    def slack(self, case: Any) -> float:
        """The operator's own factor on the family's bound for a case."""
        tolerance = own_tolerance(self.registered.declaration, case.problem.dtype, self.options)
        return 1.0 if tolerance is None else tolerance.factor

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
        if reasons := self.obstacles(case):
            self.tally.refused["; ".join(reasons)] += 1
            raise Refused("; ".join(reasons))
        self.tally.ran += 1
        outputs = self._call(self.registered, case)
        if form := getattr(self.operator(case), "form", ""):
            self.tally.forms[form] += 1
        return outputs

    def operator(self, case: Any) -> Any:
        """The built operator of a case."""
        return self._operator(self.registered, self.problem(case))

    def reference(self, case: Any) -> Outputs:
        """What the reference operator returns, in float32, on the same numbers."""
        outputs = self._call(self._reference(self.family.family), self.family.widen(case))
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    def naive(self, case: Any) -> Outputs:
        """What the reference operator returns in the case's own dtype."""
        return {name: tensor.cpu() for name, tensor in self._call(self._reference(self.family.family), case).items()}

    def peer(self, family: str, problem: Problem) -> Any:
        """The built reference operator of another family, for operators that call one."""
        return self._operator(self._reference(family), on_device(problem, self.device))

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
        if not error.numel():
            return
        ratio = (error / bound.clamp(min=1e-300)).nan_to_num(nan=torch.inf)
        worst = float(ratio.max())
        if worst > 1.0:
            place = torch.unravel_index(ratio.argmax(), ratio.shape)
            where = [int(i) for i in place]
            raise Violation(f"{what} at {where}: error {float(error[place]):.3g}, bound {float(bound[place]):.3g}")
        self.tally.worst = max(self.tally.worst, worst)

    def _reference(self, family: str) -> RegisteredOperator:
        for operator in self._registry.operators(family):
            if operator.declaration.tier is Tier.REFERENCE:
                return operator
        raise OperatorError(
            f"no {family} operator of tier reference is registered; mini-deepinfer's own plugin has one"
        )

    def _refused_options(self, problem: Problem) -> tuple[str, ...]:
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

    def _operator(self, registered: RegisteredOperator, problem: Problem) -> Any:
        if (registered, problem) not in self._built:
            options = self.options if registered is self.registered else registered.declaration.options()
            self._built[registered, problem] = build(_planned(registered, problem, options), self.device)
        return self._built[registered, problem]

    def _call(self, registered: RegisteredOperator, case: Any) -> Outputs:
        try:
            operator = self._operator(registered, self.problem(case))
            return self.family.outputs(self, operator, map_tensors(case, lambda tensor: tensor.to(self.device)))
        except Exception as error:
            raise Crash(f"{registered.title} raised {type(error).__name__}: {error}") from error


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
