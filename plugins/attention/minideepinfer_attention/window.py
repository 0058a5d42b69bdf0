"""Window-only attention: neighbouring tokens share one tile of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from minideepinfer.operators import Batch, Selection, Stage, StageClock
from minideepinfer.operators.problem import AttentionProblem
from minideepinfer.transfer import upload
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minideepinfer_attention.kernels.window import EXTRA, window_attention_kernel
from minideepinfer_attention.rows import WindowLayout, window_buffer, window_layout
from minideepinfer_attention.tiles import FORM, LOG2E, no_sink, suits_gluon

LARGEST_WINDOW = 128
MOST_TOKENS: int = EXTRA.value


@dataclass(frozen=True)
class WindowTile:
    """How windows of one size are cut.

    Attributes:
        tokens: neighbouring tokens of a tile.
        rows: rows in M; a tile whose tokens have more heads takes several programs.
        keys: keys of the first product.
        chunk: channels at a time.
    """

    tokens: int
    rows: int
    keys: int
    chunk: int

    @classmethod
    def of(cls, num_heads: int, head_dim: int, window: int, dtype: torch.dtype) -> WindowTile:
        """The tile for some sizes; float32 products are unrolled, so their tiles are small."""
        exact = dtype == torch.float32
        tokens = max(1, min(MOST_TOKENS, (32 if exact else 128) // num_heads))
        rows = 32 if exact else (64 if tokens * num_heads <= 64 else 128)
        chunk = min(32 if exact else 64, max(16, triton.next_power_of_2(head_dim)))
        return cls(tokens, rows, max(16, triton.next_power_of_2(window)), chunk)


@dataclass(frozen=True, eq=False)
class WindowTiles:
    """A batch, cut.

    Attributes:
        tile: how.
        window: entries of a window.
        layout: where they lie; requests are so far apart in the buffer that no tile of keys reaches into another one.
        ranges: int32 `[tiles, 2]`, first row of the batch and the row behind.
    """

    tile: WindowTile
    window: int
    layout: WindowLayout
    ranges: Tensor

    @classmethod
    def of(cls, batch: Batch, tile: WindowTile, window: int) -> WindowTiles:
        """Cut a batch; no tile has rows of two requests."""
        layout = window_layout(batch, window, gap=tile.keys + MOST_TOKENS - window)
        first, stops, start = [], [], 0
        for length in batch.seqlens:
            first.append(torch.arange(start, start + length, tile.tokens, dtype=torch.int32))
            start += length
            stops.append((first[-1] + tile.tokens).clamp(max=start))
        none = [torch.empty(0, dtype=torch.int32)]
        ranges = torch.stack([torch.cat(first or none), torch.cat(stops or none)], 1)
        return cls(tile, window, layout, upload(ranges, batch.positions.device))


def window_attention(
    q: Tensor, buffer: Tensor, tiles: WindowTiles, sink: Tensor, scale: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Attend to windows of at most `LARGEST_WINDOW` rows. All tensors are contiguous.

    Args:
        q: `[T, H, D]`, bfloat16 or float32.
        buffer: `[N, D]` in q's dtype, see `window_buffer`.
        tiles: of the batch.
        sink: float32 `[H]`; -inf = none.
        scale: factor on the logits.
        cos: float32 `[T, C]`.
        sin: float32 `[T, C]`.

    Returns:
        `[T, H, D]`, rotated back; a token without keys is zero.
    """
    out, tile, (_, num_heads, dim) = torch.empty_like(q), tiles.tile, q.shape
    if len(tiles.ranges):
        window_attention_kernel[len(tiles.ranges), triton.cdiv(tile.tokens * num_heads, tile.rows)](
            TensorDescriptor.from_tensor(q.flatten(0, 1), [tile.rows, tile.chunk]),
            TensorDescriptor.from_tensor(buffer, [tile.keys, tile.chunk]),
            TensorDescriptor.from_tensor(buffer, [MOST_TOKENS, tile.chunk]),
            tiles.ranges,
            tiles.layout.first,
            tiles.layout.hidden,
            sink,
            cos,
            sin,
            out,
            scale * LOG2E,
            tiles.window,
            2 * cos.shape[1],
            HEADS=num_heads,
            DIM=dim,
            BLOCK_M=tile.rows,
            BLOCK_K=tile.keys,
            CHUNK=tile.chunk,
            num_warps=8 if tile.rows == 128 else 4,
            num_stages=3,
        )
    return out


class WindowAttention:
    """See `AttentionOperator`; for layers without a global path, windows of at most `LARGEST_WINDOW`.

    At the released sizes on Hopper the kernel is a Gluon one, elsewhere and where Triton is interpreted its twin.
    """

    def __init__(self, problem: AttentionProblem, device: torch.device, clock: StageClock) -> None:
        self._attend: Callable[..., Tensor] = window_attention
        self.form = FORM
        self._clock = clock
        self.fuses = {Stage.KEY_GATHER: Stage.ATTENTION}
        if suits_gluon(problem):
            from minideepinfer_attention.window_gluon import window_prefill

            self._attend, self.form = window_prefill, "gluon"
        self._window = problem.sliding_window
        self._tile = WindowTile.of(
            problem.num_heads, problem.head_dim, problem.sliding_window, getattr(torch, problem.dtype)
        )
        self._no_sink = no_sink(problem.num_heads, device)

    def prepare(self, batch: Batch) -> WindowTiles:
        """Cut the batch into tiles, and find out where windows lie."""
        return WindowTiles.of(batch, self._tile, self._window)

    def run(
        self,
        q: Tensor,
        window_new: Tensor,
        window_ring: Tensor,
        global_kv: Tensor | None,
        selection: Selection | None,
        sink: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        metadata: WindowTiles,
    ) -> Tensor:
        """See `AttentionOperator.run`."""
        q, window_new, cos, sin = (tensor.contiguous() for tensor in (q, window_new, cos, sin))
        with self._clock.stage(Stage.KEY_GATHER):
            buffer = window_buffer(window_new, window_ring, metadata.layout)
        return self._attend(q, buffer, metadata, self._no_sink if sink is None else sink, scale, cos, sin)
