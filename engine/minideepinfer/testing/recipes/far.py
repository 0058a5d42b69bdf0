"""Tensors past 2^31 elements that cost address space only."""

from __future__ import annotations

import torch
from torch import Tensor

from minideepinfer.testing.contract import Unavailable

FAR = 2**31
"""The first offset that 32 bits do not hold."""


def rows_before(row: int) -> int:
    """How many rows of so many elements it takes to reach element 2^31."""
    return -(-FAR // row)


def past_int32(tail: Tensor, device: torch.device) -> Tensor:
    """A tensor whose last rows are those of `tail`, all of them past element 2^31; nothing before them is touched.

    On a CPU, memory that nobody touches is address space only. The tensor itself begins 2^31 elements into an
    allocation: an offset that wraps around then reads wrong numbers, instead of ending the process.

    Raises:
        Unavailable: this machine does not give that much.
    """
    row = tail[0].numel()
    count = rows_before(row) + len(tail)
    try:
        buffer = torch.empty(FAR + count * row, dtype=tail.dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        needed = (FAR + count * row) * tail.element_size() / 2**30
        raise Unavailable(f"needs {needed:.0f} GiB of address space on {device}: {error}") from None
    whole = buffer[FAR:].view(count, *tail.shape[1:])
    whole[-len(tail) :] = tail.to(device)
    return whole
