"""The activation, as a function that kernels call; values live in registers."""

import triton
import triton.language as tl


@triton.jit
def clamped_swiglu(gate, up, limit):
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in float32 (spec 3.10). Where there is NaN, it stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up
