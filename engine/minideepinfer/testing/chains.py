"""Operators whose selection has a layout of their own: completed with a partner, and compared at the ends.

An indexer that emits another layout is checked together with each registered attention operator that accepts it, and
an attention operator with each indexer that emits one of its own. What lies between is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from minideepinfer.operators import TOKEN_INDICES, OperatorRegistry, RegisteredOperator, Selection
from minideepinfer.testing.bounds import attention_bound, index_scores
from minideepinfer.testing.contract import Conformance, ExplicitCase, Outputs, Relation, Violation
from minideepinfer.testing.end_to_end import pair_end_to_end
from minideepinfer.testing.families import attention, indexer
from minideepinfer.testing.families.indexer_cases import CHUNKS, grouped, tied
from minideepinfer.testing.recipes.batch import BatchRecipe, move_pages
from minideepinfer.testing.recipes.chain import ChainCase, ChainRecipe, complete
from minideepinfer.testing.recipes.indexer import ROLES, IndexerCase
from minideepinfer.testing.relations import EVERYWHERE, OWN_MEMORY, later_tokens, other_chunks, unread_memory
from minideepinfer.testing.strategies import batches
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tolerances import conformance

OTHER = {"indexer": "attention", "attention": "indexer"}
DIMS = ((1, 16, 2, 32, 8), (1, 64, 2, 64, 16), (8, 128, 16, 128, 64), (32, 128, 16, 512, 64), (32, 128, 64, 512, 64))
"""Index heads and head_dim, heads, head_dim and rope_dim at which cases are tried, the wanted ones first."""


def conformances(operator: RegisteredOperator, registry: OperatorRegistry) -> list[Conformance]:
    """Everything that an operator is checked against: its family, or the chains of its own layouts, or both."""
    family = operator.declaration.family
    own = private_layouts(operator)
    chains = [
        chain(family, layout, partner)
        for layout in own
        for partner in registry.operators(OTHER[family])
        if layout in _layouts(partner)
    ]
    public = [] if own and TOKEN_INDICES not in _layouts(operator) and chains else [conformance(family)]
    return public + chains


def unfinished(operator: RegisteredOperator, registry: OperatorRegistry) -> list[str]:
    """Why a layout of an operator's own cannot be judged, one sentence each."""
    other = OTHER.get(operator.declaration.family, "")
    return [
        f"selection layout {layout} cannot be judged: no {other} operator that knows it is registered"
        for layout in private_layouts(operator)
        if not any(layout in _layouts(partner) for partner in registry.operators(other))
    ]


def private_layouts(operator: RegisteredOperator) -> list[str]:
    """Selection layouts of an indexer or attention operator that the kit does not know."""
    return [layout for layout in _layouts(operator) if layout != TOKEN_INDICES]


def _layouts(operator: RegisteredOperator) -> tuple[str, ...]:
    declaration = operator.declaration
    if declaration.family == "indexer":
        return declaration.emits.get("selection", ())
    return declaration.accepts.get("selection", ()) if declaration.family == "attention" else ()


def chain(tested: str, layout: str, partner: RegisteredOperator) -> Conformance:
    """What holds of an operator together with a partner.

    Args:
        tested: family of the operator under test.
        layout: of the selection between the two.
        partner: completes it.
    """
    own = partial(_in_layout, tested, layout)
    cases = (
        ExplicitCase("I1", "the group that a query stands inside: visible before its last token", own(_i1)),
        ExplicitCase("I2", "ties broken by tile, thread or batch", own(_i2)),
        ExplicitCase("end-to-end", "state that one layer, step or phase leaves to another", pair_end_to_end),
    )
    relations = (
        *EVERYWHERE,
        OWN_MEMORY,
        Relation("other-pages", "a physical page number where a logical one belongs", _other_pages),
        Relation("unread-memory", "memory that no row may see taking part in a sum", unread_memory(_clean)),
        Relation("later-tokens", "a causal bound that is off by one", later_tokens),
        Relation("other-chunks", "visibility counted from the chunk", other_chunks),
    )
    return Conformance(
        family=tested,
        recipes=lambda dtypes: _recipes(dtypes, tested, layout),
        edges=tuple(replace(edge, tested=tested, layout=layout) for edge in EDGES),
        outputs=_outputs,
        widen=_widen,
        compare=_compare,
        relations=tuple(replace(relation, name=f"{partner.name}/{relation.name}") for relation in relations),
        cases=tuple(replace(case, name=f"{partner.name}/{case.name}") for case in cases),
        tolerances=(),
        partner=partner,
    )


_THREE = BatchRecipe(seqlens=(3, 0, 4), context_lens=(12, 5, 0))

EDGES = (
    ChainRecipe(),
    ChainRecipe(BatchRecipe((1,), (0,)), compress_ratio=2),
    ChainRecipe(BatchRecipe((2, 2), (4, 9), padding=(0,))),
    ChainRecipe(_THREE, topk=12, num_heads=3, index_heads=2),
    ChainRecipe(_THREE, numbers="zero", topk=4, compress_ratio=2),
    ChainRecipe(_THREE, numbers="normal", topk=2),
    ChainRecipe(BatchRecipe((4,), (30,)), role="source", candidate_block_size=3, candidate_topk_blocks=3),
    ChainRecipe(BatchRecipe((4,), (30,)), role="reindex", candidate_block_size=4, candidate_topk_blocks=3, topk=9),
    ChainRecipe(BatchRecipe((2, 1), (17, 33), decode=True), topk=9),
)


