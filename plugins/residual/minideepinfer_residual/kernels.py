"""Triton kernels of `fused`. Axes: T rows, S streams, H hidden, N >= 2S + S^2 columns of a site (a power of two).

`streams_pass` reads a tile of BT rows x BH channels of all S streams once: it mixes them in registers, stores them,
adds up what is collapsed, and multiplies the tile on tensor cores with `fn`. Channels are split among programs; what a
program knows of a row (its part of the N products, of the squares of the streams and of the collapsed row) goes to
`partial` and `squares`. `finish` adds the parts in their order, makes the coefficients of BS rows in some programs
(S x S matrices in registers), and normalises BN collapsed rows in place in the others.
"""

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


@triton.jit
def product(a, b, acc):
    """`a @ b + acc`, summed in float32; the interpreter would take bfloat16 bits for integers."""
    if INTERPRETED:
        a, b = widen(a), widen(b)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def streams_pass(
    streams,  # [T, S, H]
    output,  # [T, H]
    pre,  # float32 [T, S], weighs the streams that leave
    post,  # float32 [T, S]
    comb,  # float32 [T, S, S]
    fn,  # [S, fn_width, N * PARTS]; the two parts of a number are neighbours
    mixed,  # [T, S, H] out
    collapsed,  # [T, H] out
    partial,  # float32 [splits, T, N] out
    squares,  # float32 [splits, 2, T] out: of the streams that leave, of what is collapsed
    num_tokens,
    hidden_size,
    split_width,
    fn_width,
    S: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    MIX: tl.constexpr,
    COLLAPSE: tl.constexpr,
    PROJECT: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    split = tl.program_id(1)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    row_exists = rows < num_tokens
    first = rows.to(tl.int64) * S
    begin = split * split_width
    end = tl.minimum(begin + split_width, hidden_size)
    columns = tl.arange(0, N * PARTS)
    acc = tl.zeros([BT, N * PARTS], tl.float32)
    streams_squared = tl.zeros([BT], tl.float32)
    collapsed_squared = tl.zeros([BT], tl.float32)
    weight, share, inflow = (), (), ()
    for j in tl.static_range(S):
        if COLLAPSE:
            weight = weight + (tl.load(pre + first + j, mask=row_exists, other=0.0)[:, None],)
        if MIX:
            share = share + (tl.load(post + first + j, mask=row_exists, other=0.0)[:, None],)
            for i in tl.static_range(S):
                inflow = inflow + (tl.load(comb + (first + i) * S + j, mask=row_exists, other=0.0)[:, None],)
    for start in range(begin, end, BH):
        h = start + tl.arange(0, BH)
        exists = row_exists[:, None] & (h < hidden_size)[None, :]
        at = rows.to(tl.int64)[:, None] * hidden_size + h[None, :]
        entering = ()
        for i in tl.static_range(S):
            x = tl.load(streams + (first + i)[:, None] * hidden_size + h[None, :], mask=exists, other=0.0)
            entering = entering + (x,)
        wide = ()
        if MIX:
            y = widen(tl.load(output + at, mask=exists, other=0.0))
            for i in tl.static_range(S):
                wide = wide + (widen(entering[i]),)
        u = tl.zeros([BT, BH], tl.float32)
        for j in tl.static_range(S):
            leaving = entering[j]
            if MIX:
                value = share[j] * y
                for i in tl.static_range(S):
                    value += inflow[j * S + i] * wide[i]
                leaving = narrow(value, leaving.dtype)
                tl.store(mixed + (first + j)[:, None] * hidden_size + h[None, :], leaving, mask=exists)
            if COLLAPSE or PROJECT:
                exact = widen(leaving)
            if COLLAPSE:
                u += weight[j] * exact
            if PROJECT:
                f = tl.load(fn + (j * fn_width + h).to(tl.int64)[:, None] * (N * PARTS) + columns[None, :])
                acc = product(leaving, f, acc)
                streams_squared += tl.sum(exact * exact, 1)
        if COLLAPSE:
            rounded = narrow(u, collapsed.dtype.element_ty)
            tl.store(collapsed + at, rounded, mask=exists)
            exact = widen(rounded)
            collapsed_squared += tl.sum(exact * exact, 1)
    if PROJECT:
        if PARTS == 2:
            acc = tl.sum(tl.reshape(acc, [BT, N, PARTS]), 2)
        place = (split * num_tokens + rows).to(tl.int64)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(partial + place, acc, mask=row_exists[:, None])
        tl.store(squares + split * 2 * num_tokens + rows, streams_squared, mask=row_exists)
    if COLLAPSE:
        tl.store(squares + (split * 2 + 1) * num_tokens + rows, collapsed_squared, mask=row_exists)


@triton.jit
def finish(
    partial,  # float32 [splits, T, N]
    squares,  # float32 [splits, 2, T]
    base,  # float32 [2S + S^2]
    scale,  # float32 [3]
    norm_weight,  # float32 [H]
    pre,  # float32 [T, S] out
    post,  # float32 [T, S] out
    comb,  # float32 [T, S, S] out
    collapsed,  # [T, H], normalised in place
    num_tokens,
    hidden_size,
    splits,
    site_programs,
    norm_eps,
    hc_eps,
    iterations,
    S: tl.constexpr,
    SP: tl.constexpr,
    N: tl.constexpr,
    PROJECT: tl.constexpr,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
):
    program = tl.program_id(0)
    if program < site_programs:
        if PROJECT:
            _make_site(
                partial, squares, base, scale, pre, post, comb, num_tokens, hidden_size, splits, norm_eps, hc_eps,
                iterations, program, S, SP, N, SPLITS, BS,
            )  # fmt: skip
    else:
        program -= site_programs
        _normalise(collapsed, squares, norm_weight, num_tokens, hidden_size, splits, norm_eps, program, SPLITS, BN, BH)


@triton.jit
def _inverse_rms(squares, which, rows, num_tokens, splits, width, eps, SPLITS: tl.constexpr):
    """1 / sqrt(mean square + eps) of some rows; `which` = 0: the streams, 1: what is collapsed."""
    parts = tl.arange(0, SPLITS)
    place = (parts[:, None] * 2 + which) * num_tokens + rows[None, :]
    exists = (parts < splits)[:, None] & (rows < num_tokens)[None, :]
    total = tl.sum(tl.load(squares + place, mask=exists, other=0.0), 0)
    return tl.rsqrt(total / width + eps)


@triton.jit
def _make_site(
    partial, squares, base, scale, pre, post, comb, num_tokens, hidden_size, splits, norm_eps, hc_eps, iterations,
    program, S: tl.constexpr, SP: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Coefficients of BS rows."""
    rows = program * BS + tl.arange(0, BS)
    rho = _inverse_rms(squares, 0, rows, num_tokens, splits, S * hidden_size, norm_eps, SPLITS)
    parts = tl.arange(0, SPLITS)
    s = tl.arange(0, SP)
    exists = (rows < num_tokens)[:, None] & (s < S)[None, :]
    at = (parts[:, None] * num_tokens + rows[None, :]).to(tl.int64) * N
    vector = at[:, :, None] + s[None, None, :]
    some = (parts < splits)[:, None, None] & exists[None, :, :]
    place = rows.to(tl.int64)[:, None] * S + s[None, :]

    logits = tl.sum(tl.load(partial + vector, mask=some, other=0.0), 0) * rho[:, None] * tl.load(scale)
    logits += tl.load(base + s, mask=s < S, other=0.0)[None, :]
    tl.store(pre + place, 1.0 / (1.0 + tl.exp(-logits)) + hc_eps, mask=exists)

    logits = tl.sum(tl.load(partial + S + vector, mask=some, other=0.0), 0) * rho[:, None] * tl.load(scale + 1)
    logits += tl.load(base + S + s, mask=s < S, other=0.0)[None, :]
    tl.store(post + place, 2.0 / (1.0 + tl.exp(-logits)), mask=exists)

    pair = s[:, None] * S + s[None, :]
    real = (s < S)[:, None] & (s < S)[None, :]
    exists3 = (rows < num_tokens)[:, None, None] & real[None, :, :]
    some4 = (parts < splits)[:, None, None, None] & exists3[None, :, :, :]
    matrix = at[:, :, None, None] + 2 * S + pair[None, None, :, :]
    logits3 = tl.sum(tl.load(partial + matrix, mask=some4, other=0.0), 0) * rho[:, None, None] * tl.load(scale + 2)
    logits3 += tl.load(base + 2 * S + pair, mask=real, other=0.0)[None, :, :]
    c = _sinkhorn(logits3, real[None, :, :], hc_eps, iterations)
    tl.store(comb + (rows.to(tl.int64) * S * S)[:, None, None] + pair[None, :, :], c, mask=exists3)


@triton.jit
def _sinkhorn(logits, real, eps, iterations):
    """`[rows, source, destination]`: softmax over destinations, then columns, rows, ..., columns."""
    logits = tl.where(real, logits, -3.0e38)
    e = tl.where(real, tl.exp(logits - tl.max(logits, 2)[:, :, None]), 0.0)
    c = tl.where(real, e / tl.where(real, tl.sum(e, 2)[:, :, None], 1.0) + eps, 0.0)
    c = c / tl.where(real, tl.sum(c, 1)[:, None, :] + eps, 1.0)
    for _ in range(1, iterations):
        c = c / tl.where(real, tl.sum(c, 2)[:, :, None] + eps, 1.0)
        c = c / tl.where(real, tl.sum(c, 1)[:, None, :] + eps, 1.0)
    return c


@triton.jit
def _normalise(
    collapsed, squares, norm_weight, num_tokens, hidden_size, splits, norm_eps, program,
    SPLITS: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """RMSNorm of BN collapsed rows, in place."""
    rows = program * BN + tl.arange(0, BN)
    rho = _inverse_rms(squares, 1, rows, num_tokens, splits, hidden_size, norm_eps, SPLITS)
    for start in range(0, hidden_size, BH):
        h = start + tl.arange(0, BH)
        exists = (rows < num_tokens)[:, None] & (h < hidden_size)[None, :]
        at = collapsed + rows.to(tl.int64)[:, None] * hidden_size + h[None, :]
        x = tl.load(at, mask=exists, other=0.0)
        weight = tl.load(norm_weight + h, mask=h < hidden_size, other=0.0)
        tl.store(at, narrow(weight[None, :] * (widen(x) * rho[:, None]), x.dtype), mask=exists)
