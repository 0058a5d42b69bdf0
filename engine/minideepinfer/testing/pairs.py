"""A pair of operators with a selection layout of their own, end to end in a model.

Their selection cannot be imposed, so it falls as it does; it is compared as far as every choice of the reference run is
clear, that is, further from a tie than float32 noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minideepinfer.errors import OperatorError
from minideepinfer.model.step import Forced
from minideepinfer.operators import Phase
from minideepinfer.operators.plan import PlanKey
from minideepinfer.testing.bounds import index_scores
from minideepinfer.testing.contract import Refused, Violation
from minideepinfer.testing.end_to_end import BOUNDS, Comparison, model_with
from minideepinfer.testing.margins import CLEAR_MARGIN
from minideepinfer.testing.models import MODELS, checkpoint
from minideepinfer.testing.subject import Subject, crashing
from minideepinfer.testing.watching import Watch


def pair_end_to_end(subject: Subject) -> None:
    """The comparison in float32, or else in the first dtype, in the first model of which the pair serves all layers."""
    dtype = "float32" if "float32" in subject.dtypes else subject.dtypes[0]
    reasons = ""
    for name in MODELS:
        try:
            model_with(subject, checkpoint(name), dtype, EVERYWHERE)
        except OperatorError as error:
            reasons = str(error)
            continue
        PairComparison(subject, checkpoint(name), dtype, EVERYWHERE).check()
        return
    raise Refused(reasons)


EVERYWHERE: Sequence[PlanKey] = [("indexer", None, Phase.PREFILL), ("attention", None, Phase.PREFILL)]
"""The pair in all layers and phases."""


@dataclass
class PairComparison(Comparison):
    """Like `Comparison`, with only the routing imposed."""

    _unclear: list[bool] = field(default_factory=list)

    def check(self) -> None:
        """Raises `Violation` if the logits are off, or if no step is clear."""
        reference = model_with(self.subject, self.path, self.dtype, [])
        choices, expected = self.play(
            reference, Watch(reference, self._note), begin=lambda: self._unclear.append(False)
        )
        routing = [Forced(routing=choice.routing) for choice in choices]
        with crashing(self.subject.registered):
            found = self.play(model_with(self.subject, self.path, self.dtype, self.places), forced=routing)[1]
        clear = [*self._unclear, True].index(True)
        if not clear:
            raise Violation("no step of the reference run is clear, so that nothing can be compared")
        bound = self.bound_of_logits(choices, expected)
        for step in range(clear):
            self.subject.measure((found[step] - expected[step]).norm(dim=1), bound[step], f"logits of step {step}, row")

    def moves(self, family: str, layer: int, phase: Phase) -> bool:
        """Whether results are not those of the reference operator."""
        return family == "attention"

    def _note(self, family: str, layer: int, phase: Phase, case: Any, result: Any) -> Any:
        """Bounds of the attention calls; whether a selection is close to falling otherwise."""
        if family == "indexer":
            self._unclear[-1] |= any(_close(case, row) for row in range(len(case.q)))
        elif family == "attention":
            self.bounds.append(BOUNDS["attention"](case))
        return result


def _close(case: Any, row: int) -> bool:
    """Whether the cut of entries or of candidate blocks lies within noise of a tie."""
    problem = case.problem
    scores, _ = index_scores(case, row)
    size = problem.candidate_block_size
    cuts = [(scores, problem.topk)]
    if case.candidates is not None:
        named = torch.isin(torch.arange(len(scores)) // size, case.candidates[row])
        cuts = [(scores[named], problem.topk)]
    if problem.emits_candidates and len(scores):
        padded = torch.nn.functional.pad(scores, (0, -len(scores) % size), value=-torch.inf)
        cuts.append((padded.view(-1, size).amax(1)[:-1], problem.candidate_topk_blocks - 1))
    return any(_gap(values, count) < CLEAR_MARGIN for values, count in cuts)


def _gap(values: torch.Tensor, count: int) -> float:
    if not 0 < count < len(values):
        return torch.inf
    ranked = values.sort(descending=True).values
    return float(ranked[count - 1] - ranked[count])