def _recipes(dtypes: tuple[str, ...], tested: str, layout: str) -> st.SearchStrategy[ChainRecipe]:
    return st.builds(
        ChainRecipe,
        batch=batches(),
        dtype=st.sampled_from(dtypes),
        tested=st.just(tested),
        layout=st.just(layout),
        num_heads=st.integers(1, 3),
        index_heads=st.integers(1, 3),
        compress_ratio=st.sampled_from([1, 2]),
        topk=st.integers(1, 12),
        role=st.sampled_from(ROLES),
        candidate_topk_blocks=st.integers(1, 6),
        candidate_block_size=st.sampled_from([2, 4]),
        numbers=st.sampled_from(["normal", "few", "zero"]),
    )


def _outputs(subject: Subject, operator: Any, case: ChainCase) -> Outputs:
    problem = case.partner_problem
    if case.problem.selection_layout == TOKEN_INDICES:  # type: ignore[attr-defined]
        other = subject.peer(OTHER[case.tested], problem)
    else:
        assert subject.family.partner is not None
        other = subject.built(subject.family.partner, problem)
    return case.run(operator, other) if case.tested == "indexer" else case.run(other, operator)


def _widen(case: ChainCase) -> ChainCase:
    wide = replace(case, indexer=indexer.FAMILY.widen(case.indexer), attention=attention.FAMILY.widen(case.attention))
    return wide.in_layout(TOKEN_INDICES)


def _compare(
    subject: Subject, case: ChainCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    """Heads of rows whose selection is decided: the cut is clear, or ties are exact and the operators obey the rule."""
    heads, wanted, call = found["heads"], expected["heads"], case.attention
    if heads.shape != call.q.shape or heads.dtype != call.q.dtype:
        raise Violation(f"heads: {difference(heads, call.q)}")
    chosen, decided = _selection(case, by_rule=subject.properties.deterministic)
    selected = replace(call, selection=chosen)
    bound = attention_bound(selected, call.q.dtype) + attention_bound(selected, torch.float32)
    error = (heads.double() - wanted.double()).abs()
    subject.measure(error[decided], slack * bound[decided, None, None].expand(error[decided].shape), "heads")


def _selection(case: ChainCase, *, by_rule: bool) -> tuple[Selection, Tensor]:
    """What the contract selects, and in which rows that is certain, bool `[T]`."""
    call, problem = case.indexer, case.indexer.problem
    indices = torch.full((len(call.q), problem.topk), -1, dtype=torch.int32)
    decided = torch.ones(len(call.q), dtype=torch.bool)
    for row in range(len(call.q)):
        scores, errors = index_scores(call, row)
        if call.candidates is not None:
            numbers = torch.arange(len(scores)) // problem.candidate_block_size
            scores = scores.masked_fill(~torch.isin(numbers, call.candidates[row]), -torch.inf)
        ranked, order = scores.sort(descending=True, stable=True)
        count = min(problem.topk, int((scores > -torch.inf).sum()))
        indices[row, :count] = order[:count].int()
        if count < len(ranked) and ranked[count] > -torch.inf:
            noise = 2 * float(errors.max())
            decided[row] = bool(ranked[count - 1] - ranked[count] > noise) or (call.exact and by_rule)
    return Selection(indices), decided


def _other_pages(subject: Subject, case: ChainCase) -> None:
    """The same entries on other pages give the same heads."""
    assert case.attention.global_kv is not None
    batch, keys = move_pages(case.batch, case.indexer.index_keys, torch.Generator().manual_seed(1))
    _, pool = move_pages(case.batch, case.attention.global_kv, torch.Generator().manual_seed(1))
    moved = replace(
        case,
        indexer=replace(case.indexer, batch=batch, index_keys=keys),
        attention=replace(case.attention, batch=batch, global_kv=pool),
    )
    exact = subject.properties.deterministic
    subject.agree(case, subject.run(moved), subject.run(case), "on other pages", exact=exact)


def _clean(case: ChainCase) -> ChainCase:
    return replace(
        case,
        indexer=replace(
            case.indexer,
            q=case.indexer.q.nan_to_num(2.0),
            index_keys=case.indexer.index_keys.nan_to_num(2.0),
        ),
        attention=replace(
            case.attention,
            **{name: getattr(case.attention, name).nan_to_num(3.0) for name in ("q", "window_new", "window_ring")},
            global_kv=None if case.attention.global_kv is None else case.attention.global_kv.nan_to_num(3.0),
        ),
    )


Calls = Callable[[tuple[int, int], str], list[tuple[IndexerCase, BatchRecipe]]]
"""Indexer calls at index heads and head_dim, in a dtype, with the recipes of their batches."""


def _in_layout(tested: str, layout: str, calls: Calls) -> Callable[[Subject], None]:
    """A check that completes the indexer calls of a case and compares their ends."""

    def check(subject: Subject) -> None:
        for dtype in subject.dtypes:
            columns = [calls(dims[:2], dtype) for dims in DIMS]
            for number in range(len(columns[0])):
                at = [
                    complete(*column[number], tested, layout, dims[2:])
                    for column, dims in zip(columns, DIMS, strict=True)
                ]
                case = subject.nearest(at)
                subject.family.compare(subject, case, subject.run(case), subject.reference(case), 1.0)

    return check


def _i1(dims: tuple[int, int], dtype: str) -> list[tuple[IndexerCase, BatchRecipe]]:
    return [grouped(dims, dtype, ratio, 2, start, count) for ratio in (2, 1) for start, count in CHUNKS]


def _i2(dims: tuple[int, int], dtype: str) -> list[tuple[IndexerCase, BatchRecipe]]:
    return [(case, batch) for case, batch, _ in tied(dims, dtype)]
