"""`fused`: the residual streams in one pass of Triton for each site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import (
    BuildContext,
    Coefficients,
    Entered,
    HyperConnectionWeights,
    ResidualProblem,
    interpreting,
)
from torch import Tensor

from minideepinfer_residual.kernels import finish, streams_pass


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """One site's weights; `fn` is `[S, H (padded to whole tiles), N, parts]`, the parts adding up to a weight."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Sums:
    """What the programs of `streams_pass` found: `partial` `[splits, T, N]`, `squares` `[splits, 2, T]`, float32."""

    partial: Tensor | None
    squares: Tensor


@dataclass(frozen=True)
class Tile:
    """How `streams_pass` is launched.

    Attributes:
        rows: of a tile of the streams.
        channels: of a tile.
        warps: of a program.
        stages: tiles on their way to a program.
        splits: programs among which the channels of a row are shared, at most; a power of two.
    """

    rows: int
    channels: int
    warps: int
    stages: int
    splits: int

    def cut(self, hidden_size: int) -> tuple[int, int]:
        """Channels of a program, and programs of a row: by the width only, so that no sum depends on the batch."""
        width = triton.cdiv(triton.cdiv(hidden_size, self.splits), self.channels) * self.channels
        return width, triton.cdiv(hidden_size, width)


PROJECT = {torch.bfloat16: Tile(64, 32, 4, 3, 8), torch.float32: Tile(16, 32, 4, 1, 8)}
"""With a product behind it."""
PLAIN = {torch.bfloat16: Tile(4, 256, 4, 1, 8), torch.float32: Tile(4, 128, 4, 1, 8)}
"""Without."""
SITE_ROWS, NORM_ROWS, NORM_CHANNELS = 32, 4, 1024
"""Rows whose coefficients a program of `finish` makes; rows and channels that one normalises at a time."""

if interpreting():  # its time goes by programs and operations, not by elements
    PROJECT = dict.fromkeys(PROJECT, Tile(32, 128, 4, 1, 8))
    PLAIN = dict.fromkeys(PLAIN, Tile(32, 256, 4, 1, 8))
    NORM_ROWS = 32


def num_columns(num_streams: int) -> int:
    """N: columns of `fn`, as many as the tensor cores want."""
    return max(16, triton.next_power_of_2(2 * num_streams + num_streams * num_streams))


def split_weights(
    weights: HyperConnectionWeights, problem: ResidualProblem, dtype: torch.dtype, channels: int
) -> SplitWeights:
    """Write `fn` as a sum of two bfloat16 numbers (or leave it in float32), in the order in which tiles read it."""
    streams, hidden = problem.num_streams, problem.hidden_size
    padded = triton.cdiv(hidden, channels) * channels
    parts = 2 if dtype is torch.bfloat16 else 1
    fn = weights.fn.new_zeros(streams, padded, num_columns(streams), parts, dtype=dtype)
    rest = weights.fn.unflatten(1, (streams, hidden)).permute(1, 2, 0)
    for part in range(parts):
        rounded = rest.to(dtype)
        fn[:, :hidden, : rest.shape[-1], part] = rounded
        rest = rest - rounded.float()
    return SplitWeights(fn, weights.base, weights.scale)


