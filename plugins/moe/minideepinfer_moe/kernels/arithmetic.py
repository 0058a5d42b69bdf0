"""The activation and QDQ-FP8, as functions that kernels call; values live in registers."""

import triton
import triton.language as tl


@triton.jit
def clamped_swiglu(gate, up, limit):
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in float32 (spec 3.10). Where there is NaN, it stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def qdq_fp8(groups, AXIS: tl.constexpr):
    """QDQ-FP8 (spec 3.11) of float32 groups, 32 values along axis AXIS; float32, exact in bfloat16.

    E4M3 rounding is done on the bits, so that the interpreter and every GPU agree with `quantization.qdq_fp8`.
    """
    magnitude = tl.abs(groups)
    # 2^ceil(log2(amax / 448)) from the bits: 448 = 1.75 * 2^8.
    bits = tl.maximum(tl.max(magnitude, axis=AXIS, keep_dims=True), 1e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(magnitude * ((254 - exponent) << 23).to(tl.float32, bitcast=True), 448.0)
    bits = scaled.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 codes are 2^-9 apart: adding 1.5 * 2^14 leaves no finer bit.
    rounded = tl.where(scaled < 0.015625, (scaled + 24576.0) - 24576.0, rounded) * scale
    signs = groups.to(tl.int32, bitcast=True) & -0x80000000
    signed = (rounded.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)
    return tl.where(groups == groups, signed, groups)  # the bits above know no NaN
