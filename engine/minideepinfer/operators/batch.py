"""What an operator is told about the packed rows it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minideepinfer.operators.declaration import Phase

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one phase of one step: R requests, T packed rows, request after request, positions ascending.

    A request may have no row (`seqlens[r] == 0`); T and R may be 0. A row with position -1 is padding: it sees no
    key, its selection is empty and its outputs are zero.

    Attributes:
        phase: the phase of every row here.
        seqlens: new rows of each request, host integers, length R.
        context_lens: position of each request's first row here (= tokens before it), host integers, length R.
        cu_seqlens: int32 `[R + 1]`, exclusive prefix sums of `seqlens`.
        positions: int64 `[T]`, absolute position of each row.
        request_ids: int64 `[T]`, the request (0..R-1) that a row belongs to.
        ring_table: int64 `[R]`, window ring of each request; the entry of position p lies in slot `p % ring_size`.
        window_start: int64 `[R]`, first position whose window entry exists; older ones are never read.
        block_table: int32 `[R, max_pages]`, page that holds tokens `[i * page_tokens, (i + 1) * page_tokens)` of a
            request; what lies behind a request's last page is unspecified and never read.
        page_tokens: tokens per page. At ratio r a page holds `page_tokens // r` entries; entry j of a request lies in
            page `block_table[r, j // entries]` at place `j % entries`.
    """

    phase: Phase
    seqlens: tuple[int, ...]
    context_lens: tuple[int, ...]
    cu_seqlens: Tensor
    positions: Tensor
    request_ids: Tensor
    ring_table: Tensor
    window_start: Tensor
    block_table: Tensor
    page_tokens: int

    @property
    def num_tokens(self) -> int:
        """T, the number of packed rows."""
        return sum(self.seqlens)

    @property
    def num_requests(self) -> int:
        """R, the number of requests."""
        return len(self.seqlens)

    def visible_entries(self, ratio: int) -> Tensor:
        """Global entries that each row may see at a ratio.

        An entry is visible once its last token was processed: entry e at position p if and only if
        `e < (p + 1) // ratio` (spec 3.6). Padding rows see none.

        Args:
            ratio: tokens per entry, >= 1.

        Returns:
            int64 `[T]`.
        """
        return (self.positions + 1) // ratio

    def last_visible_entries(self, ratio: int) -> tuple[int, ...]:
        """The same for the last row of each request, known to the host; padding counts as if it were tokens.

        Args:
            ratio: tokens per entry, >= 1.

        Returns:
            R numbers; 0 where a request has no row.
        """
        ends = zip(self.context_lens, self.seqlens, strict=True)
        return tuple((context + length) // ratio if length else 0 for context, length in ends)
