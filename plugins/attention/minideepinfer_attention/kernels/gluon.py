"""Prefill attention in Gluon, for Hopper: 64 heads x 512, keys that are the values, one query at a time.

Tiling: a program stays on its SM and walks queries; M is the 64 heads, keys come 64 at a time. One warpgroup copies
rows into shared memory. Of the two others each owns every second block: the owner computes q k^T (64 x 64, over all 512
channels) and the softmax, then both add the block, each into its half of the output. So no product is split along N,
and the softmax of one block runs beside products of another.
Shared memory, 210 KiB: q 64, two blocks of keys 64 each, two tiles of weights 8 each. Registers: of the 216 of a
thread, 128 hold 64 x 256 float32 sums and 32 the scores.
Floor at T = 4096, 512 + 128 keys: 0.43 to 0.61 ms (gathered bytes, less what L2 holds). Measured on one H200, L2 cold,
inverse RoPE included: 0.706 ms, beside 1.353 for cuBLAS 8192^3. What binds it is in docs/findings.md.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minideepinfer_attention.kernels.gluon_attend import BLOCK, attend
from minideepinfer_attention.kernels.gluon_common import barrier
from minideepinfer_attention.kernels.gluon_load import load_selected

CONSUMER_REGISTERS = gl.constexpr(216)
PRODUCER_REGISTERS = gl.constexpr(72)
PRODUCER_THREADS = gl.constexpr(128)


class Tiles(NamedTuple):
    """Shared memory. Halves are of the channels; slot s holds every second block of 64 keys.

    Attributes:
        q: two halves `[1, 64, 256]`.
        kv: halves of slot 0, halves of slot 1, `[1, 64, 256]`.
        weights: of each slot's block, `[1, 64, 64]`.
        bias: float32 `[64]` of each slot's keys, 0 or masked.
        maximum: float32 `[64]`, the running maximum after each slot's block.
        total: float32 `[64]`, each warpgroup's part of the denominator.
    """

    q: tuple
    kv: tuple
    weights: tuple
    bias: tuple
    maximum: tuple
    total: tuple


class Barriers(NamedTuple):
    """`full` and `empty` go with `Tiles.kv`, `ready` with `weights` and `maximum`, `summed` with `total`."""

    full: tuple
    empty: tuple
    ready: tuple
    summed: tuple
    q_full: tuple
    q_empty: gl.shared_memory_descriptor


@gluon.jit
def _tile(columns: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(gl.bfloat16, [1, 64, columns], layout)


@gluon.jit
def _vector(dtype: gl.constexpr, length: gl.constexpr):
    return gl.allocate_shared_memory(dtype, [length], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _allocate():
    tiles = Tiles(
        q=(_tile(256), _tile(256)),
        kv=(_tile(256), _tile(256), _tile(256), _tile(256)),
        weights=(_tile(64), _tile(64)),
        bias=(_vector(gl.float32, 64), _vector(gl.float32, 64)),
        maximum=(_vector(gl.float32, 64), _vector(gl.float32, 64)),
        total=(_vector(gl.float32, 64), _vector(gl.float32, 64)),
    )
    copied: gl.constexpr = PRODUCER_THREADS
    bars = Barriers(
        full=(barrier(copied), barrier(copied + 1), barrier(copied), barrier(copied + 1)),
        empty=(barrier(1), barrier(1), barrier(1), barrier(1)),
        ready=(barrier(1), barrier(1)),
        summed=(barrier(1), barrier(1)),
        q_full=(barrier(copied), barrier(copied)),
        q_empty=barrier(2),
    )
    return tiles, bars


@gluon.jit(do_not_specialize=["num_tokens", "num_selected"])
def sparse_prefill_kernel(
    q, window, window_rows, pool, pool_rows, sink, cos, sin, out, num_tokens, num_selected, scale
):
    """Window and selected rows, any of them -1. `scale`: for base 2."""
    tiles, bars = _allocate()
    num_pairs = 1 + (num_selected + 2 * BLOCK - 1) // (2 * BLOCK)
    task = (scale, sink, cos, sin, out, num_tokens, num_pairs)
    lists = (window, window_rows, pool, pool_rows, num_tokens, num_selected, num_pairs)
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), task, tiles, bars)),
            (attend, (gl.constexpr(1), task, tiles, bars)),
            (load_selected, (q, lists, tiles, bars)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
