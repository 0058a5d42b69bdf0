"""Selection of experts behind the gate's logits.

One program, one warp, owns a token (TOKENS where programs are dear: interpreted) and holds its scores + bias in
registers as ordered integers, whose maximum over a warp is one instruction: k rounds of maximum and lowest id that has
it. The chosen logits are read again (L1), and each id's place in the ascending row is the number of smaller ones.
Memory sees logits, ids and weights once.

Floor: 6.3 MB of logits / 4.28 TB/s = 0.002 ms for 4096 tokens and 384 experts; arithmetic binds. Measured on one H200:
0.014 ms for top-6, 0.042 with the logits' product.
"""

import triton
import triton.language as tl


@triton.jit
def _log1p(z):
    """log(1 + z) for z in [0, 1] as 2 atanh(z / (2 + z)), whose series has s <= 1/9: a few units in the last place."""
    ratio = z / (2.0 + z)
    s = ratio * ratio
    series = 1.0 / 15 + s * (1.0 / 17)
    series = 1.0 / 11 + s * (1.0 / 13 + s * series)
    series = 1.0 / 7 + s * (1.0 / 9 + s * series)
    series = 1.0 / 3 + s * (1.0 / 5 + s * series)
    return 2.0 * (ratio + ratio * s * series)


@triton.jit
def _scores(logits):
    """`sqrt(softplus(logit))`."""
    return tl.sqrt(tl.maximum(logits, 0.0) + _log1p(tl.exp(-tl.abs(logits))))


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "topk"])
def select_experts(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, num_experts, topk, scaling,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The k largest score + bias of TOKENS tokens; weights `score / (sum + 1e-20) * scaling`."""
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    real, inside = experts < num_experts, tokens < num_tokens
    logits_ptr += tokens * num_experts
    ranked = _scores(tl.load(logits_ptr + experts, mask=inside & real, other=0.0))
    ranked += tl.load(bias_ptr + experts, mask=real, other=0.0)
    # Integers in the order of the numbers; even a NaN of a padding row leaves k different legal ids.
    bits = tl.where(ranked > -3.0e38, ranked, -3.0e38).to(tl.int32, bitcast=True)
    keys = tl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    slots = tl.arange(0, SLOTS)[None, :]
    ids = tl.full((TOKENS, SLOTS), 0x7FFFFFFF, tl.int32)
    for slot in range(topk):
        highest = tl.max(keys, axis=1, keep_dims=True)
        best = tl.min(tl.where(keys == highest, experts, EXPERTS), axis=1, keep_dims=True)
        ids = tl.where(slots == slot, best, ids)
        keys = tl.where(experts == best, -0x80000000, keys)
    chosen = inside & (slots < topk)
    scores = tl.where(chosen, _scores(tl.load(logits_ptr + ids, mask=chosen, other=0.0)), 0.0)
    total = tl.sum(scores, axis=1, keep_dims=True)
    places = tokens * topk + tl.sum((ids[:, None, :] < ids[:, :, None]).to(tl.int32), axis=2)
    tl.store(ids_ptr + places, ids, mask=chosen)
    tl.store(weights_ptr + places, scores / (total + 1e-20) * scaling, mask=chosen)
