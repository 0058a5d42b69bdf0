"""Sparse prefill attention on Hopper, in Gluon: window and selected rows of a shared K = V, 64 heads x 512.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from minideepinfer_attention.sparse_gluon_attend import BLOCK, HALF, HEADS, LOG2_E, attend
from minideepinfer_attention.sparse_gluon_load import load_ring, load_selected

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
        plan: int32 `[128]` row numbers in ring order.
    """

    q: tuple
    kv: tuple
    weights: tuple
    bias: tuple
    maximum: tuple
    total: tuple
    plan: gl.shared_memory_descriptor


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
def _barrier(count: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar


@gluon.jit
def _allocate():
    tiles = Tiles(
        q=(_tile(256), _tile(256)),
        kv=(_tile(256), _tile(256), _tile(256), _tile(256)),
        weights=(_tile(64), _tile(64)),
        bias=(_vector(gl.float32, 64), _vector(gl.float32, 64)),
        maximum=(_vector(gl.float32, 64), _vector(gl.float32, 64)),
        total=(_vector(gl.float32, 64), _vector(gl.float32, 64)),
        plan=_vector(gl.int32, 128),
    )
    copied: gl.constexpr = PRODUCER_THREADS
    bars = Barriers(
        full=(_barrier(copied), _barrier(copied + 1), _barrier(copied), _barrier(copied + 1)),
        empty=(_barrier(1), _barrier(1), _barrier(1), _barrier(1)),
        ready=(_barrier(1), _barrier(1)),
        summed=(_barrier(1), _barrier(1)),
        q_full=(_barrier(copied), _barrier(copied)),
        q_empty=_barrier(2),
    )
    return tiles, bars


@gluon.jit(do_not_specialize=["num_tokens", "num_selected"])
def sparse_prefill_kernel(q, window, window_rows, pool, pool_rows, sink, cos, sin, out, num_tokens, num_selected, scale):
    tiles, bars = _allocate()
    num_pairs = 1 + (num_selected + 2 * BLOCK - 1) // (2 * BLOCK)
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), gl.constexpr(False), scale, sink, cos, sin, out, num_tokens, num_pairs, tiles, bars)),
            (attend, (gl.constexpr(1), gl.constexpr(False), scale, sink, cos, sin, out, num_tokens, num_pairs, tiles, bars)),
            (load_selected, (q, window, window_rows, pool, pool_rows, num_tokens, num_selected, num_pairs, tiles, bars)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit(do_not_specialize=["num_tokens"])
def window_prefill_kernel(q, window, window_rows, positions, sink, cos, sin, out, num_tokens, scale):
    tiles, bars = _allocate()
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), gl.constexpr(True), scale, sink, cos, sin, out, num_tokens, 1, tiles, bars)),
            (attend, (gl.constexpr(1), gl.constexpr(True), scale, sink, cos, sin, out, num_tokens, 1, tiles, bars)),
            (load_ring, (q, window, window_rows, positions, num_tokens, tiles, bars)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def sparse_prefill(q, window, window_rows, pool, pool_rows, sink, scale, cos, sin, out):
    if q.shape[0]:
        sparse_prefill_kernel[_grid(q)](
            q, window, window_rows, pool, pool_rows, sink, cos, sin, out.view(torch.int32),
            q.shape[0], pool_rows.shape[1], scale * LOG2_E.value, num_warps=4,
        )
    return out


def window_prefill(q, window, window_rows, positions, sink, scale, cos, sin, out):
    if q.shape[0]:
        window_prefill_kernel[_grid(q)](
            q, window, window_rows, positions, sink, cos, sin, out.view(torch.int32), q.shape[0], scale * LOG2_E.value, num_warps=4
        )
    return out


def _grid(q: Tensor) -> tuple[int]:
    """One program per multiprocessor: shared memory holds one."""
    return (min(q.shape[0], torch.cuda.get_device_properties(q.device).multi_processor_count),)
