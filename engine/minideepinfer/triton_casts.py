"""Casts that are right on a GPU and in Triton's interpreter.

The interpreter (3.6 and 3.9) truncates float32 to bfloat16, widens it slowly, and multiplies bit patterns in a bfloat16
`tl.dot`: what is interpreted multiplies in float32. Every call of a function costs it milliseconds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minideepinfer.operators.declaration import interpreting

INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def widen(x):
    """bfloat16 or float32 -> float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 -> DTYPE, to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 -> the nearest number of DTYPE, in float32."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE).to(tl.float32)
