"""Conformance of family `moe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import CommProblem, MoeProblem, Problem
from minideepinfer.testing import strategies
from minideepinfer.testing.bounds import moe_bound, route
from minideepinfer.testing.contract import Conformance, Outputs, Relation, Tolerance, Violation
from minideepinfer.testing.families.comm_ranks import experts_between_processes
from minideepinfer.testing.families.moe_calls import identity_case
from minideepinfer.testing.families.moe_cases import CASES, EDGES
from minideepinfer.testing.families.moe_large import LARGE
from minideepinfer.testing.families.moe_ranks import ranks_together
from minideepinfer.testing.recipes.moe import MoeCase, held_experts
from minideepinfer.testing.relations import EVERYWHERE, OWN_MEMORY, unread_memory
from minideepinfer.testing.subject import Subject, difference


def comm_problem(problem: MoeProblem) -> CommProblem:
    """What the comm operator of a MoE problem is told, on one rank."""
    shared = {f.name: getattr(problem, f.name) for f in fields(Problem)}
    return CommProblem(**shared, hidden_size=problem.hidden_size, num_experts=problem.num_experts, world_size=1)


def _outputs(subject: Subject, operator: Any, case: MoeCase) -> Outputs:
    outputs = {"y": case.run(operator, subject.peer("comm", comm_problem(case.problem)))}
    if case.routing is None:
        ids, weights = operator.route(case.x, operator.transform_weights(case.weights))
        outputs |= {"topk_ids": ids, "topk_weights": weights}
    return outputs


def _widen(case: MoeCase) -> MoeCase:
    shared = case.weights.shared
    if shared is not None:
        shared = replace(shared, w1=shared.w1.float(), w3=shared.w3.float(), w2=shared.w2.float())
    weights = replace(case.weights, shared=shared)
    return replace(case, problem=replace(case.problem, dtype="float32"), x=case.x.float(), weights=weights)


def _compare(
    subject: Subject, case: MoeCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    """Outputs of rows whose routing is decided."""
    y, wanted = found["y"], expected["y"]
    if y.shape != case.x.shape or y.dtype != case.x.dtype:
        raise Violation(f"y: {difference(y, case.x)}")
    bound = moe_bound(case, case.x.dtype).error + moe_bound(case, torch.float32).error
    decided = route(case)[3] if case.routing is None else torch.ones(len(y), dtype=torch.bool)
    subject.measure((y.double() - wanted.double()).abs()[decided], slack * subject.slack(case) * bound[decided], "y")


def routing(subject: Subject, case: MoeCase) -> None:
    """The gate chooses the experts that the contract names, and weighs them by their scores without the bias."""
    if case.routing is not None:
        return
    compare_routing(subject, case, subject.run(case))


def compare_routing(subject: Subject, case: MoeCase, found: Mapping[str, Tensor]) -> None:
    """Ids where they are decided, and weights, against the contract's.

    Raises:
        Violation: they are others.
    """
    ids, weights, error, decided = route(case)
    shape = (len(case.x), case.problem.topk)
    for name, dtype in (("topk_ids", torch.int32), ("topk_weights", torch.float32)):
        if found[name].dtype != dtype or found[name].shape != shape:
            raise Violation(f"{name}: {found[name].dtype} {list(found[name].shape)}, needs {dtype} {list(shape)}")
    if not torch.equal(found["topk_ids"][decided].long(), ids[decided]):
        raise Violation(f"topk_ids: {difference(found['topk_ids'][decided].long(), ids[decided])}")
    off = (found["topk_weights"].double() - weights).abs()
    subject.measure(off[decided], error[decided], "topk_weights")


def given_routing(subject: Subject, case: MoeCase) -> None:
    """The operator's own routing, given to it, changes no bit."""
    if case.routing is not None:
        return
    own = subject.run(case)
    given = replace(case, routing=(own["topk_ids"], own["topk_weights"]))
    exact = subject.properties.deterministic
    subject.agree(given, subject.run(given), {"y": own["y"]}, "with its own routing given", exact=exact)


def unused_experts(subject: Subject, case: MoeCase) -> None:
    """Experts that no token chose may hold anything.

    An operator may choose its arithmetic by the exponents of a layer's weights, so only codes leave the bits alone.
    """
    if case.routing is None:
        return
    weights = case.weights
    experts, used = weights.experts, case.routing[0].unique() - weights.experts.expert_start
    unused = ~torch.isin(torch.arange(experts.num_local), used)[:, None, None]
    codes = replace(
        experts,
        w13=torch.where(unused[:, None], experts.w13 ^ 255, experts.w13),
        w2=torch.where(unused, experts.w2 ^ 255, experts.w2),
    )
    scales = replace(
        experts,
        w13_scale=experts.w13_scale.masked_fill(unused[:, None], 255),
        w2_scale=experts.w2_scale.masked_fill(unused, 255),
    )
    expected, exact = subject.run(case), subject.properties.deterministic
    for spoiled, how, bitwise in (
        (codes, "with other numbers in unused experts", exact),
        (scales, "with NaN in unused experts", False),
    ):
        other = replace(case, weights=replace(weights, experts=spoiled))
        subject.agree(case, subject.run(other), expected, how, exact=bitwise)


