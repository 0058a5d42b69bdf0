"""Relations that every family can use: they need only `outputs`, `compare` and a case's `units` and `take`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.testing.contract import ExplicitCase, Outputs, Refused, Relation, Violation
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import Guarded, PoisonedAllocations, map_tensors, poison, same_bits, tensors_in


def rows_of(outputs: Mapping[str, Tensor], rows: Tensor) -> Outputs:
    """Some rows of every output."""
    return {name: tensor[rows] for name, tensor in outputs.items()}


def matches_reference(subject: Subject, case: Any) -> None:
    """The operator against the reference, within the tolerance table."""
    subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)


def permuted_units(subject: Subject, case: Any) -> None:
    """Another order of requests or tokens gives the same rows in that order."""
    generator = torch.Generator().manual_seed(case.units)
    taken, rows = case.take(torch.randperm(case.units, generator=generator).tolist())
    expected = rows_of(subject.run(case), rows)
    exact = subject.properties.batch_invariant
    subject.agree(taken, subject.run(taken), expected, "in another order", exact=exact)


def units_alone(subject: Subject, case: Any) -> None:
    """Each request or token, or some of many, called alone gives what it gave among others."""
    together = subject.run(case)
    for unit in range(0, case.units, max(1, case.units // 8)):
        taken, rows = case.take([unit])
        exact = subject.properties.batch_invariant
        subject.agree(taken, subject.run(taken), rows_of(together, rows), f"number {unit} alone", exact=exact)


def repeatable(subject: Subject, case: Any) -> None:
    """The same call again gives the same bits, whatever the operator was used for in between."""
    first = subject.run(case)
    subject.equal(case, subject.run(case), first, "the same call again")
    subject.run(case.take(list(range(case.units))[:1])[0])
    subject.equal(case, subject.run(case), first, "the same call after another one")


def outputs_written(subject: Subject, case: Any) -> None:
    """With poison in and beside every fresh allocation the result is what it was, and nothing beside is written."""
    expected = subject.run(case)
    with PoisonedAllocations() as memory:
        found = subject.run(case)
    if not memory.untouched():
        raise Violation("memory beside an output, or beside a workspace, was written to")
    exact = subject.properties.deterministic
    subject.agree(case, found, expected, "with poison in fresh memory", exact=exact)


def inputs_left_alone(subject: Subject, case: Any) -> None:
    """No input, and nothing beside an input, is written to; what lies beside an input is not read."""
    guarded = Guarded()
    found = subject.run(map_tensors(case, lambda tensor: guarded.copy(tensor.to(subject.device))))
    if not guarded.untouched():
        raise Violation("an input, or memory beside it, was written to")
    exact = subject.properties.deterministic
    subject.agree(case, found, subject.run(case), "with poison beside the inputs", exact=exact)


def outputs_own_memory(subject: Subject, case: Any) -> None:
    """Overwriting the inputs after the call does not change what was returned."""
    copy = map_tensors(case, lambda tensor: tensor.to(subject.device, copy=True))
    found = subject.run_on_device(copy)
    before = {name: tensor.clone() for name, tensor in found.items()}
    for tensor in tensors_in(copy):
        poison(tensor)
    if not all(same_bits(found[name], before[name]) for name in before):
        raise Violation("an output shares memory with an input")


def later_tokens(subject: Subject, case: Any) -> None:
    """Rows give what they give when the later rows of their requests are not there yet; `case` must have `split`."""
    (head, rows), _ = case.split()
    exact = subject.properties.batch_invariant
    subject.agree(head, subject.run(head), rows_of(subject.run(case), rows), "without later rows", exact=exact)


def other_chunks(subject: Subject, case: Any) -> None:
    """Rows give what they give when the earlier rows of their requests came in a step before; see `later_tokens`."""
    _, (tail, rows) = case.split()
    exact = subject.properties.batch_invariant
    subject.agree(tail, subject.run(tail), rows_of(subject.run(case), rows), "in a later step", exact=exact)


def unread_memory(clean: Callable[[Any], Any]) -> Callable[[Subject, Any], None]:
    """NaN where nothing may be read gives the bits that numbers there give."""

    def check(subject: Subject, case: Any) -> None:
        found, expected = subject.run(case), subject.run(clean(case))
        exact = subject.properties.deterministic
        subject.agree(case, found, expected, "with NaN in unread memory", exact=exact)

    return check


def tile_borders(recipes: tuple[Any, ...]) -> ExplicitCase:
    """The comparison with the reference, also between poison, at sizes that cross the borders of tiles."""

    def check(subject: Subject) -> None:
        reasons = set()
        asked = filter(subject.asks, recipes)
        for recipe in (replace(recipe, dtype=dtype) for recipe in asked for dtype in subject.dtypes):
            case = recipe.build()
            if obstacles := subject.obstacles(case):
                reasons.add("; ".join(obstacles))
                subject.tally.refused["; ".join(obstacles)] += 1
                continue
            try:
                matches_reference(subject, case)
                inputs_left_alone(subject, case)
            except Violation as violation:
                raise Violation(f"{recipe!r}: {violation}") from None
        if not subject.tally.ran:
            raise Refused("; ".join(reasons))

    return ExplicitCase(
        "tile-borders", "a last tile that is partial, or full to the last row; state between tiles", check
    )


REFERENCE = Relation(
    "matches-reference",
    "any arithmetic that is not the specification's: a scale, a mask, a bound, an order of operations",
    matches_reference,
)
PERMUTED = Relation(
    "permuted-units", "a row that is computed from its neighbour's lengths, tables or pages", permuted_units
)
ALONE = Relation("units-alone", "results that depend on what else is in the batch", units_alone)
REPEATABLE = Relation(
    "repeatable", "state kept from an earlier call, races, atomic sums in scheduling order", repeatable, "deterministic"
)
WRITTEN = Relation(
    "outputs-written",
    "rows of the output that no thread writes, so that old memory shows; stores past its end",
    outputs_written,
)
INPUTS = Relation(
    "inputs-left-alone",
    "in-place changes of inputs; stores past an edge; loads of a partial tile past an edge",
    inputs_left_alone,
)
OWN_MEMORY = Relation(
    "outputs-own-memory", "an output that is a view of an input and changes with it", outputs_own_memory
)
EVERYWHERE = (REFERENCE, PERMUTED, ALONE, REPEATABLE, WRITTEN, INPUTS)
"""For every family whose results belong to rows."""
