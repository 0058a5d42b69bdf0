"""Options of `fused`, without torch."""

from __future__ import annotations

from typing import Literal

from minideepinfer.operators import OperatorOptions


class FusedOptions(OperatorOptions):
    """Options of `fused`.

    Attributes:
        gate: `fused`: one product and one selecting kernel; `torch`: as the reference does it, to show what that costs.
    """

    gate: Literal["fused", "torch"] = "fused"
