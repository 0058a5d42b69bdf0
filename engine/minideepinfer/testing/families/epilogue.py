"""Conformance of family `epilogue`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.testing import epilogue_bounds, strategies
from minideepinfer.testing.bounds import TINY
from minideepinfer.testing.contract import Conformance, Outputs, Relation, Tolerance, Violation
from minideepinfer.testing.epilogue_bounds import Interval
from minideepinfer.testing.families.epilogue_cases import CASES, EDGES
from minideepinfer.testing.recipes.epilogue import EpilogueCase, InjectCase
from minideepinfer.testing.relations import EVERYWHERE, OWN_MEMORY
from minideepinfer.testing.subject import Subject, difference

Case = EpilogueCase | InjectCase


def _outputs(subject: Subject, operator: Any, case: Case) -> Outputs:
    return case.run(operator)


def _widen(case: Case) -> Case:
    problem = replace(case.problem, dtype="float32")
    if isinstance(case, InjectCase):
        return replace(case, problem=problem, streams=case.streams.float(), values=case.values.float())
    return replace(case, problem=problem, x=case.x.float())


def _compare(
    subject: Subject, case: Case, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], slack: float
) -> None:
    """Both against the truth, each in its own dtype."""
    (name, y), given = next(iter(found.items())), case.streams if isinstance(case, InjectCase) else case.x
    if y.shape != given.shape or y.dtype != given.dtype:
        raise Violation(f"{name}: {difference(y, expected[name].to(given.dtype))}")
    for what, result in ((name, y), ("what it is compared with", expected[name])):
        if isinstance(case, InjectCase):
            _measure(subject, result, epilogue_bounds.injected(case, result.dtype), slack, what)
        else:
            _judge(subject, case, result, slack, what)


def _judge(subject: Subject, case: EpilogueCase, y: Tensor, slack: float, what: str) -> None:
    """A row that is not finite must stay so where it is."""
    finite = case.x.isfinite().all(-1)
    whole = replace(case, x=torch.where(finite[..., None], case.x, 0.0))
    right = epilogue_bounds.finished(whole, y.dtype)
    _measure(subject, y[finite], Interval(right.low[finite], right.high[finite]), slack, what)
    broken = ~epilogue_bounds.before_rounding(case, y.dtype).low.isfinite() & ~finite[..., None]
    if bool((y.isfinite() & broken).any()):
        place = (y.isfinite() & broken).nonzero()[0].tolist()
        raise Violation(f"{what} at {place}: a number, where NaN or an infinity is to be rounded")


def _measure(subject: Subject, found: Tensor, right: Interval, slack: float, what: str) -> None:
    subject.measure((found.double() - right.middle).abs(), slack * right.half * (1 + 2.0**-50) + TINY, what)


def quarter_turn(subject: Subject, case: Case) -> None:
    """Rotated by a quarter turn, pair (a, b) is (-b, a), and the channels before are copies: exactly."""
    if isinstance(case, InjectCase) or case.cos is None or case.sin is None:
        return
    zero, expected = torch.zeros_like(case.cos), case.x.clone()
    case = replace(case, norm_weight=None, quantization="none", cos=zero, sin=zero + 1.0)
    start = case.x.shape[-1] - 2 * zero.shape[-1]
    expected[..., start::2], expected[..., start + 1 :: 2] = -case.x[..., start + 1 :: 2], case.x[..., start::2]
    found = subject.run(case)["y"]
    if not torch.equal(found, expected):  # but for the sign of zero
        raise Violation(f"a quarter turn: {difference(found, expected)}")


def heads_alone(subject: Subject, case: Case) -> None:
    """Each head called alone, without the axis of heads, gives what it gave among the others."""
    if isinstance(case, InjectCase) or case.x.dim() != 3:
        return
    together, exact = subject.run(case)["y"], subject.properties.batch_invariant
    for head in range(case.x.shape[1]):
        alone = replace(case, x=case.x[:, head].contiguous())
        subject.agree(alone, subject.run(alone), {"y": together[:, head]}, f"head {head} alone", exact=exact)


def broken_rows(subject: Subject, case: Case) -> None:
    """NaN and infinities stay in their rows and channels, and change no other row."""
    if isinstance(case, InjectCase) or not case.x.numel():
        return
    x = case.x.clone()
    rows, channels = x.view(-1, x.shape[-1]), x.shape[-1]
    rows[len(rows) // 2, channels // 3] = torch.nan
    rows[0, -1] = -torch.inf
    broken = replace(case, x=x)
    found = subject.run(broken)
    subject.family.compare(subject, broken, found, found, 1.0)
    if subject.properties.batch_invariant:
        whole = x.isfinite().all(-1)
        expected = {"y": subject.run(case)["y"][whole]}
        subject.equal(case, {"y": found["y"][whole]}, expected, "beside a broken row")


_WHY = (
    "an interval around float64: what float32 may be off in a norm (a mean in any order, 4·2⁻²⁴ for an inverse root) "
    "and in a rotation (2·2⁻²⁴ of its products), its ends rounded to the compute dtype behind each step and then to "
    "the format, with every scale that the group's largest magnitude may have; rounding is monotone, so that a number "
    "may take a neighbouring code only where its interval reaches across the border, and without norm and rotation "
    "there is one right number; Engram's gate grows with a product, whose float32 error bounds it"
)

FAMILY = Conformance(
    family="epilogue",
    recipes=strategies.epilogue_recipes,
    edges=EDGES,
    outputs=_outputs,
    widen=_widen,
    compare=_compare,
    relations=(
        *EVERYWHERE,
        OWN_MEMORY,
        Relation("quarter-turn", "halves for neighbours, the first channels for the last, a sign", quarter_turn),
        Relation("heads-alone", "a mean over heads, or the angles of another token", heads_alone),
        Relation("broken-rows", "NaN lost in a code that knows none; a row that reaches its neighbours", broken_rows),
    ),
    cases=CASES,
    tolerances=(
        Tolerance("float32", "every result, by element", "the interval with float32 between the steps", _WHY),
        Tolerance("bfloat16", "every result, by element", "the interval with bfloat16 between the steps", _WHY),
    ),
)
