"""From one row of logits to a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minideepinfer.errors import MiniDeepInferError
from minideepinfer.runtime.params import SamplingParams


class Sampler:
    """Draws the tokens of one request; its random numbers depend on the seed alone, not on the batch."""

    def __init__(self, params: SamplingParams, num_drawn: int = 0) -> None:
        """Start behind the draws that were made.

        Args:
            params: of the request.
            num_drawn: tokens that it has.
        """
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
            for _ in range(num_drawn):
                self._number()

    def sample(self, logits: Tensor, forbidden: tuple[int, ...] = ()) -> int:
        """Choose a token.

        Args:
            logits: float32 `[vocab]`, not modified.
            forbidden: ids that may not be chosen, never all of them.

        Returns:
            Its id; greedy takes the lower id among equal logits.

        Raises:
            MiniDeepInferError: a logit is NaN or infinite, or none is finite.
        """
        if forbidden:
            logits = logits.clone()
            logits[list(forbidden)] = -torch.inf
        best = float(logits.max())
        if not math.isfinite(best):
            raise MiniDeepInferError(f"the largest logit is {best}; the checkpoint or an operator is at fault")
        if self.params.temperature == 0:
            return int(torch.nonzero(logits == best)[0])
        return self._draw((logits.cpu().double() - best) / self.params.temperature)

    def _draw(self, logits: Tensor) -> int:
        ordered, ids = logits.sort(descending=True, stable=True)
        cumulative = ordered[: self.params.top_k or None].softmax(0).cumsum(0)
        # A token stays if those before it have not reached top_p; that also drops those of probability 0.
        kept = 1 + int((cumulative[:-1] < self.params.top_p * cumulative[-1]).sum())
        point = self._number() * cumulative[kept - 1]
        return int(ids[min(int(torch.searchsorted(cumulative[:kept], point, right=True)), kept - 1)])

    def _number(self) -> Tensor:
        return torch.rand((), generator=self._generator, dtype=torch.float64)


def log_probabilities(logits: Tensor, token_id: int, count: int) -> dict[int, float]:
    """Log-probabilities under the raw, untempered distribution.

    Args:
        logits: float32 `[vocab]`.
        token_id: always reported, first.
        count: most likely tokens to report besides, best first.
    """
    values = logits.float().log_softmax(0)
    best = values.topk(min(count, len(values)))
    reported = {token_id: float(values[token_id])}
    for value, other in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        reported.setdefault(other, value)
    return reported
