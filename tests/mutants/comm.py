"""Broken communication on one rank, from `single`."""

from __future__ import annotations

from mutants import mutant

_DISPATCH = "return Arrived(Dispatched(x, topk_ids, topk_weights, handle=None))"
_COMBINE = '"""Return the partial sums; they are complete."""\n        return Arrived(partial)'
_GATHER = 'def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:\n        """Return x."""\n        return x'
_SCATTER = (
    'def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:\n        """Return x."""\n        return x'
)
_FETCH = "return Arrived(tuple(table[row_ids.to(table.device)].to(row_ids.device) for table in tables))"

NAIVE = (
    mutant(
        "tokens-come-home-in-another-order",
        "identity-round-trip",
        _DISPATCH,
        "return Arrived(Dispatched(x.flip(0), topk_ids.flip(0), topk_weights.flip(0), handle=None))",
    ),
    mutant(
        "combine-in-bfloat16",
        "identity-round-trip",
        _COMBINE,
        _COMBINE.replace("partial)", "partial.bfloat16().float())"),
    ),
    mutant(
        "tokens-without-expert-dropped",
        "identity-round-trip",
        _DISPATCH,
        "some = (topk_ids >= 0).any(1)\n"
        "        return Arrived(Dispatched(x[some], topk_ids[some], topk_weights[some], None))",
    ),
    mutant(
        "weights-of-the-neighbour",
        "identity-round-trip",
        _DISPATCH,
        "return Arrived(Dispatched(x, topk_ids, topk_weights.roll(1, 0), handle=None))",
    ),
    mutant(
        "state-kept-between-steps",
        "repeatable",
        _COMBINE,
        '"""Accumulate."""\n        old = getattr(self, "total", partial[:0])\n'
        "        self.total = partial + (old if old.shape == partial.shape else 0.0)\n"
        "        return Arrived(self.total)",
    ),
    mutant(
        "rank-without-tokens-skipped",
        "C1",
        _COMBINE,
        _COMBINE.replace("partial)", "partial if len(partial) else partial.new_empty(0))"),
    ),
    mutant(
        "last-column-dropped-when-hidden-is-odd",
        "matches-reference",
        _GATHER,
        _GATHER + ".unflatten(-1, (1, -1))[..., 0, : x.shape[-1] // 2 * 2]",
    ),
    mutant("gathered-in-float32", "matches-reference", _GATHER, _GATHER + ".float()"),
    mutant(
        "second-half-not-gathered",
        "outputs-written",
        _GATHER,
        _GATHER.replace(
            "return x",
            "out = x.new_empty(x.shape)\n        out[: (len(x) + 1) // 2] = x[: (len(x) + 1) // 2]\n        return out",
        ),
    ),
    mutant("sum-in-bfloat16", "matches-reference", _SCATTER, _SCATTER + ".bfloat16().float()"),
    mutant(
        "row-number-truncated",
        "rows-of-the-table",
        _FETCH,
        "return Arrived(tuple(table[row_ids & 3] for table in tables))",
    ),
    mutant(
        "repeated-rows-fetched-once",
        "rows-of-the-table",
        _FETCH,
        "return Arrived(tuple(table[row_ids.unique()] for table in tables))",
    ),
    mutant(
        "rows-sorted",
        "rows-of-the-table",
        _FETCH,
        "return Arrived(tuple(table[row_ids.sort().values] for table in tables))",
    ),
    mutant(
        "weights-clamped-in-place",
        "inputs-left-alone",
        _DISPATCH,
        "topk_weights.clamp_(max=0.5)\n        " + _DISPATCH,
    ),
    mutant(
        "ids-widened",
        "matches-reference",
        _DISPATCH,
        "return Arrived(Dispatched(x, topk_ids.long(), topk_weights, None))",
    ),
    mutant(
        "rows-of-an-earlier-step",
        "end-to-end",
        _FETCH,
        "self.kept = getattr(self, 'kept', {})\n        now = tuple(table[row_ids] for table in tables)\n"
        "        return Arrived(self.kept.setdefault((tables[0].shape, len(row_ids)), now))",
    ),
    mutant(
        "width-that-is-no-multiple-of-4-cut",
        "M4",
        _DISPATCH,
        "tail = torch.arange(x.shape[1]) >= x.shape[1] // 4 * 4\n"
        "        return Arrived(Dispatched(x.masked_fill(tail, 0.0), topk_ids, topk_weights, handle=None))",
        "from torch import Tensor\n",
        "import torch\nfrom torch import Tensor\n",
    ),
    mutant(
        "int32-offset",
        "64-bit-offsets",
        _FETCH,
        "table = tables[0]\n        starts = (row_ids * table.shape[1]).int().long()[:, None]\n"
        "        return Arrived((table.flatten()[starts + row_ids.new_tensor(range(table.shape[1]))],))",
    ),
    mutant(
        "row-count-off-when-hidden-is-odd",
        "identity-round-trip",
        _DISPATCH,
        "count = x.numel() // (x.shape[1] + x.shape[1] % 2)\n"
        "        return Arrived(Dispatched(x[:count], topk_ids[:count], topk_weights[:count], handle=None))",
    ),
    mutant(
        "row-without-expert-times-zero",
        "article",
        _COMBINE,
        '"""Add nothing of the tokens themselves."""\n        return Arrived(partial + 0.0 * handle.float())',
        _DISPATCH,
        "return Arrived(Dispatched(x, topk_ids, topk_weights, handle=x))",
    ),
)
