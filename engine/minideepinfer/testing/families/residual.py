"""Conformance of family `residual`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.testing import residual_bounds, strategies
from minideepinfer.testing.contract import Conformance, Outputs, Relation, Tolerance, Violation
from minideepinfer.testing.families.residual_cases import CASES, EDGES
from minideepinfer.testing.recipes.residual import ResidualCase
from minideepinfer.testing.relations import EVERYWHERE, OWN_MEMORY
from minideepinfer.testing.rounding import FLOAT32
from minideepinfer.testing.subject import Subject, difference
from minideepinfer.testing.tensors import same_bits


def _outputs(subject: Subject, operator: Any, case: ResidualCase) -> Outputs:
    return case.run(operator)


def _widen(case: ResidualCase) -> ResidualCase:
    problem = replace(case.problem, dtype="float32")
    return replace(case, problem=problem, streams=case.streams.float(), output=case.output.float())


def _compare(
    subject: Subject, case: ResidualCase, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    """Against what is expected; where the expected value belongs to other streams, against the truth for these."""
    dtype = case.streams.dtype
    for name, tensor in expected.items():
        wanted = torch.float32 if name in ("pre", "post", "comb") else dtype
        if found[name].shape != tensor.shape or found[name].dtype != wanted:
            raise Violation(f"{name}: {difference(found[name], tensor.to(wanted))}")
    truth, reference = (residual_bounds.truth(case, each, found) for each in (dtype, torch.float32))
    for name in expected:
        follows = case.call == "advance" and name != "streams"
        right = truth[name].value if follows else expected[name].double()
        bound = truth[name].error + (0.0 if follows else reference[name].error)
        subject.measure((found[name].double() - right).abs(), slack * bound, name)


def advance_is_its_parts(subject: Subject, case: ResidualCase) -> None:
    """Advancing gives what mixing and then entering with the site's `pre` give."""
    case = replace(case, call="advance")
    found = subject.run(case)
    mix = replace(case, call="mix")
    subject.agree(mix, {"streams": found.pop("streams")}, subject.run(mix), "advance's streams", exact=False)
    streams = subject.run(case)["streams"]
    enter = replace(case, call="enter", streams=streams, pre=case.site.pre)
    subject.agree(enter, found, subject.run(enter), "entering from advance's streams", exact=False)


def pre_of_the_site_before(subject: Subject, case: ResidualCase) -> None:
    """What enters a sublayer does not depend on its own site's weights."""
    if case.call not in ("enter", "advance"):
        return
    other = replace(case, weights=replace(case.weights, base=-3.0 - case.weights.base, fn=-case.weights.fn))
    expected, found = ({"x": subject.run(each)["x"]} for each in (case, other))
    if not same_bits(found["x"], expected["x"]) and subject.properties.deterministic:
        raise Violation(f"x with other weights at its own site: {difference(found['x'], expected['x'])}")


def source_to_destination(subject: Subject, case: ResidualCase) -> None:
    """Destination j takes source j - 1 (the first one takes itself), and nothing of the output: copies, exactly."""
    num_streams = case.problem.num_streams
    sources = (torch.arange(num_streams) - 1).clamp(min=0)
    comb = torch.zeros_like(case.site.comb)
    comb[:, sources, torch.arange(num_streams)] = 1.0
    site = replace(case.site, comb=comb, post=torch.zeros_like(case.site.post))
    call = case.call if case.call == "advance" else "mix"
    found, expected = subject.run(replace(case, call=call, site=site))["streams"], case.streams[:, sources]
    if not torch.equal(found, expected):  # but for the sign of zero
        raise Violation(f"copied streams: {difference(found, expected)}")


def ends_on_columns(subject: Subject, case: ResidualCase) -> None:
    """The last step divides columns: they add up to s / (s + eps), one but for eps, where s is their sum before."""
    case = replace(case, call="enter")
    site = residual_bounds.site(case.streams, case.weights, case.problem, case.streams.dtype)
    sums = site.comb.value.sum(-2)
    # The logarithm of s is off by at most that of an entry; d log(s / (s + eps)) = (1 - s / (s + eps)) d log s.
    bound = (1 - sums) * site.spread[:, 0].expm1().clamp(max=1.0) + (case.problem.num_streams + 8) * FLOAT32
    subject.measure((subject.run(case)["comb"].double().sum(-2) - sums).abs(), bound, "sums of columns")


_WHY = (
    "running error analysis around float64: sums in any order, 4·2⁻²⁴ for a division, an inverse root or an "
    "exponential; a bfloat16 operator may hold `fn` in two bfloat16 parts (2⁻¹⁶ of each weight, twice the terms); x "
    "and coefficients behind an advance follow from the streams returned; Sinkhorn divides the matrix by rows and "
    "columns, which never widens the interval of its row and column errors, so each of the 2n - 1 steps adds only its "
    "own roundings and the entries' error"
)

FAMILY = Conformance(
    family="residual",
    recipes=strategies.residual_recipes,
    edges=EDGES,
    outputs=_outputs,
    widen=_widen,
    compare=_compare,
    relations=(
        *EVERYWHERE,
        OWN_MEMORY,
        Relation("advance-is-its-parts", "a fused path that is another operator", advance_is_its_parts),
        Relation("pre-of-the-site-before", "a site's own `pre` used at once", pre_of_the_site_before),
        Relation("source-to-destination", "`comb` transposed, or streams that are overwritten", source_to_destination),
        Relation("ends-on-columns", "a column step first, or a row step last", ends_on_columns),
    ),
    cases=CASES,
    tolerances=(
        Tolerance("float32", "every output, by element", "the analysis with 2⁻²⁴, twice: operator and reference", _WHY),
        Tolerance(
            "bfloat16", "every output, by element", "the analysis with 2⁻⁸, and with 2⁻²⁴ for the reference", _WHY
        ),
    ),
)
