"""Conformance of family `indexer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.cache.layouts import cache_layout
from minideepinfer.testing import strategies
from minideepinfer.testing.bounds import index_scores
from minideepinfer.testing.contract import Conformance, Outputs, Relation, Tolerance, Violation
from minideepinfer.testing.families.indexer_cases import CASES, EDGES
from minideepinfer.testing.families.indexer_large import LARGE
from minideepinfer.testing.recipes.batch import move_pages, without_nan
from minideepinfer.testing.recipes.indexer import IndexerCase
from minideepinfer.testing.relations import EVERYWHERE, OWN_MEMORY, later_tokens, other_chunks, unread_memory
from minideepinfer.testing.subject import Subject


def _outputs(subject: Subject, operator: Any, case: IndexerCase) -> Outputs:
    indices, candidates = case.run(operator)
    if (candidates is not None) != case.problem.emits_candidates:
        raise Violation(
            f"candidates are {candidates}, the problem says emits_candidates={case.problem.emits_candidates}"
        )
    return {"indices": indices} if candidates is None else {"indices": indices, "candidates": candidates}


def _widen(case: IndexerCase) -> IndexerCase:
    problem = replace(case.problem, dtype="float32", cache_layout="float32")
    keys = cache_layout(case.problem.cache_layout).index.decode(case.index_keys, torch.float32)
    return replace(case, problem=problem, q=case.q.float(), head_weights=case.head_weights.float(), index_keys=keys)


def _compare(
    subject: Subject, case: IndexerCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    """As sets; where scores are exact and the operator is deterministic the sets must be equal."""
    problem = case.problem
    for name, width in (("indices", problem.topk), ("candidates", problem.candidate_topk_blocks)):
        if name in found and (found[name].dtype != torch.int32 or found[name].shape != (len(case.q), width)):
            raise Violation(
                f"{name}: {found[name].dtype} {list(found[name].shape)}, int32 [{len(case.q)}, {width}] needed"
            )
    for row in range(len(case.q)):
        scores, errors = index_scores(case, row)
        errors = subject.slack(case) * errors
        legal = torch.ones(len(scores), dtype=torch.bool)
        if case.candidates is not None:
            legal = torch.isin(torch.arange(len(scores)) // problem.candidate_block_size, case.candidates[row])
        entries = _Choice(f"row {row}: indices", scores, errors, legal)
        entries.check(subject, found["indices"][row], expected["indices"][row], case.exact)
        if "candidates" in found:
            blocks = _Choice(f"row {row}: candidates", *_blocks(scores, errors, problem.candidate_block_size))
            blocks.check(subject, found["candidates"][row], expected["candidates"][row], case.exact)


def _blocks(scores: Tensor, errors: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block scores with the newest one pinned, their errors, and that all are legal."""
    count = -(-len(scores) // size)
    padded = torch.nn.functional.pad(scores, (0, count * size - len(scores)), value=-torch.inf)
    best = padded.view(count, size).amax(1) if count else scores
    if count:
        best[-1] = torch.finfo(torch.float64).max
    noise = errors.max().expand(count) if count else errors
    return best, noise, torch.ones(count, dtype=torch.bool)


class _Choice:
    """The best few of some numbered things with scores, of which only the legal ones may be chosen."""

    def __init__(self, what: str, scores: Tensor, errors: Tensor, legal: Tensor) -> None:
        self.what, self.scores, self.errors, self.legal = what, scores, errors, legal

    def check(self, subject: Subject, found: Tensor, expected: Tensor, exact: bool) -> None:
        count = min(len(found), int(self.legal.sum()))
        chosen, rest = found[:count].tolist(), found[count:].tolist()
        if rest != [-1] * len(rest):
            raise Violation(f"{self.what}: {found.tolist()} has more than {count} entries, or -1 before one of them")
        if any(not 0 <= n < len(self.scores) or not self.legal[n] for n in chosen) or len(set(chosen)) < count:
            raise Violation(f"{self.what}: {found.tolist()} names what is not visible, not a candidate, or twice")
        self._best(subject, chosen)
        wanted = set(expected.tolist()) - {-1}
        if exact and subject.properties.deterministic and set(chosen) != wanted:
            raise Violation(f"{self.what}: {sorted(chosen)}, by the tie rule {sorted(wanted)}")

    def _best(self, subject: Subject, chosen: list[int]) -> None:
        left_out = self.legal.clone()
        left_out[chosen] = False
        if not chosen or not left_out.any():
            return
        lowest, highest = self.scores[chosen].min(), self.scores[left_out].max()
        noise = 2 * self.errors.max()
        subject.measure((highest - lowest).clamp(min=0.0).view(1), noise.view(1), f"{self.what}, score left out")


def other_pages(subject: Subject, case: IndexerCase) -> None:
    """The same keys on other pages give the same selection."""
    batch, pool = move_pages(case.batch, case.index_keys, torch.Generator().manual_seed(1))
    found = subject.run(replace(case, batch=batch, index_keys=pool))
    subject.agree(case, found, subject.run(case), "on other pages", exact=subject.properties.deterministic)


def two_levels(subject: Subject, case: IndexerCase) -> None:
    """With every block kept, the candidates that come out restrict nothing when they go in."""
    size = case.problem.candidate_block_size
    visible = int(case.batch.visible_entries(case.problem.compress_ratio).max()) if len(case.q) else 0
    kept = replace(case.problem, candidate_topk_blocks=max(1, -(-visible // size)))
    source = replace(case, candidates=None, problem=replace(kept, emits_candidates=True, uses_candidates=False))
    one_level = subject.run(source)
    reindex = replace(
        case,
        candidates=one_level["candidates"].flip(1),
        problem=replace(kept, emits_candidates=False, uses_candidates=True),
    )
    plain = replace(source, problem=replace(kept, emits_candidates=False, uses_candidates=False))
    expected = {"indices": one_level["indices"]}
    for other, what in ((plain, "without candidates"), (reindex, "within all blocks")):
        subject.agree(other, subject.run(other), expected, what, exact=False)


def _clean(case: IndexerCase) -> IndexerCase:
    keys = without_nan(case.index_keys, cache_layout(case.problem.cache_layout).index, 2.0)
    return replace(case, q=case.q.nan_to_num(2.0), index_keys=keys)


FAMILY = Conformance(
    family="indexer",
    recipes=strategies.indexer_recipes,
    edges=EDGES,
    outputs=_outputs,
    widen=_widen,
    compare=_compare,
    relations=(
        *EVERYWHERE,
        OWN_MEMORY,
        Relation("other-pages", "keys of another request's page, or in physical order", other_pages),
        Relation("unread-memory", "keys that no row may see taking part in a maximum or a sum", unread_memory(_clean)),
        Relation("later-tokens", "a group that is visible before its last token", later_tokens),
        Relation(
            "other-chunks", "visibility counted from the chunk; a tie rule that goes by tile or slice", other_chunks
        ),
        Relation("two-levels", "candidates ignored, numbered by entry, or without the newest block", two_levels),
    ),
    cases=(*CASES, *LARGE),
    packs=True,
    tolerances=(
        *(
            Tolerance(
                dtype,
                "selected entries and candidate blocks, as sets",
                "no score left out is above one selected by more than 2·(d+h+2)·2⁻²⁴·Σ|w|Σ|q k|; none at all, and "
                "equal sets, where scores are exact (small integers) and the operator is deterministic",
                "d·h products and h weights summed in float32 (the contract's words), each sum off by at most one "
                "rounding a term; products of bfloat16 are exact in float32, so both dtypes have one bound",
            )
            for dtype in ("float32", "bfloat16")
        ),
        Tolerance(
            "both",
            "the same",
            "the sum of all products with a factor below 2⁻¹²⁶, and 2⁻¹²⁰·(1 + Σ|w|), more",
            "a device may flush subnormals, of the input and on the way",
        ),
        Tolerance(
            "bfloat16",
            "case `overlap`",
            "at least 0.9934 of the 512 entries that float32 selects by the unrounded numbers",
            "the article's figure; naive reaches 0.9962 on the kit's numbers, and the report has both",
        ),
    ),
)
