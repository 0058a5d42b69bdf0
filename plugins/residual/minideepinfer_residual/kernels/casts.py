"""Casts that are right on the GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl
from minideepinfer.operators import interpreting

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def widen(x):
    """To float32; of bfloat16, the interpreter does this slowly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even; the interpreter would cut bits off."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
