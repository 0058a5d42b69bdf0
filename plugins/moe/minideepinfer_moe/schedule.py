"""Which rows this rank computes, sorted by expert; made on the device, sized by what could be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from minideepinfer_moe.kernels.schedule import count_slots, sort_slots, sum_counts

SMALL_SLOTS = 4096
"""Up to this many, every program counts all slots for itself."""
BLOCK, TILE_ENTRIES = 128, 64
"""Slots that a program places, or entries of the tile list that it writes."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rows of the local experts, sorted by expert and in token order within one. R = T * k bounds their number.

    A row is one (token, slot) whose expert is local; an id that a token names twice makes two rows. Only the first
    `expert_offsets[E]` rows exist, what stands behind them was never written. Nothing here was seen by the host.

    Attributes:
        sorted_tokens: int32 `[R]`, the row of x that each sorted row multiplies.
        row_weights: float32 `[R]`, its routing weight.
        expert_offsets: int32 `[E + 1]`, first row of each expert; the last is the number of rows.
        slot_rows: int32 `[T, k]`, the sorted row of each slot, -1 if its expert is not local.
        tiles: int32 `[max_tiles, 3]`, expert, first row and number of rows of each tile; no rows behind the last one.
            Tiles never cross experts and come in row order. An expert's tiles are as few as `tile_rows` allows, and of
            one height, a multiple of 8, but for the last one, which has what remains.
        num_tiles: int32 `[1]`, tiles that have rows.
        tile_rows: most rows in a tile.
    """

    sorted_tokens: Tensor
    row_weights: Tensor
    expert_offsets: Tensor
    slot_rows: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tile_rows: int

    @property
    def max_rows(self) -> int:
        """R."""
        return self.sorted_tokens.shape[0]

    @property
    def max_tiles(self) -> int:
        """Tiles there can be at most."""
        return self.tiles.shape[0]

    @property
    def num_experts(self) -> int:
        """E, the local experts."""
        return self.expert_offsets.shape[0] - 1


def make_schedule(
    topk_ids: Tensor, topk_weights: Tensor, expert_start: int, num_experts: int, tile_rows: int
) -> Schedule:
    """Sort the slots of local experts.

    Args:
        topk_ids: int32 `[T, k]` global ids, T and k at least 1; -1 and experts of other ranks make no row.
        topk_weights: float32 `[T, k]`; read only where the expert is local.
        expert_start: global id of local expert 0.
        num_experts: E.
        tile_rows: most rows of a tile, a multiple of 8.
    """
    slots, topk = topk_ids.numel(), topk_ids.shape[1]
    experts = triton.next_power_of_2(max(num_experts + 1, 16))
    max_tiles = slots // tile_rows + min(slots, num_experts)
    small = slots <= SMALL_SLOTS
    num_blocks = triton.cdiv(slots, BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=topk_ids.device)

    schedule = Schedule(
        empty(slots),
        empty(slots, dtype=torch.float32),
        empty(num_experts + 1),
        empty(*topk_ids.shape),
        empty(max_tiles, 3),
        empty(1),
        tile_rows,
    )
    counts, totals = empty(experts, 0 if small else num_blocks), empty(experts)
    ids = topk_ids.contiguous()
    if not small:
        count_slots[(num_blocks,)](ids, counts, slots, expert_start, num_experts, num_blocks, BLOCK, experts)
        sum_counts[(experts,)](counts, totals, num_blocks, BLOCKS=1024)
    sort_slots[(num_blocks + triton.cdiv(max_tiles, TILE_ENTRIES),)](
        ids,
        topk_weights.contiguous(),
        counts,
        totals,
        schedule.sorted_tokens,
        schedule.row_weights,
        schedule.slot_rows,
        schedule.expert_offsets,
        schedule.tiles,
        schedule.num_tiles,
        slots,
        topk,
        expert_start,
        num_experts,
        num_blocks,
        max_tiles,
        tile_rows,
        SMALL=max(triton.next_power_of_2(slots), BLOCK) if small else 0,
        BLOCK=BLOCK,
        EXPERTS=experts,
        TILES=TILE_ENTRIES,
        num_warps=8,
    )
    return schedule