def ranks_add_up(subject: Subject, case: MoeCase) -> None:
    """Two ranks with half of the experts each give, together, what one rank gives; remote rows are NaN."""
    experts, shared = case.weights.experts, case.weights.shared
    if case.routing is None or shared is not None or experts.num_local < 2:
        return
    half, total = experts.num_local // 2, torch.zeros(case.x.shape)
    for first, last in ((0, half), (half, experts.num_local)):
        rank = replace(
            case,
            problem=replace(case.problem, num_local_experts=last - first),
            weights=replace(case.weights, experts=held_experts(experts, first, last)),
        )
        total += subject.run(replace(rank, x=case.x.masked_fill(~rank.local_rows()[:, None], torch.nan)))["y"].float()
    # Each rank rounds for itself, hence three bounds instead of two.
    subject.family.compare(subject, case, {"y": total.to(case.x.dtype)}, subject.run(case), 3.0)


def identity_experts(subject: Subject, case: MoeCase) -> None:
    """Experts that return silu(6) times their input give x times the sum of its weights times silu(6)."""
    if case.routing is None or case.weights.shared is not None:
        return
    identity, expected = identity_case(case)
    subject.family.compare(subject, identity, subject.run(identity), {"y": expected}, 1.0)


def zero_experts(subject: Subject, case: MoeCase) -> None:
    """Experts of zeros, like no expert at all, leave the shared expert alone."""
    if case.routing is None:
        return
    experts = case.weights.experts
    zeros = replace(experts, w13=torch.zeros_like(experts.w13), w2=torch.zeros_like(experts.w2))
    ids, weights = case.routing
    none = replace(case, routing=(torch.full_like(ids, -1), torch.full_like(weights, torch.nan)))
    zero = replace(case, weights=replace(case.weights, experts=zeros))
    expected = subject.run(none)["y"]
    found = subject.run(zero)["y"]
    if not torch.equal(found, expected):
        raise Violation(f"experts of zeros: {difference(found, expected)}")


def _clean(case: MoeCase) -> MoeCase:
    given = None if case.routing is None else (case.routing[0], case.routing[1].nan_to_num(2.0))
    return replace(case, x=case.x.nan_to_num(2.0), routing=given)


_WHY = (
    "running error analysis of the contract's formula around float64, element by element: a product of K terms adds "
    "(K+1)·2⁻²⁴·Σ|w x|, silu and weighting 8·2⁻²⁴, |silu'| ≤ 1.1 and ≤ (1-h)eʰ below h < 0, nothing where a clamp "
    "holds, every result one rounding to the compute dtype, k + 1 terms summed in float32; QDQ-FP8 of an interval is "
    "enclosed by its ends under both scales it may get"
)

FAMILY = Conformance(
    family="moe",
    recipes=strategies.moe_recipes,
    edges=EDGES,
    outputs=_outputs,
    widen=_widen,
    compare=_compare,
    relations=(
        *EVERYWHERE,
        OWN_MEMORY,
        Relation("routing", "bias in the weights, weights not normalised, ties by thread, ids not ascending", routing),
        Relation("given-routing", "a gate that is computed twice, differently", given_routing),
        Relation(
            "unread-memory",
            "rows of other ranks, or slots without an expert, multiplied by zero",
            unread_memory(_clean),
        ),
        Relation("unused-experts", "experts without tokens that are computed, or left in the output", unused_experts),
        Relation(
            "ranks-add-up", "global and local expert numbers confused; a rank's share dropped or doubled", ranks_add_up
        ),
        Relation(
            "ranks-together",
            "a rank without tokens that leaves out a collective; tokens that come home to the wrong row, or twice",
            ranks_together,
        ),
        Relation(
            "between-processes",
            "experts whose numbers begin elsewhere on another rank; a rank that waits for one that has gone on",
            experts_between_processes,
        ),
        Relation(
            "identity-experts",
            "nibbles swapped, columns shifted, partial tiles dropped, weights lost",
            identity_experts,
        ),
        Relation("zero-experts", "an output that is not cleared where a token has no expert", zero_experts),
    ),
    cases=(*CASES, *LARGE),
    tolerances=(
        Tolerance("float32", "every output, by element", "the analysis with 2⁻²⁴, twice: operator and reference", _WHY),
        Tolerance(
            "bfloat16", "every output, by element", "the analysis with 2⁻⁸, and with 2⁻²⁴ for the reference", _WHY
        ),
        Tolerance(
            "both",
            "routing",
            "ids equal where the last expert chosen leads by more than the error of its score, or ties exactly; "
            "weights to a relative error of (H+1)·2⁻²⁴·Σ|x g| + (20+k)·2⁻²⁴, and 2·2⁻⁶³ over the sum of scores",
            "|d log √softplus(l) / dl| ≤ 1/2; a weight has a score above and a sum of scores below the fraction line; "
            "a score below 2⁻⁶³ is the root of a number that float32 flushes",
        ),
        Tolerance(
            "both",
            "decoded weights (case M2)",
            "the same bits, but for the sign of zero; in bfloat16 0 is as good as a result below 2⁻¹²⁶",
            "decoding is exact in both dtypes; sums lose the sign of zero, and units for bfloat16 may flush; to every "
            "other output 2⁻¹²⁰ is added for that",
        ),
    ),
)
