"""Window-only attention: neighbouring tokens share one tile of keys.

Tiling: a program takes 2 neighbouring tokens of a request x 64 heads, 128 rows in M, against the 129 consecutive rows
of the window buffer that they see: one product of 128 keys and one of 16, of which the rest is masked. All logits fit
into registers, so that the softmax is exact in one go; q and keys stream through shared memory 64 channels at a time,
keys a second time for the output, from L2.
Floor at T = 4096, 64 x 512: 0.126 ms (q and output).
"""

from __future__ import annotations

import triton
import triton.language as tl

from minideepinfer_attention.kernels.tiles import INTERPRETED, LOG2E, NO_KEY, divided, rounded, unrotate

EXTRA = tl.constexpr(16)
"""Keys of the second product; tokens in a tile are no more, so the first holds all of the first token's window."""


@triton.jit(do_not_specialize=["num_heads", "window", "rope_dim"])
def window_attention_kernel(
    q_ptr,
    buffer_ptr,
    tiles_ptr,
    first_ptr,
    hidden_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    scale,
    num_heads,
    window,
    rope_dim,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    first = tl.load(tiles_ptr + 2 * tl.program_id(0))
    stop = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    keys_ptr = buffer_ptr + tl.load(first_ptr + first).to(tl.int64) * DIM
    num_keys = window + stop - first - 1

    lane = tl.arange(0, TOKENS * BLOCK_H)
    shift = lane // BLOCK_H
    token = (first + shift).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + lane % BLOCK_H
    real = (token < stop) & (head < num_heads)
    place = (token * num_heads + head) * DIM
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    product: tl.constexpr = tl.float32 if INTERPRETED else dtype
    key, extra = tl.arange(0, BLOCK_K), BLOCK_K + tl.arange(0, EXTRA)

    logits = tl.full([TOKENS * BLOCK_H, BLOCK_K], 0.0, tl.float32)
    more = tl.full([TOKENS * BLOCK_H, EXTRA], 0.0, tl.float32)
    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        wide = (channel < DIM)[None, :]
        q = tl.load(q_ptr + place[:, None] + channel[None, :], mask=real[:, None] & wide, other=0.0).to(product)
        at = keys_ptr + channel[None, :]
        keys = tl.load(at + key[:, None] * DIM, mask=(key < num_keys)[:, None] & wide, other=0.0).to(product)
        rest = tl.load(at + extra[:, None] * DIM, mask=(extra < num_keys)[:, None] & wide, other=0.0).to(product)
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
    weights, more = rounded(weights, dtype).to(product), rounded(more, dtype).to(product)
    sink = tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E

    for start in range(0, DIM, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        wide = (channel < DIM)[None, :]
        at = keys_ptr + channel[None, :]
        keys = tl.load(at + key[:, None] * DIM, mask=(key < num_keys)[:, None] & wide, other=0.0).to(product)
        rest = tl.load(at + extra[:, None] * DIM, mask=(extra < num_keys)[:, None] & wide, other=0.0).to(product)
        acc = tl.dot(weights, keys, input_precision="ieee")
        acc = tl.dot(more, rest, acc, input_precision="ieee")
        heads = rounded(divided(acc, total, peak, sink), dtype)
        if start + CHUNK > DIM - rope_dim:
            pair = (start - (DIM - rope_dim)) // 2 + tl.arange(0, CHUNK // 2)
            rotates = real[:, None] & ((pair >= 0) & (2 * pair < rope_dim))[None, :]
            angle = token[:, None] * (rope_dim // 2) + pair[None, :]
            cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0)
            sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)
            heads = rounded(unrotate(heads, cos, sin), dtype)
        tl.store(out_ptr + place[:, None] + channel[None, :], heads, mask=real[:, None] & wide)
