"""Rows in expert order, as the grouped products read them; their number is known to the device alone."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from minideepinfer_moe.kernels.grouped_rows import encode_kernel, sort_rows_kernel
from minideepinfer_moe.schedule import Schedule

PROGRAMS = 2048
"""At most; each passes over row after row."""


def sort_rows(x: Tensor, schedule: Schedule) -> Tensor:
    """`[T, K]` in token order -> `[R, K]` in expert order; rows that do not exist are not written."""
    width = x.shape[1]
    head = 1 << (width.bit_length() - 1)
    rows = x.new_empty(schedule.max_rows, width)
    sort_rows_kernel[(min(len(rows), PROGRAMS),)](
        x,
        schedule.sorted_tokens,
        schedule.expert_offsets[-1:],
        rows,
        width // 32,
        HEAD=head,
        TAIL=triton.next_power_of_2(max(width - head, 16)),
        num_warps=4,
    )
    return rows


def encode_rows(x: Tensor, schedule: Schedule, sort: bool) -> tuple[Tensor, Tensor]:
    """e4m3 codes and the power of two of each row.

    Args:
        x: with `sort`, `[T, K]` in token order after QDQ-FP8; else `[R, K]` in expert order before it.
        schedule: the rows.
        sort: whether rows are yet to be sorted.

    Returns:
        `[R, K]` float8_e4m3fn and float32 `[R]`; rows that do not exist are not written.
    """
    codes = x.new_empty(schedule.max_rows, x.shape[1], dtype=torch.uint8)
    scales = x.new_empty(schedule.max_rows, dtype=torch.float32)
    encode_kernel[(min(len(codes), PROGRAMS),)](
        x,
        schedule.sorted_tokens,
        schedule.expert_offsets[-1:],
        codes,
        scales,
        x.shape[1] // 32,
        SORT=sort,
        QDQ=not sort,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        num_warps=8,
    )
    return codes, scales
