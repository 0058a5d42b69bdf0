"""Conformance of family `comm`, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from minideepinfer.testing import strategies
from minideepinfer.testing.contract import Conformance, ExplicitCase, Outputs, Relation, Tolerance, Violation
from minideepinfer.testing.families.comm_large import LARGE
from minideepinfer.testing.recipes.comm import CommCase, CommRecipe, identity_experts
from minideepinfer.testing.relations import EVERYWHERE
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tensors import same_bits


def _outputs(subject: Subject, operator: object, case: CommCase) -> Outputs:
    return case.run(operator)


def _widen(case: CommCase) -> CommCase:
    return case


def _compare(
    subject: Subject, case: CommCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    for name, tensor in expected.items():
        if not same_bits(found[name], tensor):
            raise Violation(f"{name}: {difference(found[name], tensor)}")


def identity_round_trip(subject: Subject, case: CommCase) -> None:
    """Dispatch, identity experts and combine give each token times the sum of its weights, in float32."""
    found, expected = subject.run(case)["combined"], identity_experts(case.x, case.topk_ids, case.topk_weights)
    if not same_bits(found, expected):
        raise Violation(f"identity experts: {difference(found, expected)}")


def rows_are_the_tables(subject: Subject, case: CommCase) -> None:
    """Fetched rows are the table's own bytes."""
    found, expected = subject.run(case)["rows"], case.table[case.row_ids]
    if not same_bits(found, expected):
        raise Violation(f"rows: {difference(found, expected)}")


def c1(subject: Subject) -> None:
    """No token, and every token on one expert, the last."""
    wide = CommRecipe(tokens=4, hidden_size=32, num_experts=8, topk=2)
    for recipe in (wide, replace(wide, tokens=0), replace(wide, tokens=1), replace(wide, hidden_size=1030)):
        case = recipe.build()
        for ids in (case.topk_ids, case.topk_ids.new_full(case.topk_ids.shape, 7)):
            changed = replace(case, topk_ids=ids)
            identity_round_trip(subject, changed)
            subject.family.compare(subject, changed, subject.run(changed), subject.reference(changed), 1.0)


EDGES = (
    CommRecipe(),
    CommRecipe(tokens=0, rows=0),
    CommRecipe(tokens=0),
    CommRecipe(tokens=3, rows=9, hidden_size=1030, topk=4, num_experts=8),
)

FAMILY = Conformance(
    family="comm",
    recipes=strategies.comm_recipes,
    edges=EDGES,
    outputs=_outputs,
    widen=_widen,
    compare=_compare,
    relations=(
        *(relation for relation in EVERYWHERE if relation.name not in ("permuted-units", "units-alone")),
        Relation(
            "identity-round-trip", "tokens brought to the wrong place, or home in another order", identity_round_trip
        ),
        Relation("rows-of-the-table", "row numbers that overflow, wrap or are off by a shard", rows_are_the_tables),
    ),
    cases=(
        ExplicitCase("C1", "a rank without tokens, and all tokens on the last rank's experts (one rank)", c1),
        *LARGE,
    ),
    tolerances=tuple(
        Tolerance(dtype, "every tensor", "the same bits", "moving is not arithmetic; one rank's sum has one term")
        for dtype in ("float32", "bfloat16")
    ),
)
