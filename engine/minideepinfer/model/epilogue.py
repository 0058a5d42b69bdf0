"""What follows the model's dense products, by the epilogue operators: norm, rotation, rounding (spec 3.4, 3.11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from minideepinfer.model.rope import Angles
from minideepinfer.operators import EpilogueOperator, Phase, Quantization
from minideepinfer.operators.results import checked


@dataclass(frozen=True, eq=False)
class Epilogue:
    """The epilogue operators by phase, and what the engine was asked to round.

    Attributes:
        operators: what they return has the shape and dtype of the contract.
        round_kv: whether cached values and index queries are rounded.
        round_activations: whether inputs of products with FP8 or FP4 weights are.
    """

    operators: Mapping[Phase, EpilogueOperator]
    round_kv: bool
    round_activations: bool

    def kv(self, quantization: Quantization) -> Quantization:
        """A format of cached values, where these are rounded."""
        return quantization if self.round_kv else "none"

    @property
    def activations(self) -> Quantization:
        """The format of inputs of products with FP8 or FP4 weights."""
        return "fp8" if self.round_activations else "none"

    def activation(self, x: Tensor, phase: Phase, *, in_place: bool = True) -> Tensor:
        """The input of a product with FP8 or FP4 weights; x itself where those are not rounded."""
        if not self.round_activations:
            return x
        return self.run(x, phase, quantization=self.activations, in_place=in_place)

    def run(
        self,
        x: Tensor,
        phase: Phase,
        *,
        norm: Tensor | None = None,
        angles: Angles | None = None,
        quantization: Quantization = "none",
        in_place: bool = True,
    ) -> Tensor:
        """See `EpilogueOperator.run`. Unless `in_place` is False, x is lost."""
        cos, sin = angles or (None, None)
        return _checked(self.operators[phase].run(x, norm, cos, sin, quantization, in_place), x, phase)

    def inject(self, streams: Tensor, values: Tensor, weight: Tensor, phase: Phase) -> Tensor:
        """See `EpilogueOperator.inject`."""
        return _checked(self.operators[phase].inject(streams, values, weight), streams, phase)


def _checked(y: Tensor, like: Tensor, phase: Phase) -> Tensor:
    return checked(y, like.shape, like.dtype, like.device, f"the epilogue operator ({phase})")
