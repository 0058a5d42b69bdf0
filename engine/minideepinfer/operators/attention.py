"""Family `attention`: softmax over window and selected global entries, with a sink, undoing RoPE at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from minideepinfer.operators.batch import Batch
from minideepinfer.operators.selection import Selection

if TYPE_CHECKING:
    from torch import Tensor


class AttentionOperator(Protocol):
    """A built attention operator (spec 3.8). Axes: T rows, H heads, D = head_dim, C = rope_dim / 2.

    What outlives a step (the cache's tensors, `sink`) is contiguous; other tensors may have any strides.

    A row of a pool is an entry in the problem's cache layout: D numbers in `float32` and `bf16`; in `released` uint8,
    for the window D e4m3 codes and then D / 32 E8M0 scales, for global entries D / 2 bytes of e2m1 codes, the even
    channel in the low nibble, and then D / 16 e4m3 scales. `minideepinfer.cache.layouts` decodes rows of any layout.
    """

    def prepare(self, batch: Batch) -> Any:
        """Turn one batch into launch metadata, once for all layers. The only place for host work.

        Args:
            batch: rows of this operator's phase.

        Returns:
            Whatever `run` wants as `metadata`.
        """
        ...

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
        metadata: Any,
    ) -> Tensor:
        """Attend, for one layer.

        Row t at position p of request r sees the window positions `max(window_start[r], p - window + 1) .. p` (those
        from `context_lens[r]` on lie in `window_new`, older ones in the ring), then the valid entries of its
        selection. The two sets are concatenated, never merged. Keys are the values.

        Args:
            q: `[T, H, D]` compute dtype, rotated.
            window_new: `[T, D]` compute dtype, this step's window entries: values, as the cache will hold them.
            window_ring: `[num_rings, ring_size, row]` in the problem's cache layout, *as before the step*.
            global_kv: `[num_pages, entries_per_page, row]` likewise, this step's entries included; None if
                `compress_ratio` is 0.
            selection: see `Selection`; None if `compress_ratio` is 0.
            sink: float32 `[H]` logits that enter the denominator only; None = no sink.
            cos: float32 `[T, C]` of the layer's rotary table at the rows' positions.
            sin: float32 `[T, C]`.
            scale: factor on the logits.
            metadata: what `prepare` returned for this batch.

        Returns:
            `[T, H, D]` in q's dtype, rotated back by `-p` in the last `rope_dim` channels (float32 arithmetic, one
            rounding before and one after). A row without any key is exactly zero. What no row selects is never
            allowed to matter, NaN included. Inputs are not modified. T = 0 gives `[0, H, D]`.
        """
        ...
