"""Selection of experts behind the gate's logits.

One program owns ROWS tokens and holds their scores, `[ROWS, EXPERTS]`, in registers: k rounds of maximum with the lower
id first, then a prefix sum over the chosen ids gives each its place in the ascending row, so nothing is sorted. Logits
are read once, ids and weights written once.
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


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "topk"])
def select_experts(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, num_experts, topk, scaling,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """`score = sqrt(softplus(logit))`; the k largest score + bias; weights `score / (sum + 1e-20) * scaling`."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    real = experts < num_experts
    inside = (rows < num_tokens) & real
    logits = tl.load(logits_ptr + rows.to(tl.int64) * num_experts + experts, mask=inside, other=0.0)
    scores = tl.sqrt(tl.maximum(logits, 0.0) + _log1p(tl.exp(-tl.abs(logits))))
    ranked = scores + tl.load(bias_ptr + experts, mask=real, other=0.0)
    # Even a NaN of a padding row leaves k different legal ids.
    ranked = tl.where(real, tl.where(ranked > -3.0e38, ranked, -3.0e38), -float("inf"))
    chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    for _ in range(topk):
        best = tl.argmax(ranked, axis=1, tie_break_left=True, keep_dims=True)
        chosen += (experts == best).to(tl.int32)
        ranked = tl.where(experts == best, -float("inf"), ranked)
    total = tl.sum(tl.where(chosen > 0, scores, 0.0), axis=1, keep_dims=True)
    places = rows * topk + tl.cumsum(chosen, axis=1) - 1
    stored = inside & (chosen > 0)
    tl.store(ids_ptr + places, experts + tl.zeros_like(chosen), mask=stored)
    tl.store(weights_ptr + places, scores / (total + 1e-20) * scaling, mask=stored)
