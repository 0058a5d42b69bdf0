"""Family `residual`: the parallel residual streams of single-pass mHC, their mixing, and what enters a sublayer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class HyperConnectionWeights:
    """One mHC site. S streams of width H.

    Attributes:
        fn: float32 `[2S + S * S, S * H]`.
        base: float32 `[2S + S * S]`.
        scale: float32 `[3]`, for pre, post and comb.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Mixing of one site, float32. `pre` is used at the *next* site, `post` and `comb` at this one.

    Attributes:
        pre: `[T, S]`.
        post: `[T, S]`.
        comb: `[T, S, S]`, first stream axis = source, second = destination.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor

    def rows(self, rows: Tensor) -> Coefficients:
        """Those of some rows, int64 `[N]`."""
        return Coefficients(self.pre[rows], self.post[rows], self.comb[rows])


class Entered(NamedTuple):
    """What is known when a sublayer begins.

    Attributes:
        streams: `[T, S, H]` that enter its site.
        x: `[T, H]`, its normalised input.
        site: the coefficients of its site.
    """

    streams: Tensor
    x: Tensor
    site: Coefficients

    def rows(self, rows: Tensor) -> Entered:
        """What is known of some rows, int64 `[N]`."""
        return Entered(self.streams[rows], self.x[rows], self.site.rows(rows))


class ResidualOperator(Protocol):
    """A built residual operator (spec 3.2, 3.3). Axes: T rows, S streams, H hidden.

    Rows are independent and may be none; all tensors are contiguous. Streams, x and sublayer outputs are in the compute
    dtype. Everything is computed in float32 and rounded once where a result in the compute dtype is named; in bfloat16
    an operator may hold `fn` as the sum of two bfloat16 numbers (an error of at most 2^-16 of each weight).
    """

    def transform_weights(self, weights: HyperConnectionWeights) -> Any:
        """Bring one site's weights into the form the calls want, once, at build time; may return them as they are.

        The result must serve both phases: where they have the same operator and options, they share it.
        """
        ...

    def enter(self, streams: Tensor, pre: Tensor, weights: Any, norm_weight: Tensor) -> Entered:
        """Enter a site: its coefficients, and the input of its sublayer.

        With f a row's streams side by side, `m = (fn f) / sqrt(mean(f^2) + rms_norm_eps)` and `l = base + m scale`:
        pre = sigmoid(l) + hc_eps, post = 2 sigmoid(l), and comb, `[source, destination]`, is
        softmax(l) over destinations + hc_eps, divided by its sums over sources (columns) + hc_eps; then
        `sinkhorn_iterations - 1` times divided by its sums over destinations (rows) + hc_eps and by its sums over
        sources + hc_eps.

        Args:
            streams: `[T, S, H]`; returned as they are.
            pre: float32 `[T, S]`, of the site *before*.
            weights: what `transform_weights` returned for this site.
            norm_weight: float32 `[H]`, of the sublayer's norm.

        Returns:
            The streams, x = `collapse(streams, pre, norm_weight)`, and the coefficients.
        """
        ...

    def advance(
        self, streams: Tensor, output: Tensor, site: Coefficients, weights: Any, norm_weight: Tensor
    ) -> Entered:
        """Leave a site and enter the next: `enter(mix(streams, output, site), site.pre, weights, norm_weight)`.

        Args:
            streams: `[T, S, H]` that entered the site.
            output: `[T, H]` of its sublayer.
            site: its coefficients.
            weights: of the next site.
            norm_weight: float32 `[H]`, of the next sublayer's norm.
        """
        ...

    def mix(self, streams: Tensor, output: Tensor, site: Coefficients) -> Tensor:
        """Leave a site: `X'[j] = post[j] y + sum_i comb[i, j] X[i]`, one rounding.

        Args:
            streams: `[T, S, H]` that entered the site.
            output: y, `[T, H]` of its sublayer.
            site: its coefficients.

        Returns:
            `[T, S, H]`.
        """
        ...

    def collapse(self, streams: Tensor, pre: Tensor, norm_weight: Tensor | None) -> Tensor:
        """Weigh the streams and normalise: `u = sum_i pre[i] X[i]`, rounded; `norm_weight u / sqrt(mean(u^2) + eps)`.

        Args:
            streams: `[T, S, H]`.
            pre: float32 `[T, S]`.
            norm_weight: float32 `[H]`; None = u itself.

        Returns:
            `[T, H]`; zeros for a row of zeros.
        """
        ...
