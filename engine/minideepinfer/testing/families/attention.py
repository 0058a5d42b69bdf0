"""Conformance of family `attention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import Selection
from minideepinfer.testing import strategies
from minideepinfer.testing.bounds import attention_bound
from minideepinfer.testing.contract import Conformance, Outputs, Relation, Tolerance, Violation
from minideepinfer.testing.families.attention_cases import CASES, EDGES
from minideepinfer.testing.families.attention_large import LARGE
from minideepinfer.testing.recipes.attention import AttentionCase
from minideepinfer.testing.recipes.batch import move_pages, without_nan
from minideepinfer.testing.relations import EVERYWHERE, OWN_MEMORY, later_tokens, other_chunks, unread_memory
from minideepinfer.testing.subject import Subject, difference


def _outputs(subject: Subject, operator: Any, case: AttentionCase) -> Outputs:
    return {"heads": case.run(operator)}


def _widen(case: AttentionCase) -> AttentionCase:
    problem = replace(case.problem, dtype="float32", cache_layout="float32")
    layout, pool = case.layout, case.global_kv
    return replace(
        case,
        problem=problem,
        q=case.q.float(),
        window_new=case.window_new.float(),
        window_ring=layout.window.decode(case.window_ring, torch.float32),
        global_kv=None if pool is None else layout.main.decode(pool, torch.float32),
    )


def _compare(
    subject: Subject, case: AttentionCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    heads, wanted = found["heads"], expected["heads"]
    if heads.shape != case.q.shape or heads.dtype != case.q.dtype:
        raise Violation(f"heads: {difference(heads, case.q)}")
    bound = attention_bound(case, case.q.dtype) + attention_bound(case, torch.float32)
    error = (heads.double() - wanted.double()).abs()
    subject.measure(error, slack * subject.slack(case) * bound[:, None, None].expand(error.shape), "heads")


def rows_without_keys(subject: Subject, case: AttentionCase) -> None:
    """A row without any key is exactly zero."""
    heads = subject.run(case)["heads"]
    for row in range(len(heads)):
        if not len(case.keys(row)) and not bool((heads[row] == 0).all()):
            raise Violation(f"row {row} has no key, but its output is not zero")


def other_pages(subject: Subject, case: AttentionCase) -> None:
    """The same entries on other pages give the same bits."""
    if case.global_kv is None:
        return
    batch, pool = move_pages(case.batch, case.global_kv, torch.Generator().manual_seed(1))
    _same(subject, case, replace(case, batch=batch, global_kv=pool), "on other pages")


def other_rings(subject: Subject, case: AttentionCase) -> None:
    """The same window entries in other rings give the same bits."""
    order = torch.randperm(len(case.window_ring), generator=torch.Generator().manual_seed(1))
    ring = torch.empty_like(case.window_ring)
    ring[order] = case.window_ring
    batch = replace(case.batch, ring_table=order[case.batch.ring_table])
    _same(subject, case, replace(case, batch=batch, window_ring=ring), "in other rings")


def _same(subject: Subject, case: AttentionCase, other: AttentionCase, what: str) -> None:
    exact = subject.properties.deterministic
    subject.agree(case, subject.run(other), subject.run(case), what, exact=exact)


def other_slots(subject: Subject, case: AttentionCase) -> None:
    """A selection has no order."""
    if case.selection is None:
        return
    generator, indices = torch.Generator().manual_seed(1), case.selection.indices.clone()
    for row in range(len(indices)):
        length = indices.shape[1] if case.selection.lens is None else int(case.selection.lens[row])
        indices[row, :length] = indices[row, torch.randperm(length, generator=generator)]
    other = replace(case, selection=Selection(indices, case.selection.lens))
    subject.agree(case, subject.run(other), subject.run(case), "with shuffled slots", exact=False)


def no_sink(subject: Subject, case: AttentionCase) -> None:
    """No sink is a sink that weighs nothing."""
    nothing = torch.full((case.problem.num_heads,), -1e30)
    without, with_nothing = replace(case, sink=None), replace(case, sink=nothing)
    subject.agree(without, subject.run(with_nothing), subject.run(without), "with a sink of -1e30", exact=False)


def _clean(case: AttentionCase) -> AttentionCase:
    pool = None if case.global_kv is None else without_nan(case.global_kv, case.layout.main, 3.0)
    ring = without_nan(case.window_ring, case.layout.window, 3.0)
    numbers = {name: getattr(case, name).nan_to_num(3.0) for name in ("q", "window_new")}
    return replace(case, global_kv=pool, window_ring=ring, **numbers)


_FLOAT32 = "√2·V·((2(D+4)·E + 2N + 11)·2⁻²⁴ + 2⁻²⁴)"
_WHY_FLOAT32 = (
    "V = largest key channel of the row, E = largest `scale·Σ|q k|` or sink, N = keys, D = head_dim: a logit is off by "
    "(D+4)·2⁻²⁴·E with the maximum subtracted, which moves numerator and denominator; exponentials and sums over N "
    "keys add 2N + 8, the rotation 3 and a factor √2"
)

FAMILY = Conformance(
    family="attention",
    recipes=strategies.attention_recipes,
    edges=EDGES,
    outputs=_outputs,
    widen=_widen,
    compare=_compare,
    relations=(
        *EVERYWHERE,
        OWN_MEMORY,
        Relation("rows-without-keys", "0 / 0, or a maximum of -inf minus itself", rows_without_keys),
        Relation("other-pages", "a physical page number where a logical one belongs", other_pages),
        Relation("other-rings", "the ring of another request, or its number taken for the request's", other_rings),
        Relation(
            "unread-memory", "an invalid slot read as entry 0 with weight 0: 0 · NaN = NaN", unread_memory(_clean)
        ),
        Relation("later-tokens", "a causal bound that is off by one", later_tokens),
        Relation("other-chunks", "a window that ends at the chunk, or is read from overwritten slots", other_chunks),
        Relation(
            "other-slots",
            "invalid entries taken for valid ones in front; a maximum not rescaled",
            other_slots,
        ),
        Relation("no-sink", "a sink counted as a value, or scaled", no_sink),
    ),
    cases=(*CASES, *LARGE),
    packs=True,
    tolerances=(
        Tolerance("float32", "every output", f"{_FLOAT32}, twice: operator and reference", _WHY_FLOAT32),
        Tolerance(
            "bfloat16",
            "every output",
            f"{_FLOAT32} for the reference, and √2·V·((2(D+4)·E + 2N + 11)·2⁻²⁴ + 3·2⁻⁸) for the operator",
            "as float32, and three roundings to bfloat16: probabilities, head before and after the rotation (spec 3.8)",
        ),
        Tolerance(
            "both",
            "every output",
            "2⁻¹²⁰ more",
            "a device may flush subnormals, of the input and on the way: sums of terms below 2⁻¹²⁶",
        ),
        Tolerance(
            "both",
            "case `article`",
            "4.9·10⁻⁴ where the reference is below 0.25, one bfloat16 ulp elsewhere; in bfloat16 6·2⁻⁹/√3·√Σ(pk)² more",
            "the article's figures leave room for one rounding of the result; spec 3.8 also rounds probabilities: N "
            "independent errors, uniform within 2⁻⁹, six standard deviations. The report has the error as it is: "
            "without rounded probabilities it is 4.88·10⁻⁴, with them 8 to 14·10⁻⁴",
        ),
    ),
)
