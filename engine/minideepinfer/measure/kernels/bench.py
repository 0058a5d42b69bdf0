"""The kernel benchmark: each operator is held against the reference on the inputs it is timed on, then all in turn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from minideepinfer.errors import OperatorError
from minideepinfer.measure.floor import floor_ms
from minideepinfer.measure.kernels import kernel_family
from minideepinfer.measure.kernels.contract import Kernel, KernelFamily
from minideepinfer.measure.record import Measurement
from minideepinfer.measure.timing import Call, time_calls
from minideepinfer.operators import OperatorRegistry, RegisteredOperator
from minideepinfer.operators.cost import ARITHMETICS, Cost
from minideepinfer.testing.contract import Conformance, Crash, Outputs, Violation
from minideepinfer.testing.subject import Subject, crashing
from minideepinfer.testing.tensors import tensors_in
from minideepinfer.testing.tolerances import conformance
from minideepinfer.testing.variants import title, variants

FAILURES = (Violation, Crash, OperatorError)
SECONDS = 0.5
"""About the longest that one call's rounds take together."""


@dataclass(frozen=True)
class Result:
    """One operator on one problem.

    Attributes:
        operator: it, with the options that are not at their defaults.
        problem: the name of the problem.
        case_problem: what the operator was told.
        recipe: the sizes.
        form: which form of it ran, if it says.
        obstacles: why it does not serve; it was neither checked nor timed.
        failure: why it was not timed although it serves.
        errors: against the reference, by output; `of_bound` is the largest in units of the family's bound.
        time: milliseconds.
        cost: by its own formula, or its family's.
        floor: milliseconds.
        judged: what the check looked at.
    """

    operator: Entrant
    problem: str
    case_problem: Any
    recipe: Any
    form: str = ""
    obstacles: tuple[str, ...] = ()
    failure: str = ""
    errors: Mapping[str, float] | None = None
    time: Measurement | None = None
    cost: Cost | None = None
    floor: float = 0.0
    judged: str = ""


@dataclass(frozen=True)
class Entrant:
    """An operator with options."""

    registered: RegisteredOperator
    changes: Mapping[str, Any]
    is_reference: bool = False
    """Whether the others are compared with it."""
    named: bool = False
    """Whether it was asked for by name."""

    @property
    def title(self) -> str:
        """`family:name`, and options that are not at their defaults."""
        declaration = self.registered.declaration
        options = f"[{title(self.changes)}]" if self.changes else ""
        return f"{declaration.family}:{declaration.name}{options}"


def entrants(
    operators: Sequence[RegisteredOperator], reference: RegisteredOperator, named: Collection[RegisteredOperator] = ()
) -> list[Entrant]:
    """Operators of a family with every set of options that the conformance kit tries, the reference among them.

    Args:
        operators: what to time.
        reference: what the others are compared with; appended if it is missing.
        named: which of them were asked for by name.
    """
    every = [*operators, *([] if reference in operators else [reference])]
    return [Entrant(o, changes, o is reference, o in named) for o in every for changes in variants(o)]


class KernelBench:
    """Times the operators of one family.

    Args:
        family: its name.
        entrants: what to time, the reference among them.
        registry: where references are found.
        device: where to run.
        rates: of this run.
        repeats: rounds; slow calls take part in fewer.
        seed: of all numbers.
    """

    def __init__(
        self,
        family: str,
        entrants: Sequence[Entrant],
        registry: OperatorRegistry,
        device: torch.device,
        rates: Mapping[str, float],
        repeats: int = 20,
        seed: int = 0,
    ) -> None:
        self._entrants, self._registry, self._device = entrants, registry, device
        self._rates, self._repeats, self._seed = rates, repeats, seed
        self._family: KernelFamily = kernel_family(family)
        self._conformance: Conformance = conformance(family)

    def run(self, preset: str) -> Iterator[list[Result]]:
        """The results of each problem of a preset, in the order of the entrants."""
        for name, (kernel, recipe) in self._family.problems.get(preset, {}).items():
            yield self._problem(name, kernel, replace(recipe, seed=self._seed))

    def _problem(self, name: str, kernel: Kernel, recipe: Any) -> list[Result]:
        case = self._family.make(recipe, self._device)
        least, truth = kernel.cost(case), Truth(self._family, case)
        calls, results = dict[str, Call](), []
        for entrant in self._entrants:
            subject = Subject(entrant.registered, self._registry, self._conformance, self._device, entrant.changes)
            result = Result(entrant, name, subject.problem(case), recipe, obstacles=_obstacles(entrant, subject, case))
            if not result.obstacles:
                try:
                    result, calls[entrant.title] = self._checked(result, subject, kernel, case, least, truth)
                except FAILURES as error:
                    result = replace(result, failure=f"{type(error).__name__}: {error}")
            results.append(result)
        times, crashes = self._timed(calls)
        return [
            replace(
                result,
                time=times.get(result.operator.title),
                failure=result.failure or crashes.get(result.operator.title, ""),
            )
            for result in results
        ]

    def _timed(self, calls: dict[str, Call]) -> tuple[dict[str, Measurement], dict[str, str]]:
        """Times, of all that are still running at the end, and what the others raised."""
        crashes: dict[str, str] = {}
        while calls:
            guarded = {name: _Guarded(call) for name, call in calls.items()}
            try:
                return time_calls(guarded, self._device, self._repeats, warmup=1, seconds=SECONDS), crashes
            except Exception as error:  # whatever an operator raises in some later call
                broken = [name for name, call in guarded.items() if call.running]
                if not broken:
                    raise
                crashes |= {name: f"Crash: {type(error).__name__} while it was timed: {error}" for name in broken}
                calls = {name: call for name, call in calls.items() if name not in crashes}
        return {}, crashes

    def _checked(
        self, result: Result, subject: Subject, kernel: Kernel, case: Any, least: Cost, truth: Truth
    ) -> tuple[Result, Call]:
        with crashing(subject.registered):
            operator = subject.operator(case)
            kernel.bind(subject, operator, case)()  # what it leaves behind in the operator shows in the next call
            call = kernel.bind(subject, operator, case)  # anew, since it may overwrite its input
            found = kernel.outputs(case, call())
            cost = own_cost(subject.registered, operator, case, least)
        errors, rows = truth.judge(subject, kernel, found), truth.rows
        with crashing(subject.registered):
            call()  # what breaks when it is called again is not timed either
        total = len(next(iter(found.values())))
        return (
            replace(
                result,
                form=str(getattr(operator, "form", "")),
                errors=errors,
                cost=cost,
                floor=floor_ms(cost, self._rates),
                judged="every row" if rows is None or len(rows) == total else f"{len(rows)} of {total} rows",
            ),
            call,
        )