class FusedResidual:
    """See `ResidualOperator`."""

    def __init__(self, problem: ResidualProblem, project: Tile | None = None, plain: Tile | None = None) -> None:
        self.form = "triton, interpreted" if interpreting() else "triton"
        self._problem = problem
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._project = project or PROJECT[self._dtype]
        self._plain = plain or PLAIN[self._dtype]

    def transform_weights(self, weights: HyperConnectionWeights) -> SplitWeights:
        """See `split_weights`."""
        return split_weights(weights, self._problem, self._dtype, self._project.channels)

    def enter(self, streams: Tensor, pre: Tensor, weights: SplitWeights, norm_weight: Tensor) -> Entered:
        """See `ResidualOperator.enter`."""
        x = torch.empty_like(streams[:, 0], memory_format=torch.contiguous_format)
        sums = self._pass(streams, pre=pre, weights=weights, collapsed=x)
        return Entered(streams, x, self._finish(x, sums, norm_weight, weights))

    def advance(
        self, streams: Tensor, output: Tensor, site: Coefficients, weights: SplitWeights, norm_weight: Tensor
    ) -> Entered:
        """See `ResidualOperator.advance`."""
        mixed, x = torch.empty_like(streams), torch.empty_like(output)
        sums = self._pass(streams, output, site, mixed, pre=site.pre, weights=weights, collapsed=x)
        return Entered(mixed, x, self._finish(x, sums, norm_weight, weights))

    def mix(self, streams: Tensor, output: Tensor, site: Coefficients) -> Tensor:
        """See `ResidualOperator.mix`."""
        mixed = torch.empty_like(streams)
        self._pass(streams, output, site, mixed)
        return mixed

    def collapse(self, streams: Tensor, pre: Tensor, norm_weight: Tensor | None) -> Tensor:
        """See `ResidualOperator.collapse`."""
        x = torch.empty_like(streams[:, 0], memory_format=torch.contiguous_format)
        sums = self._pass(streams, pre=pre, collapsed=x)
        if norm_weight is not None:
            self._finish(x, sums, norm_weight)
        return x

    def _pass(
        self,
        streams: Tensor,
        output: Tensor | None = None,
        site: Coefficients | None = None,
        mixed: Tensor | None = None,
        pre: Tensor | None = None,
        weights: SplitWeights | None = None,
        collapsed: Tensor | None = None,
    ) -> Sums:
        """Read the streams once: mix if there is a site, collapse if there is `pre`, project if there are weights."""
        tokens, num_streams, hidden = streams.shape
        columns, tile = num_columns(num_streams), self._plain if weights is None else self._project
        split_width, splits = tile.cut(hidden)
        squares = streams.new_empty(splits, 2, tokens, dtype=torch.float32)
        partial = None
        if weights is not None:
            partial = streams.new_empty(splits, tokens, columns, dtype=torch.float32)
        if tokens:
            streams_pass[triton.cdiv(tokens, tile.rows), splits](
                streams,
                output,
                pre,
                None if site is None else site.post,
                None if site is None else site.comb,
                None if weights is None else weights.fn,
                mixed,
                collapsed,
                partial,
                squares,
                tokens,
                hidden,
                split_width,
                0 if weights is None else weights.fn.shape[1],
                S=num_streams,
                N=columns,
                PARTS=2 if self._dtype is torch.bfloat16 else 1,
                MIX=site is not None,
                COLLAPSE=pre is not None,
                PROJECT=weights is not None,
                BT=tile.rows,
                BH=tile.channels,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        return Sums(partial, squares)

    def _finish(self, x: Tensor, sums: Sums, norm_weight: Tensor, weights: SplitWeights | None = None) -> Coefficients:
        """Normalise x in place; make the coefficients if there are weights."""
        tokens, num_streams = len(x), self._problem.num_streams
        pre, post = (norm_weight.new_empty(tokens, num_streams) for _ in range(2))
        site = Coefficients(pre, post, norm_weight.new_empty(tokens, num_streams, num_streams))
        site_programs = 0 if weights is None else triton.cdiv(tokens, SITE_ROWS)
        if tokens:
            finish[(site_programs + triton.cdiv(tokens, NORM_ROWS),)](
                sums.partial,
                sums.squares,
                None if weights is None else weights.base,
                None if weights is None else weights.scale,
                norm_weight,
                site.pre,
                site.post,
                site.comb,
                x,
                tokens,
                x.shape[1],
                len(sums.squares),
                site_programs,
                self._problem.rms_norm_eps,
                self._problem.hc_eps,
                self._problem.sinkhorn_iterations,
                S=num_streams,
                SP=triton.next_power_of_2(num_streams),
                N=num_columns(num_streams),
                PROJECT=weights is not None,
                SPLITS=triton.next_power_of_2(len(sums.squares)),
                BS=SITE_ROWS,
                BN=NORM_ROWS,
                BH=NORM_CHANNELS,
                num_warps=4,
            )
        return site


def build(context: BuildContext) -> FusedResidual:
    """Build `fused`."""
    return FusedResidual(context.problem)
