"""Window-only attention: neighbouring tokens share one tile of keys.

Tiling: a program takes neighbouring tokens of a request, 128 rows in M (2 tokens x 64 heads), against the consecutive
rows of the window buffer that they see together (129): one product of 128 keys and one of 16, most of it masked. All
logits fit into registers, so that the softmax is exact in one go. q and keys stream through shared memory 64 channels
at a time, copied by the TMA unit; keys a second time, from L2, for the output. Two programs share an SM.
It serves other sizes and dtypes than `window_gluon`, and is that kernel's interpreted twin.
At T = 4096, 64 x 512 on one H200: 0.213 ms (`window_gluon` 0.172); floor 0.130 (q and output).
"""

from __future__ import annotations

import triton
import triton.language as tl
from minideepinfer.triton_casts import INTERPRETED, narrow

from minideepinfer_attention.kernels.tiles import LOG2E, NO_KEY, divided, unrotate

EXTRA = tl.constexpr(16)
"""Keys of the second product; tokens in a tile are no more, so the first holds all of the first token's window."""


@triton.jit(do_not_specialize=["window", "rope_dim"])
def window_attention_kernel(
    q_desc,
    key_desc,
    extra_desc,
    tiles_ptr,
    first_ptr,
    hidden_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    scale,
    window,
    rope_dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    first = tl.load(tiles_ptr + 2 * tl.program_id(0))
    stop = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    buffer_row = tl.load(first_ptr + first)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    shift = row // HEADS
    head = row % HEADS
    token = (first + shift).to(tl.int64)
    real = token < stop
    q_row = first * HEADS + tl.program_id(1) * BLOCK_M
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    product: tl.constexpr = tl.float32 if INTERPRETED else dtype
    key, extra = tl.arange(0, BLOCK_K), BLOCK_K + tl.arange(0, EXTRA)

    logits = tl.full([BLOCK_M, BLOCK_K], 0.0, tl.float32)
    more = tl.full([BLOCK_M, EXTRA], 0.0, tl.float32)
    for start in range(0, DIM, CHUNK):
        q = q_desc.load([q_row, start]).to(product)
        keys = key_desc.load([buffer_row, start]).to(product)
        rest = extra_desc.load([buffer_row + BLOCK_K, start]).to(product)
        logits = tl.dot(q, keys.T, logits, input_precision="ieee")
        more = tl.dot(q, rest.T, more, input_precision="ieee")

    hidden = shift + tl.load(hidden_ptr + token, mask=real, other=window)
    seen = (key[None, :] >= hidden[:, None]) & ((key[None, :] - shift[:, None]) < window)
    seen_more = (extra[None, :] >= hidden[:, None]) & ((extra[None, :] - shift[:, None]) < window)
    logits = tl.where(seen, logits * scale, float("-inf"))
    more = tl.where(seen_more, more * scale, float("-inf"))
    peak = tl.maximum(tl.maximum(tl.max(logits, 1), tl.max(more, 1)), NO_KEY)
    weights, more = tl.exp2(logits - peak[:, None]), tl.exp2(more - peak[:, None])
    total = tl.sum(weights, 1) + tl.sum(more, 1)
    weights, more = narrow(weights, dtype).to(product), narrow(more, dtype).to(product)
    sink = tl.load(sink_ptr + head) * LOG2E

    place = (token * HEADS + head) * DIM
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        keys = key_desc.load([buffer_row, start]).to(product)
        rest = extra_desc.load([buffer_row + BLOCK_K, start]).to(product)
        acc = tl.dot(weights, keys, input_precision="ieee")
        acc = tl.dot(more, rest, acc, input_precision="ieee")
        heads = narrow(divided(acc, total, peak, sink), dtype)
        if start + CHUNK > DIM - rope_dim:
            pair = (start - (DIM - rope_dim)) // 2 + tl.arange(0, CHUNK // 2)
            rotates = real[:, None] & ((pair >= 0) & (2 * pair < rope_dim))[None, :]
            angle = token[:, None] * (rope_dim // 2) + pair[None, :]
            cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0)
            sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)
            heads = narrow(unrotate(heads, cos, sin), dtype)
        tl.store(out_ptr + place[:, None] + channel[None, :], heads, mask=real[:, None] & (channel < DIM)[None, :])
