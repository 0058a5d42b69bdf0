"""Triton pieces that the attention kernels share: the choice of tiles, and the end of a row.

Logits are kept in units of log2(e), so that a weight is one `exp2`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from minideepinfer.operators.declaration import interpreting

LOG2E = tl.constexpr(math.log2(math.e))
INTERPRETED = tl.constexpr(interpreting())
FORM = "triton, interpreted" if interpreting() else "triton"


def head_tile(num_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Heads in a tile's M, padded width, keys in a tile, and the launch options that go with them.

    64 x 512 float32 sums fill half of the registers of an SM, so one such tile is what a program can hold. float32
    products are not done by tensor cores: their tiles are small, since every product is unrolled.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_D": block_d, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2}
    block_h = min(64, max(16, triton.next_power_of_2(num_heads)))
    warps = 8 if block_h * block_d > 64 * 128 else 4
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_K": 64, "num_warps": warps, "num_stages": 2}


@triton.jit
def dot(a, b, acc):
    """`a @ b + acc` with float32 sums; the interpreter would take bfloat16 bits for integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to a dtype, to nearest even; the interpreter would cut bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def rotated_back(heads, channels, cos, sin, first_rotated):
    """Rotate adjacent channels from `first_rotated` on by the negative angle, in float32: heads `[M, N]`.

    Args:
        heads: values, rounded already.
        channels: the even channel of each pair, `[N / 2]`.
        cos: float32, broadcastable to `[M, N / 2]`.
        sin: float32, the same.
        first_rotated: first channel that is rotated.
    """
    rows: tl.constexpr = heads.shape[0]
    half: tl.constexpr = heads.shape[1] // 2
    even, odd = tl.split(heads.to(tl.float32).reshape(rows, half, 2))
    rotates = (channels >= first_rotated)[None, :]
    new_even = tl.where(rotates, even * cos + odd * sin, even)
    new_odd = tl.where(rotates, odd * cos - even * sin, odd)
    return tl.join(new_even, new_odd).reshape(rows, 2 * half)


@triton.jit
def finish_row(acc, total, peak, sink, cos_ptr, sin_ptr, token, rope_dim, dtype: tl.constexpr, DIM: tl.constexpr):
    """Divide by the denominator with the sink in it, round, and rotate back: `[M, N]` of one token.

    A row without keys has `total` 0 and is zero. `cos_ptr` None leaves out the rotation.
    """
    denominator = total + tl.exp2(sink - peak)
    heads = rounded(tl.where((total == 0)[:, None], 0.0, acc / denominator[:, None]), dtype)
    if cos_ptr is not None:
        channels = 2 * tl.arange(0, acc.shape[1] // 2)
        rotates = (channels >= DIM - rope_dim) & (channels < DIM)
        angle = token.to(tl.int64) * (rope_dim // 2) + (channels - (DIM - rope_dim)) // 2
        cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)[None, :]
        heads = rounded(rotated_back(heads, channels, cos, sin, DIM - rope_dim), dtype)
    return heads
