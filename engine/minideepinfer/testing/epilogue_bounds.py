"""Between which numbers a correct epilogue operator may be: intervals of float64 through spec 3.4, 3.9, 3.11.

Rounding is monotone, so the ends of an interval are rounded like the numbers inside. A number has a choice of codes
only where its interval reaches across the border between them, and of scales where the largest one of its group does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minideepinfer.operators import Quantization
from minideepinfer.quantization import E2M1_MAX, E4M3_MAX, decode_e2m1, encode_e2m1
from minideepinfer.testing.recipes.epilogue import EpilogueCase, InjectCase
from minideepinfer.testing.residual_bounds import FLUSHED, ULPS, normalised
from minideepinfer.testing.rounding import FLOAT32, Approximate


@dataclass(frozen=True, eq=False)
class Interval:
    """Lowest and highest number that is right, float64 of the same shape."""

    low: Tensor
    high: Tensor

    @property
    def middle(self) -> Tensor:
        """Halfway."""
        return (self.low + self.high) / 2

    @property
    def half(self) -> Tensor:
        """From there to an end."""
        return (self.high - self.low) / 2

    def round(self, rounding: Callable[[Tensor], Tensor]) -> Interval:
        """Behind a monotone rounding."""
        return Interval(rounding(self.low), rounding(self.high))

    def widened(self, error: Tensor) -> Interval:
        """With an error on either side."""
        return Interval(self.low - error, self.high + error)


@dataclass(frozen=True)
class Format:
    """A format of spec 3.11: a scale for each group, by a number that grows with the largest magnitude.

    Attributes:
        group: neighbouring channels that share a scale.
        scale_number: magnitudes -> int64 numbers of scales.
        scale: the scale of a number, float64.
        value: a number over its scale, rounded and clamped, float64.
    """

    group: int
    scale_number: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]


def _power_of_two(floor: float, most: float) -> Callable[[Tensor], Tensor]:
    def exponent(largest: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(largest.clamp(min=floor) / most)
        return (exponent - (mantissa == 0.5).int()).long()

    return exponent


def _e4m3_number(largest: Tensor) -> Tensor:
    ratio = largest.float().clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX
    return ratio.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).long()


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).double()


def _e2m1(x: Tensor) -> Tensor:
    return decode_e2m1(encode_e2m1(x), torch.float64)


FORMATS: dict[Quantization, Format] = {
    "fp8": Format(32, _power_of_two(1e-4, E4M3_MAX), torch.exp2, _e4m3),
    "mxfp4": Format(32, _power_of_two(E2M1_MAX * 2.0**-126, E2M1_MAX), torch.exp2, _e2m1),
    "nvfp4": Format(16, _e4m3_number, lambda n: n.to(torch.uint8).view(torch.float8_e4m3fn).double(), _e2m1),
}


def finished(case: EpilogueCase, dtype: torch.dtype) -> Interval:
    """All steps in a dtype, of finite rows."""
    return quantized(before_rounding(case, dtype), case.quantization)


def before_rounding(case: EpilogueCase, dtype: torch.dtype) -> Interval:
    """Steps 1 and 2 in a dtype. Rows with NaN or infinities have such numbers where an operator must have them."""

    def stored(number: Tensor) -> Tensor:
        return number.to(dtype).double()

    x = case.x.double()
    found = Interval(x, x)
    if case.norm_weight is not None:
        y = normalised(Approximate.exactly(x), case.norm_weight.double(), case.problem.rms_norm_eps)
        found = Interval(y.value, y.value).widened(y.error).round(stored)
    if case.cos is not None and case.sin is not None:
        found = _rotated(found, case.cos.double(), case.sin.double()).round(stored)
    return found


def _rotated(x: Interval, cos: Tensor, sin: Tensor) -> Interval:
    """Two products and a sum in float32, of which an operator may round none but the last."""
    if x.low.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    start = x.low.shape[-1] - 2 * cos.shape[-1]
    (a, b), (a_error, b_error) = ((each[..., start::2], each[..., start + 1 :: 2]) for each in (x.middle, x.half))
    values, errors = [], []
    for value, to_a, to_b in ((a * cos - b * sin, cos, sin), (a * sin + b * cos, sin, cos)):
        carried = a_error * to_a.abs() + b_error * to_b.abs()
        size = a.abs() * to_a.abs() + b.abs() * to_b.abs() + carried
        values.append(value)
        errors.append(carried + 2 * FLOAT32 * size * (1 + FLOAT32))
    value, error = (torch.stack(each, -1).flatten(-2) for each in (values, errors))
    first = Interval(x.low[..., :start], x.high[..., :start])
    return Interval(
        torch.cat([first.low, value - error], -1),
        torch.cat([first.high, value + error], -1),
    )


def quantized(x: Interval, quantization: Quantization) -> Interval:
    """Step 3, with every scale that a group may have."""
    if quantization == "none":
        return x
    form = FORMATS[quantization]
    low, high = (each.unflatten(-1, (-1, form.group)) for each in (x.low, x.high))
    most = low.abs().maximum(high.abs())
    least = torch.where(low.sign() == high.sign(), low.abs().minimum(high.abs()), 0.0)
    first, last = (form.scale_number(each.amax(-1, keepdim=True)) for each in (least, most))
    lowest, highest = torch.full_like(low, torch.inf), torch.full_like(high, -torch.inf)
    for step in range(int((last - first).max()) + 1 if last.numel() else 0):
        scale = form.scale((first + step).minimum(last))
        lowest = lowest.minimum(form.value(low / scale) * scale)
        highest = highest.maximum(form.value(high / scale) * scale)
    return Interval(lowest.flatten(-2), highest.flatten(-2))


def injected(case: InjectCase, dtype: torch.dtype) -> Interval:
    """Streams behind Engram, in a dtype: the gate grows with the product that it is made of."""
    x, keys, value = case.streams.double(), case.values[:, :-1].double(), case.values[:, -1:].double()
    width, eps = x.shape[-1], case.problem.rms_norm_eps
    scale = ((x.square().mean(-1) + eps) * (keys.square().mean(-1) + eps) * width).rsqrt()
    terms = x * case.weight.double() * keys
    relative = (width + 3) * FLOAT32 + 2 * (ULPS + FLOAT32)  # of both roots and the factors
    error = ((width + 2) * FLOAT32 * terms.abs().sum(-1) * (1 + relative) + terms.sum(-1).abs() * relative) * scale
    error = error + FLUSHED * (terms != 0).any(-1)
    product = terms.sum(-1) * scale
    gates = []
    for end in (product - error, product + error):
        root = end.abs().clamp(min=1e-6).sqrt()
        gates.append(torch.where(end < 0, -root, root).sigmoid().unsqueeze(-1))
    off = (3 + 2 * (product.abs() + error).sqrt().unsqueeze(-1)) * ULPS * gates[1]
    low, high = (gates[0] - off) * value, (gates[1] + off) * value
    size = 2 * FLOAT32 * (x.abs() + high.abs().maximum(low.abs()))
    return Interval(x + low.minimum(high), x + low.maximum(high)).widened(size).round(lambda y: y.to(dtype).double())
