"""Roundings of spec 3.11 for kernels: what `minideepinfer.quantization` does in torch, on values in registers.

They work on bits, so that the interpreter and every GPU give the numbers of `quantization`, bit by bit but for NaN.
"""

import triton
import triton.language as tl


@triton.jit
def qdq_fp8(x, AXIS: tl.constexpr):
    """QDQ-FP8 of float32 groups, 32 values along axis AXIS; float32, exact in bfloat16."""
    magnitude = tl.abs(x)
    # 2^ceil(log2(amax / 448)) from the bits: 448 = 1.75 * 2^8.
    bits = tl.maximum(tl.max(magnitude, axis=AXIS, keep_dims=True), 1e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    code = _e4m3(tl.minimum(magnitude * _power_of_two(254 - exponent), 448.0))
    return _signed(code * _power_of_two(exponent), x)


@triton.jit
def qdq_mxfp4(x, AXIS: tl.constexpr):
    """QDQ-MXFP4, likewise."""
    magnitude = tl.abs(x)
    floor = tl.full([1], 7.052966104933725e-38, tl.float32)  # 6 * 2^-126
    bits = tl.maximum(tl.max(magnitude, axis=AXIS, keep_dims=True), floor).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)  # 6 = 1.5 * 2^2
    code = _e2m1(tl.minimum(magnitude * _power_of_two(254 - exponent), 6.0))
    return _signed(code * _power_of_two(exponent), x)


@triton.jit
def qdq_nvfp4(x, AXIS: tl.constexpr):
    """QDQ-NVFP4, likewise, in groups of 16."""
    magnitude = tl.abs(x)
    most = tl.maximum(tl.max(magnitude, axis=AXIS, keep_dims=True), 0.01171875)  # 6 * 2^-9
    scale = _e4m3(tl.minimum(tl.div_rn(most, tl.full(most.shape, 6.0, tl.float32)), 448.0))
    code = _e2m1(tl.minimum(tl.div_rn(magnitude, tl.broadcast_to(scale, magnitude.shape)), 6.0))
    return _signed(code * scale, x)


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 127), of a biased exponent 1..254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(magnitude):
    """0..448 to the nearest E4M3 number, ties to the even code."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 numbers are 2^-9 apart: adding 1.5 * 2^14 leaves no finer bit.
    return tl.where(magnitude < 0.015625, (magnitude + 24576.0) - 24576.0, normal)


@triton.jit
def _e2m1(magnitude):
    """0..6 to the nearest E2M1 number, ties to the even code."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) & -0x400000).to(tl.float32, bitcast=True)
    # Below 1 numbers are 1 / 2 apart: adding 1.5 * 2^22 leaves no finer bit.
    return tl.where(magnitude < 1.0, (magnitude + 6291456.0) - 6291456.0, normal)


@triton.jit
def _signed(magnitude, x):
    """The magnitude with the sign of x; x itself where it is NaN or infinite."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    signed = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), signed, x)
