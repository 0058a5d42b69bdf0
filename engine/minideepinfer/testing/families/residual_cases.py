"""Residual streams: edge cases tried first, and cases R1 to R4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from minideepinfer.operators import HyperConnectionWeights
from minideepinfer.testing.contract import ExplicitCase, Violation
from minideepinfer.testing.families.whole_model import WHOLE_MODEL
from minideepinfer.testing.recipes.residual import ResidualCase, ResidualRecipe
from minideepinfer.testing.subject import Subject

_FOUR = ResidualRecipe(tokens=3, num_streams=4, hidden_size=7)

EDGES = (
    _FOUR,
    ResidualRecipe(tokens=0, num_streams=4, call="advance"),
    replace(_FOUR, tokens=0),
    ResidualRecipe(tokens=2),
    replace(_FOUR, call="advance"),
    replace(_FOUR, call="mix"),
    replace(_FOUR, call="collapse"),
    replace(_FOUR, call="normalise", amplitude=1e-10),
    ResidualRecipe(tokens=2, num_streams=1, hidden_size=5, call="mix"),
    ResidualRecipe(tokens=2, num_streams=1, hidden_size=5, call="collapse"),
    replace(_FOUR, num_streams=3, projection="zero", base=30.0),
    replace(_FOUR, projection="sparse", scale=20.0),
    replace(_FOUR, projection="zero", base=4.0, call="advance"),
    replace(_FOUR, amplitude=1e-10, scale=4.0, sinkhorn_iterations=20),
)


def _served(subject: Subject, recipe: ResidualRecipe) -> ResidualCase:
    """The call, at the nearest width and dtype that the operator serves."""

    def wider() -> Iterator[ResidualCase]:
        for dtype in subject.dtypes:
            for factor in (1, 8, 64, 128):
                yield replace(recipe, dtype=dtype, hidden_size=recipe.hidden_size * factor).build()

    return subject.nearest(wider())


def _hold(subject: Subject, case: ResidualCase) -> dict[str, torch.Tensor]:
    """The operator's results, compared with the reference."""
    found = subject.run(case)
    subject.family.compare(subject, case, found, subject.reference(case), 1.0)
    return found


def _logits(case: ResidualCase, comb: torch.Tensor, vector: torch.Tensor) -> ResidualCase:
    """A case whose logits are these: of every `pre` and `post`, and `[S, S]` of comb."""
    base = torch.cat([vector, vector, comb.flatten()])
    return replace(case, weights=replace(case.weights, base=base, fn=torch.zeros_like(case.weights.fn)))


def r1(subject: Subject) -> None:
    """Logits that are large, equal, all for one destination, or nearly triangular (which converges like 1 / n)."""
    case = _served(subject, replace(_FOUR, tokens=1, sinkhorn_iterations=20))
    one_column, triangle = torch.zeros(4, 4), torch.ones(4, 4).tril(-1) * -12.0
    one_column[:, 2] = 40.0
    spike = torch.tensor([1e4, -1e4, 88.0, -88.0])
    mixed = torch.outer(torch.tensor([1.0, -1.0, 0.5, 0.0]), spike)
    for comb in (torch.zeros(4, 4), one_column, triangle, triangle.T, mixed, mixed.T, torch.eye(4) * 20.0):
        for vector in (spike, torch.tensor([0.0, -16.0, 16.0, -1.0])):
            _hold(subject, _logits(case, comb, vector))


def r2(subject: Subject) -> None:
    """Streams of zeros give zeros and the bases' coefficients; tiny ones are normalised all the same."""
    case = _served(subject, _FOUR)
    zero = replace(case, streams=torch.zeros_like(case.streams), output=torch.zeros_like(case.output))
    for call in ("enter", "advance", "normalise", "collapse"):
        found = _hold(subject, replace(zero, call=call))
        if bool(found["x"].count_nonzero()):
            raise Violation(f"{call}: rows of zeros must give zeros")
    _hold(subject, replace(case, streams=case.streams * 1e-4))


def r3(subject: Subject) -> None:
    """Products that cancel but for what bfloat16 cannot hold of a weight."""
    case = _served(subject, replace(_FOUR, tokens=1, hidden_size=8))
    fn, streams = torch.zeros_like(case.weights.fn), torch.zeros_like(case.streams)
    fn[:, 0], fn[:, 1] = 1.0 + 2.0**-9, -1.0
    streams[:, 0, :2] = 1.0
    weights = HyperConnectionWeights(fn, torch.zeros_like(case.weights.base), torch.full((3,), 64.0))
    _hold(subject, replace(case, streams=streams, weights=weights))


def r4(subject: Subject) -> None:
    """One row and many, narrow and wide: partial tiles of rows and channels, several programs for a row."""
    sparse = replace(_FOUR, projection="sparse", sinkhorn_iterations=20)
    for tokens, hidden in ((1, 1030), (67, 9), (5, 257)):
        for call in ("advance", "normalise"):
            _hold(subject, _served(subject, replace(sparse, tokens=tokens, hidden_size=hidden, call=call)))


CASES = (
    ExplicitCase("R1", "an eps left out, another number of iterations, an exponential that overflows", r1),
    ExplicitCase("R2", "0 / 0 in a norm; an eps of 1e-6 by habit", r2),
    ExplicitCase("R3", "the low part of `fn` dropped, or a product in tf32", r3),
    ExplicitCase("R4", "rows or channels at the edge of a tile or of a program left out or counted twice", r4),
    *WHOLE_MODEL,
)
