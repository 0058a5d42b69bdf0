"""Calls of an epilogue operator: norm, rotation and rounding of any rows, and Engram's gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.operators import EpilogueProblem, Phase, Quantization
from minideepinfer.testing.recipes.batch import facts

NUMBERS = ("normal", "grid", "uneven")
"""x: any numbers; few different ones, half of which lie between two codes; groups of very different size."""


@dataclass(frozen=True)
class EpilogueCase:
    """One call of `run`."""

    problem: EpilogueProblem
    x: Tensor
    norm_weight: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    quantization: Quantization
    in_place: bool

    @property
    def units(self) -> int:
        """Tokens."""
        return len(self.x)

    def run(self, operator: Any) -> dict[str, Tensor]:
        """Call an operator; what it may overwrite is a copy."""
        x = torch.empty_like(self.x).copy_(self.x) if self.in_place else self.x
        return {"y": operator.run(x, self.norm_weight, self.cos, self.sin, self.quantization, self.in_place)}

    def take(self, order: Sequence[int]) -> tuple[EpilogueCase, Tensor]:
        """Some tokens in another order, and which old row each new row is."""
        rows = torch.tensor(list(order), dtype=torch.int64)
        cos, sin = (None if each is None else each[rows] for each in (self.cos, self.sin))
        return replace(self, x=self.x[rows], cos=cos, sin=sin), rows


@dataclass(frozen=True)
class EpilogueRecipe:
    """Makes a call of `run`.

    Attributes:
        tokens: T.
        heads: N; 0 = x has no such axis.
        width: D.
        norm: whether there is a norm.
        pairs: C; 0 = nothing is rotated.
        quantization: the rounding.
        in_place: whether x is the operator's.
        numbers: one of `NUMBERS`.
        amplitude: size of x; around 1e-10, `rms_norm_eps` matters.
        decode: whether the rows are decode rows.
        seed: of all numbers.
    """

    tokens: int = 1
    dtype: str = "float32"
    heads: int = 0
    width: int = 32
    norm: bool = False
    pairs: int = 0
    quantization: Quantization = "none"
    in_place: bool = False
    numbers: str = "normal"
    amplitude: float = 1.0
    decode: bool = False
    seed: int = 0

    @property
    def problem(self) -> EpilogueProblem:
        """What the operator is told."""
        return _problem(self.dtype, self.decode, self.width, 2 * self.pairs)

    def build(self) -> EpilogueCase:
        """The call."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype: torch.dtype = getattr(torch, self.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        shape = (self.tokens, *([self.heads] if self.heads else []), self.width)
        x = normal(*shape)
        if self.numbers == "grid":
            x = (x * 12).round().clamp(-24, 24) / 4
        elif self.numbers == "uneven":
            x = (
                x
                * normal(*shape[:-1], -(-self.width // 16)).mul(12).exp2().repeat_interleave(16, -1)[..., : self.width]
            )
        angles = normal(self.tokens, self.pairs) * 3
        return EpilogueCase(
            problem=self.problem,
            x=(x * self.amplitude).to(dtype),
            norm_weight=normal(self.width) if self.norm else None,
            cos=angles.cos() if self.pairs else None,
            sin=angles.sin() if self.pairs else None,
            quantization=self.quantization,
            in_place=self.in_place,
        )


@dataclass(frozen=True)
class InjectCase:
    """One call of `inject`."""

    problem: EpilogueProblem
    streams: Tensor
    values: Tensor
    weight: Tensor

    @property
    def units(self) -> int:
        """Tokens."""
        return len(self.streams)

    def run(self, operator: Any) -> dict[str, Tensor]:
        """Call an operator."""
        return {"streams": operator.inject(self.streams, self.values, self.weight)}

    def take(self, order: Sequence[int]) -> tuple[InjectCase, Tensor]:
        """Some tokens in another order, and which old row each new row is."""
        rows = torch.tensor(list(order), dtype=torch.int64)
        return replace(self, streams=self.streams[rows], values=self.values[rows]), rows


@dataclass(frozen=True)
class InjectRecipe:
    """Makes a call of `inject`.

    Attributes:
        tokens: T.
        streams: S.
        width: D.
        amplitude: size of the streams; around 1e-10, `rms_norm_eps` matters.
        alike: how much of a key is its stream: at 1 gates are open, at -1 shut, at 0 half open.
        decode: whether the rows are decode rows.
        seed: of all numbers.
    """

    tokens: int = 1
    dtype: str = "float32"
    streams: int = 1
    width: int = 32
    amplitude: float = 1.0
    alike: float = 0.0
    decode: bool = False
    seed: int = 0

    @property
    def problem(self) -> EpilogueProblem:
        """What the operator is told."""
        return _problem(self.dtype, self.decode, self.width, 0)

    def build(self) -> InjectCase:
        """The call."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype: torch.dtype = getattr(torch, self.dtype)
        x = torch.randn(self.tokens, self.streams, self.width, generator=generator)
        values = torch.randn(self.tokens, self.streams + 1, self.width, generator=generator)
        values[:, :-1] = values[:, :-1] * (1 - abs(self.alike)) + x * self.alike
        return InjectCase(
            problem=self.problem,
            streams=(x * self.amplitude).to(dtype),
            values=values.to(dtype),
            weight=torch.rand(self.streams, self.width, generator=generator) * 2,
        )


def _problem(dtype: str, decode: bool, width: int, rope_dim: int) -> EpilogueProblem:
    shared = facts(getattr(torch, dtype), Phase.DECODE if decode else Phase.PREFILL)
    return EpilogueProblem(**shared, widths=(width,), rope_dim=rope_dim, rms_norm_eps=1e-20)
