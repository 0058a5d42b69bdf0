"""Running error analysis: numbers that carry a bound on how far a float32 or bfloat16 computation may be off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.quantization import E4M3_MAX, decode_e8m0, encode_fp8, qdq_fp8

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding, for 24 and 8 significant bits."""
FLOAT32 = UNIT[torch.float32]
GROUP = 32
"""Columns that share a scale in QDQ-FP8."""


@dataclass(frozen=True, eq=False)
class Approximate:
    """A float64 value and a bound on its error, of the same shape; rows first, `[n, K]`."""

    value: Tensor
    error: Tensor

    @classmethod
    def exactly(cls, value: Tensor) -> Approximate:
        """A number without error."""
        return cls(value.double(), torch.zeros(value.shape, dtype=torch.float64))

    def rounded(self, unit: float) -> Approximate:
        """After one rounding."""
        return Approximate(self.value, self.error + unit * (self.value.abs() + self.error))

    def product(self, weight: Tensor, dtype: torch.dtype) -> Approximate:
        """`self @ weight.T`, accumulated in float32 (K + 1 roundings at most), rounded to the compute dtype."""
        magnitude = weight.abs().T
        spread = (self.value.abs() + self.error) @ magnitude
        error = self.error @ magnitude + (weight.shape[1] + 1) * FLOAT32 * spread
        return Approximate(self.value @ weight.T, error).rounded(UNIT[dtype])

    def quantized(self, dtype: torch.dtype) -> Approximate:
        """QDQ-FP8, monotone for a given scale: the ends of the interval under the smallest and the largest scale."""
        value = qdq_fp8(self.value.to(dtype)).double()
        error = torch.zeros_like(value)
        magnitude = self.value.abs()
        for amax in ((magnitude - self.error).clamp(min=0.0), magnitude + self.error):
            scale = decode_e8m0(encode_fp8(amax.to(dtype))[1]).double().repeat_interleave(GROUP, -1)
            for end in (self.value - self.error, self.value + self.error):
                scaled = (end.to(dtype).double() / scale).clamp(-E4M3_MAX, E4M3_MAX)
                code = scaled.float().to(torch.float8_e4m3fn).double()
                error = error.maximum((code * scale - value).abs())
        return Approximate(value, error)
