"""Conformance of family `comm`: every method on one rank, and cases between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from minideepinfer.testing import strategies
from minideepinfer.testing.contract import Conformance, ExplicitCase, Outputs, Refused, Relation, Tolerance, Violation
from minideepinfer.testing.families.comm_large import LARGE
from minideepinfer.testing.families.comm_ranks import (
    SIZES,
    between_processes,
    scenarios,
    some_between_processes,
    with_experts,
)
from minideepinfer.testing.families.whole_model import WHOLE_MODEL
from minideepinfer.testing.recipes.comm import CommCase, CommRecipe, identity_experts
from minideepinfer.testing.recipes.ranks import RanksRecipe
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
    """No token, and every token on one expert, the last; on one rank and between processes."""
    wide = CommRecipe(tokens=4, hidden_size=32, num_experts=8, topk=2)
    one_rank = [wide, replace(wide, tokens=0), replace(wide, tokens=1), replace(wide, hidden_size=1030)]
    _on_any_ranks(subject, one_rank, scenarios)


def m4(subject: Subject) -> None:
    """Identity experts at hidden 1030, for 1, 5 and 300 tokens, on one rank and between processes."""
    calls = ((1, 1), (1, 6), (5, 4), (300, 6))
    one_rank = [CommRecipe(tokens, hidden_size=1030, num_experts=8, topk=topk, seed=tokens) for tokens, topk in calls]

    def of_ranks(size: int, dtype: str) -> list[RanksRecipe]:
        ragged = [(tokens // 2, *[0] * (size - 2), tokens - tokens // 2) for tokens, _ in calls]
        return [RanksRecipe(counts, dtype, 1030, topk) for counts, (_, topk) in zip(ragged, calls, strict=True)]

    _on_any_ranks(subject, one_rank, of_ranks)


def _on_any_ranks(
    subject: Subject, one_rank: Sequence[CommRecipe], of_ranks: Callable[[int, str], Sequence[RanksRecipe]]
) -> None:
    """Calls on one rank and on several, as many as the operator serves; it must serve some."""
    for dtype in subject.dtypes:
        cases = [replace(recipe, dtype=dtype).build() for recipe in one_rank]
        served = subject.serves(cases[0].problem)
        for case in cases if served else []:
            for ids in (case.topk_ids, case.topk_ids.new_full(case.topk_ids.shape, case.problem.num_experts - 1)):
                _check(subject, replace(case, topk_ids=ids))
        for size in SIZES:
            for recipe in of_ranks(size, dtype):
                served |= between_processes(subject, recipe)
        if not served:
            raise Refused("; ".join(subject.obstacles(cases[0])))


def _check(subject: Subject, case: CommCase) -> None:
    identity_round_trip(subject, case)
    subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)


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
        Relation(
            "between-processes",
            "own tokens dropped; ranks in another order; a token sent twice to a rank, or added twice; padding shown",
            some_between_processes,
        ),
        Relation("rows-of-the-table", "row numbers that overflow, wrap or are off by a shard", rows_are_the_tables),
    ),
    cases=(
        ExplicitCase("C1", "a rank without tokens that leaves out a collective; all tokens on the last rank", c1),
        ExplicitCase("M4", "a row width that is no multiple of a vector, cut or read past its end", m4),
        ExplicitCase("moe-and-comm", "a dispatch that brings what the experts do not expect", with_experts),
        *WHOLE_MODEL,
        *LARGE,
    ),
    tolerances=tuple(
        Tolerance(dtype, "every tensor", "the same bits", "moving is not arithmetic; sums are of exact numbers")
        for dtype in ("float32", "bfloat16")
    ),
)
