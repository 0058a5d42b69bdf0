"""Family `indexer`: scores cached index keys and selects the entries a row attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from minideepinfer.operators.batch import Batch
from minideepinfer.operators.selection import IndexerOutput

if TYPE_CHECKING:
    from torch import Tensor


class IndexerOperator(Protocol):
    """A built indexer (spec 3.6, 3.7). Axes: T rows, h index heads, d = index head_dim, K = topk.

    `index_keys` are contiguous; other tensors may have any strides. A row of them is a key in the problem's cache
    layout: d numbers in `float32` and `bf16`; in `released` uint8, d / 2 bytes of e2m1 codes, the even channel in the
    low nibble, and then d / 32 E8M0 scales. `minideepinfer.cache.layouts` decodes rows of any layout.
    """

    def prepare(self, batch: Batch) -> Any:
        """Turn one batch into launch metadata, once for all layers with this problem."""
        ...

    def run(
        self, q: Tensor, head_weights: Tensor, index_keys: Tensor, candidates: Tensor | None, metadata: Any
    ) -> IndexerOutput:
        """Select for one layer.

        Score of entry j for row t: `sum_h head_weights[t, h] * relu(q[t, h] . key_j)`, accumulated in float32; weights
        may be negative. Only entries below `batch.visible_entries(ratio)` count. Where the problem says
        `uses_candidates`, only entries of the given blocks count.

        Args:
            q: `[T, h, d]` compute dtype, rotated and (by the problem's `kv_quantization`) quantise-dequantised.
            head_weights: `[T, h]` compute dtype, already scaled.
            index_keys: `[num_pages, entries_per_page, row]` in the problem's cache layout, this step's keys included.
            candidates: int32 `[T, candidate_topk_blocks]`, -1 anywhere; None unless the problem `uses_candidates`.
            metadata: what `prepare` returned for this batch.

        Returns:
            A selection with `indices` int32 `[T, K]`: the `min(K, valid)` best entries, -1 behind them; each entry at
            most once. An operator that declares itself deterministic takes the lower index among equal scores, so the
            result does not depend on batch or chunking. At the candidate source also the `candidate_topk_blocks` best
            blocks of `candidate_block_size` entries by their best score, the block of the newest visible entry always
            among them, lower block first among equals; blocks without a visible entry never. T = 0 gives empty
            tensors.
        """
        ...
