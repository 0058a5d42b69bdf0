"""Single-pass mHC: the residual streams between the sublayers, and the operators that mix them (spec 3.2, 3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minideepinfer.errors import OperatorError
from minideepinfer.operators import Entered, Phase, ResidualOperator
from minideepinfer.operators.results import checked


@dataclass(frozen=True, eq=False)
class Site:
    """Where a sublayer takes its input from the streams.

    Attributes:
        weights: what each phase's operator made of the site's weights.
        norm: float32 `[H]`, of the sublayer's norm.
    """

    weights: Mapping[Phase, Any]
    norm: Tensor


@dataclass(frozen=True, eq=False)
class HyperConnections:
    """The residual operators by phase; what they return has the shapes and dtypes of the contract."""

    operators: Mapping[Phase, ResidualOperator]

    def enter(self, streams: Tensor, pre: Tensor, site: Site, phase: Phase) -> Entered:
        """See `ResidualOperator.enter`."""
        entered = self.operators[phase].enter(streams, pre, site.weights[phase], site.norm)
        return _checked(entered, streams, phase)

    def advance(self, before: Entered, output: Tensor, site: Site, phase: Phase) -> Entered:
        """Behind a sublayer: mix its output in and enter the next site; see `ResidualOperator.advance`."""
        operator, weights = self.operators[phase], site.weights[phase]
        entered = operator.advance(before.streams, output, before.site, weights, site.norm)
        return _checked(entered, before.streams, phase)

    def mix(self, before: Entered, output: Tensor, phase: Phase) -> Tensor:
        """Behind a sublayer whose next site does not follow at once: the streams; see `ResidualOperator.mix`."""
        streams = before.streams
        mixed = self.operators[phase].mix(streams, output, before.site)
        return checked(mixed, streams.shape, streams.dtype, streams.device, _who(phase))

    def collapse(self, streams: Tensor, pre: Tensor, phase: Phase) -> Tensor:
        """What leaves the last block, `[T, H]`; see `ResidualOperator.collapse`."""
        collapsed = self.operators[phase].collapse(streams, pre, None)
        return checked(collapsed, streams[:, 0].shape, streams.dtype, streams.device, _who(phase))


def _checked(entered: Entered, like: Tensor, phase: Phase) -> Entered:
    (tokens, streams, hidden), who = like.shape, _who(phase)
    if not isinstance(entered, Entered):
        raise OperatorError(f"{who} returned {type(entered).__name__}; an Entered is needed")
    checked(entered.streams, like.shape, like.dtype, like.device, who)
    checked(entered.x, (tokens, hidden), like.dtype, like.device, who)
    site = entered.site
    checked(getattr(site, "pre", None), (tokens, streams), torch.float32, like.device, who)
    checked(getattr(site, "post", None), (tokens, streams), torch.float32, like.device, who)
    checked(getattr(site, "comb", None), (tokens, streams, streams), torch.float32, like.device, who)
    return entered


def _who(phase: Phase) -> str:
    return f"the residual operator ({phase})"
