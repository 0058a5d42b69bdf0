"""`all_to_all`: a token goes only to ranks that own one of its experts, once to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial as bind

import torch
from minideepinfer.operators import BuildContext, Dispatched, Pending
from torch import Tensor

from minideepinfer_comm.group import Group, Move
from minideepinfer_comm.operator import GroupComm


@dataclass(frozen=True, eq=False)
class Sent:
    """What `dispatch` sent, for the way home.

    Attributes:
        tokens: int64 `[S]`, the token in each row sent, to rank 0 first.
        sending: rows sent to each rank.
        receiving: rows that came from each rank.
    """

    tokens: Tensor
    sending: Sequence[int]
    receiving: Sequence[int]


class SentTokens:
    """See `TokenExchange`. The host waits once a layer, in `dispatch`: it must know how many rows come from each rank.

    With R ranks, tokens of width H with k experts and e bytes an element, a rank sends

    - in `dispatch` `H * e + 8 * k` bytes for each token and each other rank that owns one of its experts: the token,
      ids and weights; what belongs to other ranks is -1 and 0. Before that 8 bytes to every other rank, the number;
    - in `combine` `4 * H` bytes for each token that came from another rank.
    """

    def __init__(self, group: Group, counts: Sequence[int], experts_per_rank: int) -> None:
        self._group, self._num_tokens, self._experts_per_rank = group, counts[group.rank], experts_per_rank
        self.rank, self.world_size = group.rank, group.size

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Pending[Dispatched]:
        """See `TokenExchange`; what arrives is in the order of ranks, and in a rank's in that of its tokens."""
        ranks = torch.arange(self.world_size, device=x.device)[:, None, None]
        owned = (topk_ids >= 0) & (topk_ids // self._experts_per_rank == ranks)  # [R, T, k]
        to_rank = owned.any(2)
        numbers = self._group.exchange_numbers(to_rank.sum(1))
        # Room for every token to go everywhere, so that the device has all this while the host waits for the numbers.
        to, tokens = torch.nonzero_static(to_rank, size=to_rank.numel(), fill_value=0).unbind(1)
        here = owned[to, tokens]
        rows = (x[tokens], topk_ids[tokens].where(here, -1), topk_weights[tokens].where(here, 0.0))
        sending, receiving = numbers.wait()
        room = tuple(part.new_empty(sum(receiving), *part.shape[1:]) for part in rows)
        moves = [
            Move(part[: sum(sending)].split(sending), space.split(receiving))
            for part, space in zip(rows, room, strict=True)
        ]
        arrived = Dispatched(room[0], room[1], room[2], Sent(tokens[: sum(sending)], sending, receiving))
        return self._group.exchange(moves, lambda: arrived)

    def combine(self, partial: Tensor, handle: Sent) -> Pending[Tensor]:
        """See `TokenExchange`."""
        home = partial.new_empty(len(handle.tokens), partial.shape[1])
        parts = home.split(handle.sending)

        def add_up() -> Tensor:
            total = home.new_zeros(self._num_tokens, home.shape[1])
            for tokens, part in zip(handle.tokens.split(handle.sending), parts, strict=True):
                total.index_add_(0, tokens, part)  # a rank has a token once, so the order of ranks is that of additions
            return total

        return self._group.exchange([Move(partial.split(handle.receiving), parts)], add_up)


def build(context: BuildContext) -> GroupComm:
    """Build `all_to_all`."""
    problem = context.problem
    return GroupComm(Group(context), bind(SentTokens, experts_per_rank=problem.num_experts // problem.world_size))
