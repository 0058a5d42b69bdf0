"""`fused`: the residual streams in Triton, with a weight of a projection as the sum of two bfloat16 numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from minideepinfer.operators import (
    BuildContext,
    Coefficients,
    Entered,
    HyperConnectionWeights,
    Phase,
    ResidualProblem,
    interpreting,
)
from torch import Tensor

from minideepinfer_residual.kernels.rows import rows_pass
from minideepinfer_residual.kernels.site import make_site, project


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """One site's weights; `fn` is `[S * H, N * parts]`, the neighbouring parts adding up to a weight."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Tile:
    """How `project` is launched.

    Attributes:
        rows: of a tile.
        channels: of a tile, all streams side by side.
        warps: of a program.
        stages: tiles on their way to a program.
        splits: programs among which the channels of a row are shared, at most; a power of two.
    """

    rows: int
    channels: int
    warps: int
    stages: int
    splits: int

    def cut(self, width: int) -> tuple[int, int]:
        """Tiles of a program, and programs of a row: by the width only, so that no sum depends on the batch."""
        tiles = -(-width // self.channels)
        each = -(-tiles // self.splits)
        return each, -(-tiles // each)


TILES = {torch.bfloat16: Tile(64, 128, 4, 3, 4), torch.float32: Tile(32, 32, 4, 1, 4)}
DECODE_SPLITS = 16
"""Splits where there are few rows, which alone would leave most of the GPU idle."""
CHANNELS, ROW_WARPS = 1024, 4
"""Channels of a row that `rows_pass` has in registers at a time, and its warps."""
SITE_ROWS = 32
"""Rows whose coefficients a program makes."""
if interpreting():  # its time goes by programs and operations, not by elements
    TILES = dict.fromkeys(TILES, Tile(32, 1024, 4, 1, 4))


def num_columns(num_streams: int) -> int:
    """N: columns of `fn`, as many as the tensor cores want."""
    return max(16, int(triton.next_power_of_2(2 * num_streams + num_streams * num_streams)))


def split_weights(weights: HyperConnectionWeights, dtype: torch.dtype) -> SplitWeights:
    """Write `fn` as a sum of two bfloat16 numbers for bfloat16 streams; the interpreter multiplies float32 only."""
    rest, parts = weights.fn.T, []
    for _ in range(2 if dtype is torch.bfloat16 else 1):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    num_streams = round((1 + len(weights.fn)) ** 0.5) - 1
    fn = torch.stack(parts, dim=-1)
    fn = torch.nn.functional.pad(fn, (0, 0, 0, num_columns(num_streams) - len(weights.fn))).flatten(1)
    return SplitWeights(fn.float() if interpreting() else fn, weights.base, weights.scale)


class FusedResidual:
    """See `ResidualOperator`."""

    def __init__(self, problem: ResidualProblem, tile: Tile | None = None) -> None:
        self.form = "triton, interpreted" if interpreting() else "triton"
        self._problem = problem
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._tile = tile or TILES[self._dtype]
        if problem.phase is Phase.DECODE:
            self._tile = replace(self._tile, splits=DECODE_SPLITS)

    def transform_weights(self, weights: HyperConnectionWeights) -> SplitWeights:
        """See `split_weights`."""
        return split_weights(weights, self._dtype)

    def enter(self, streams: Tensor, pre: Tensor, weights: SplitWeights, norm_weight: Tensor) -> Entered:
        """See `ResidualOperator.enter`."""
        x, squares = streams.new_empty(len(streams), streams.shape[2]), pre.new_empty(len(streams))
        self._rows(streams, pre=pre, x=x, norm_weight=norm_weight, squares=squares)
        return Entered(streams, x, self._coefficients(streams, squares, weights))

    def advance(
        self, streams: Tensor, output: Tensor, site: Coefficients, weights: SplitWeights, norm_weight: Tensor
    ) -> Entered:
        """See `ResidualOperator.advance`."""
        mixed, x, squares = torch.empty_like(streams), torch.empty_like(output), site.pre.new_empty(len(streams))
        self._rows(streams, output, site, mixed, site.pre, x, norm_weight, squares)
        return Entered(mixed, x, self._coefficients(mixed, squares, weights))

    def mix(self, streams: Tensor, output: Tensor, site: Coefficients) -> Tensor:
        """See `ResidualOperator.mix`."""
        mixed = torch.empty_like(streams)
        self._rows(streams, output, site, mixed)
        return mixed

    def collapse(self, streams: Tensor, pre: Tensor, norm_weight: Tensor | None) -> Tensor:
        """See `ResidualOperator.collapse`."""
        x, squares = streams.new_empty(len(streams), streams.shape[2]), pre.new_empty(len(streams))
        self._rows(streams, pre=pre, x=x, norm_weight=norm_weight, squares=squares)
        return x

    def _rows(
        self,
        streams: Tensor,
        output: Tensor | None = None,
        site: Coefficients | None = None,
        mixed: Tensor | None = None,
        pre: Tensor | None = None,
        x: Tensor | None = None,
        norm_weight: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> None:
        """Read the streams once: into `mixed` if there is a site, and into x if there is `pre`."""
        tokens, num_streams, hidden = streams.shape
        if not tokens:
            return
        rows_pass[(tokens,)](
            streams,
            output,
            pre,
            None if site is None else site.post,
            None if site is None else site.comb,
            norm_weight,
            mixed,
            x,
            squares,
            hidden,
            self._problem.rms_norm_eps,
            S=num_streams,
            MIX=mixed is not None,
            COLLAPSE=x is not None,
            NORM=norm_weight is not None,
            ALIGNED=hidden % 16 == 0,
            CHUNKS=triton.cdiv(hidden, CHANNELS),
            BH=CHANNELS,
            num_warps=ROW_WARPS,
        )

    def _coefficients(self, streams: Tensor, squares: Tensor, weights: SplitWeights) -> Coefficients:
        """Those of the site that streams `[T, S, H]` enter; `squares` `[T]` are summed over a row."""
        tokens, num_streams, hidden = streams.shape
        width, columns, tile = num_streams * hidden, num_columns(num_streams), self._tile
        tiles, splits = tile.cut(width)
        base = weights.base
        pre, post = base.new_empty(tokens, num_streams), base.new_empty(tokens, num_streams)
        site = Coefficients(pre, post, base.new_empty(tokens, num_streams, num_streams))
        if not tokens:
            return site
        partial = base.new_empty(splits, tokens, columns)
        project[triton.cdiv(tokens, tile.rows), splits](
            streams,
            weights.fn,
            partial,
            tokens,
            width,
            tiles,
            ALIGNED=width % 16 == 0,
            N=columns,
            PARTS=weights.fn.shape[1] // columns,
            BT=tile.rows,
            BK=tile.channels,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        make_site[(triton.cdiv(tokens, SITE_ROWS),)](
            partial,
            squares,
            base,
            weights.scale,
            pre,
            post,
            site.comb,
            tokens,
            width,
            splits,
            self._problem.rms_norm_eps,
            self._problem.hc_eps,
            self._problem.sinkhorn_iterations,
            S=num_streams,
            SP=triton.next_power_of_2(num_streams),
            N=columns,
            SPLITS=tile.splits,
            BT=SITE_ROWS,
            num_warps=4,
        )
        return site


def build(context: BuildContext) -> FusedResidual:
    """Build `fused`."""
    return FusedResidual(context.problem)
