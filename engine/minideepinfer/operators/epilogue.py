"""Family `epilogue`: what follows a dense product row by row: norm, rotation and rounding, or Engram's gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Quantization = Literal["none", "fp8", "mxfp4", "nvfp4"]
"""Formats of spec 3.11, with groups of 32, 32 and 16 channels that share a scale. Numbers that were rounded to one come
back in the compute dtype, which holds them exactly."""


class EpilogueOperator(Protocol):
    """A built epilogue operator (spec 3.4, 3.9, 3.11). Axes: T tokens, N heads, D channels, C rotated pairs, S streams.

    Rows are independent and may be none; all tensors are contiguous.
    """

    def run(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        quantization: Quantization,
        in_place: bool,
    ) -> Tensor:
        """Three steps in this order, each in float32 and each rounded once to x's dtype; what is None is left out.

        1. `norm_weight x / sqrt(mean(x^2) + rms_norm_eps)`, the mean over D; zeros for a row of zeros.
        2. Of the last 2C channels each pair (a, b) of neighbours becomes (a cos - b sin, a sin + b cos).
        3. Each group of neighbouring channels is rounded to a format of spec 3.11.

        A channel that is NaN or infinite before step 3 is so behind it. Such a row changes no other row; its own other
        channels are unspecified.

        Args:
            x: `[T, D]` or `[T, N, D]`, bfloat16 or float32, with D a multiple of the group's length.
            norm_weight: float32 `[D]`.
            cos: float32 `[T, C]`, the same for every head of a token; D is even, and 2C at most D.
            sin: float32 `[T, C]`; None where cos is.
            quantization: the format of step 3.
            in_place: x's memory is the operator's: it may be overwritten, and be the result. Otherwise x stays as it
                is, and the result is memory of its own.

        Returns:
            Same shape and dtype as x, contiguous.
        """
        ...

    def inject(self, streams: Tensor, values: Tensor, weight: Tensor) -> Tensor:
        """Add Engram's value v to every stream x by its gate, in float32, rounded once: `x + g v`.

        With k the stream's key, `d = sum(x weight k) / sqrt((mean(x^2) + eps) (mean(k^2) + eps) D)`, eps being
        `rms_norm_eps`, and `g = sigmoid(r)`: r is `sqrt(max(|d|, 1e-6))`, and minus that where d < 0.

        Args:
            streams: `[T, S, D]`, bfloat16 or float32; not modified.
            values: `[T, S + 1, D]`, dtype of streams: a key for each stream, then the value.
            weight: float32 `[S, D]`.

        Returns:
            Same shape and dtype as streams, memory of its own.
        """
        ...