class _Guarded:
    """A call that knows whether it came back."""

    def __init__(self, call: Call) -> None:
        self._call, self.running = call, False

    def __call__(self) -> None:
        self.running = True
        self._call()
        self.running = False


def _obstacles(entrant: Entrant, subject: Subject, case: Any) -> tuple[str, ...]:
    found = subject.obstacles(case)
    if not found and subject.interpreted and not entrant.named:
        return (f"would be interpreted on {subject.device}, and its time says nothing; name it to time it",)
    return found


class Truth:
    """Some rows of a case, and what the reference returns for them, which all operators are held against.

    Attributes:
        rows: which of them, the last one among them; None = all.
    """

    def __init__(self, family: KernelFamily, case: Any) -> None:
        self.rows, self._case = family.sample(case)
        self._reference: Outputs | None = None

    def judge(self, subject: Subject, kernel: Kernel, outputs: Outputs) -> dict[str, float]:
        """Hold these rows of a result against the reference on the same numbers, with the kit's bound.

        Args:
            subject: the operator.
            kernel: what was called.
            outputs: of all rows.

        Returns:
            Errors by output (see `error`), and `of_bound`, the largest in units of its bound.

        Raises:
            Violation: an error is larger than its bound.
        """
        case, rows, device = self._case, self.rows, next(tensors_in(self._case)).device
        for name, tensor in outputs.items():
            if not isinstance(tensor, Tensor) or (rows is not None and len(tensor) != int(rows[-1]) + 1):
                what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)[:80]
                raise Violation(f"{name}: {what}; a tensor with one row for each of the call's is needed")
        found = {name: (tensor if rows is None else tensor[rows]).to(device) for name, tensor in outputs.items()}
        if self._reference is None:
            self._reference = subject.reference(case)
        expected = {name: self._reference[name].to(device) for name in found}
        with device:  # the kit allocates where the case lies
            (kernel.compare or subject.family.compare)(subject, case, found, expected, 1.0)
        return {**{name: error(found[name], expected[name]) for name in found}, "of_bound": subject.tally.worst}


def error(found: Tensor, expected: Tensor) -> float:
    """Of numbers, the relative error in the L2 norm; of integers in rows, the share of the expected ones not there."""
    if found.is_floating_point():
        norm = float(expected.double().norm())
        return float((found.double() - expected.double()).norm()) / norm if norm else 0.0
    if found.dtype is torch.uint8 or not expected.numel():
        return float((found != expected).double().mean()) if expected.numel() else 0.0
    missing = ~(expected[:, :, None] == found[:, None, :]).any(2)
    return float(missing.double().mean())


def own_cost(registered: RegisteredOperator, operator: Any, case: Any, least: Cost) -> Cost:
    """What a call costs by the operator's own formula; without one, the least.

    Raises:
        OperatorError: it returned something else.
    """
    formula = getattr(operator, "cost", None)
    if formula is None:
        return least
    cost = formula(case, least)
    if not isinstance(cost, Cost) or not set(cost.flops) <= set(ARITHMETICS) or not _are_counts(cost):
        raise OperatorError(
            f"{registered.title}: cost returned {cost!r}; a Cost with arithmetics of {', '.join(ARITHMETICS)} and with "
            "numbers from 0 on is needed"
        )
    return cost


def _are_counts(cost: Cost) -> bool:
    numbers = (cost.num_bytes, *cost.flops.values())
    return all(isinstance(number, Real) and 0 <= number < math.inf for number in numbers)
