"""Which grouped products serve a layer: decided here, once, when its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from minideepinfer.operators import MoeProblem, PackedExperts
from torch import Tensor

from minideepinfer_moe.experts import PlainProducts
from minideepinfer_moe.grouped import GroupedProducts, serves
from minideepinfer_moe.grouped_pack import LARGEST_EXPONENT, WIDEST_ROW
from minideepinfer_moe.schedule import Schedule


class Products(Protocol):
    """The grouped products of the routed experts."""

    form: str
    """What runs: "triton", "gluon", or "triton, interpreted"."""

    def pack(self, experts: PackedExperts) -> Any:
        """Bring a layer's experts into the order that the kernels read; they stay packed."""
        ...

    def tile_rows(self, max_rows: int, num_experts: int, dtype: torch.dtype) -> int:
        """The tile height for about `max_rows / num_experts` rows an expert."""
        ...

    def gate_up(
        self, x: Tensor, packed: Any, schedule: Schedule, row_weights: Tensor, limit: float, quantize: bool
    ) -> Tensor:
        """`r = silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight`, in float32 on products in x's dtype.

        Args:
            x: `[T, H]` compute dtype, contiguous; only rows that the schedule names are read.
            packed: what `pack` returned.
            schedule: the rows.
            row_weights: float32 `[R]`, by sorted row.
            limit: clamp of gate (above) and up (both sides).
            quantize: whether r goes through QDQ-FP8 after it was rounded, here or in `down`; x already has, then.

        Returns:
            `[R, I]` in x's dtype; rows that do not exist are not written.
        """
        ...

    def down(self, r: Tensor, packed: Any, schedule: Schedule) -> Tensor:
        """`y = w2 r`, summed in float32 and rounded to r's dtype.

        Args:
            r: `[R, I]`, from `gate_up`.
            packed: what `pack` returned.
            schedule: the rows.

        Returns:
            `[R, H]`; rows that do not exist are not written.
        """
        ...


@dataclass(frozen=True)
class Exponents:
    """What a layer's E8M0 exponents leave to choose from.

    Attributes:
        largest: of all; 255 is NaN.
        widest: the largest difference within a row of weights.
    """

    largest: int
    widest: int


def measure(experts: PackedExperts) -> Exponents:
    """Read all exponents once; asks the device."""
    extremes = [(scale.amax(-1), scale.amin(-1)) for scale in (experts.w13_scale, experts.w2_scale)]
    largest = torch.stack([top.max() for top, _ in extremes]).max()
    widest = torch.stack([(top - bottom).max() for top, bottom in extremes]).max()
    return Exponents(int(largest), int(widest))


def choose(problem: MoeProblem, exponents: Exponents) -> Products:
    """The fastest products that decode every exponent of a layer exactly.

    FP8 for activations that went through QDQ-FP8, if the rows' exponents lie close; bfloat16 if none is large; else,
    or where the grouped kernel does not run at all, the plain ones, which take any.
    """
    if serves(problem) and exponents.largest < 255:
        if problem.activation_quantization == "released" and exponents.widest <= WIDEST_ROW:
            return GroupedProducts(fp8=True)
        if exponents.largest <= LARGEST_EXPONENT:
            return GroupedProducts(fp8=False)
    return PlainProducts(wide=exponents.largest > 128)
