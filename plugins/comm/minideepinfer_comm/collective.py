"""`collective`: every rank sees the tokens of all ranks; sums are scattered back to where the tokens live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minideepinfer.operators import BuildContext, Dispatched, Pending
from torch import Tensor

from minideepinfer_comm.group import Group
from minideepinfer_comm.operator import GroupComm, gather, scatter_sums


class GatheredTokens:
    """See `TokenExchange`. The host never waits: sizes are known from `prepare`.

    With R ranks of T_r rows of width H, k experts a token and e bytes an element, rank r sends

    - in `dispatch` `(R - 1) * T_r * (H * e + 8 * k)` bytes, an id and a weight having 4 each;
    - in `combine` `(T_0 + .. + T_{R-1} - T_r) * H * 4` bytes.
    """

    def __init__(self, group: Group, counts: Sequence[int]) -> None:
        self._group, self._counts = group, counts
        self.rank, self.world_size = group.rank, group.size

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Pending[Dispatched]:
        """See `TokenExchange`; every rank gets every token."""
        arriving = gather(self._group, x, topk_ids, topk_weights, counts=self._counts)
        return arriving.then(lambda tokens: Dispatched(tokens[0], tokens[1], tokens[2], handle=None))

    def combine(self, partial: Tensor, handle: Any) -> Pending[Tensor]:
        """See `TokenExchange`."""
        return scatter_sums(self._group, partial, self._counts)


def build(context: BuildContext) -> GroupComm:
    """Build `collective`."""
    return GroupComm(Group(context), GatheredTokens)
