"""Broken communication: on one rank, from `single`; between processes, from `collective` and `all_to_all`."""

from __future__ import annotations

from mutants import mutant
from mutants.made import package_mutant

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

_PROCESSES = "between-processes"
_OWN = "receives[self.rank].copy_(sends[self.rank])"

COLLECTIVE = (
    package_mutant("own-rows-dropped", _PROCESSES, "group", _OWN, "receives[self.rank].zero_()"),
    package_mutant(
        "ranks-in-another-order",
        _PROCESSES,
        "operator",
        "return group.exchange(moves, lambda: whole)",
        "return group.exchange(moves, lambda: tuple(torch.cat(x.split(list(counts))[::-1]) for x in whole))",
        "from torch import Tensor\n",
        "import torch\nfrom torch import Tensor\n",
    ),
    package_mutant(
        "own-summand-added-twice",
        _PROCESSES,
        "operator",
        "total = total.add_(part) if number else total + part",
        "total = total.add_(part) if number else total + part + parts[0] - total",
        "total, *others = parts",
        "total, *others = parts + parts[:1]",
    ),
    package_mutant(
        "last-rank-not-added", _PROCESSES, "operator", "total, *others = parts", "total, *others = parts[:-1] or parts"
    ),
    package_mutant(
        "padding-shown",
        _PROCESSES,
        "collective",
        "return arriving.then(lambda tokens: Dispatched(tokens[0], tokens[1], tokens[2], handle=None))",
        "rest = max(self._counts) * self._group.size - sum(self._counts)\n"
        "        pad = [x.new_zeros(rest, x.shape[1]) for x in (x, topk_ids, topk_weights)]\n"
        "        padded = arriving.then(lambda tokens: map(torch.cat, zip(tokens, pad)))\n"
        "        return padded.then(lambda tokens: Dispatched(*tokens, handle=None))",
        "return scatter_sums(self._group, partial, self._counts)",
        "return scatter_sums(self._group, partial[: sum(self._counts)], self._counts)",
        "from torch import Tensor\n",
        "import torch\nfrom torch import Tensor\n",
    ),
    package_mutant(
        "tokens-in-bfloat16-on-the-wire",
        _PROCESSES,
        "collective",
        "arriving = gather(self._group, x, topk_ids, topk_weights, counts=self._counts)",
        "arriving = gather(self._group, x.bfloat16(), topk_ids, topk_weights, counts=self._counts)",
    ),
    package_mutant(
        "sums-in-bfloat16-on-the-wire",
        _PROCESSES,
        "collective",
        "return scatter_sums(self._group, partial, self._counts)",
        "return scatter_sums(self._group, partial.bfloat16(), self._counts).then(lambda total: total.float())",
    ),
    package_mutant(
        "weights-of-the-next-rank",
        _PROCESSES,
        "collective",
        "Dispatched(tokens[0], tokens[1], tokens[2], handle=None)",
        "Dispatched(tokens[0], tokens[1], tokens[2].roll(-1, 0), handle=None)",
    ),
    package_mutant(
        "rows-of-the-owner-before",
        _PROCESSES,
        "rows",
        "here = questions - group.rank * rows_per_rank",
        "here = (questions - 1 - group.rank * rows_per_rank).clamp(min=0)",
    ),
    package_mutant(
        "repeated-rows-not-put-back", _PROCESSES, "rows", "rows[place] for rows in found", "rows for rows in found"
    ),
    package_mutant(
        "second-table-from-the-first",
        _PROCESSES,
        "rows",
        "answers = table[here.to(table.device)].to(row_ids.device)",
        "answers = tables[0][here, : table.shape[1]]",
    ),
)

ALL_TO_ALL = (
    package_mutant(
        "duplicates-sent",
        _PROCESSES,
        "all_to_all",
        "to_rank.sum(1))",
        "owned.sum((1, 2)))",
        "to, tokens = torch.nonzero_static(to_rank, size=to_rank.numel(), fill_value=0).unbind(1)",
        "to, tokens, _ = owned.nonzero().unbind(1)",
    ),
    package_mutant(
        "an-expert-of-the-next-rank-included",
        _PROCESSES,
        "all_to_all",
        "topk_ids // self._experts_per_rank == ranks",
        "(topk_ids - (topk_ids == 2).int()) // self._experts_per_rank == ranks",
    ),
    package_mutant(
        "tokens-of-own-experts-stay-away",
        _PROCESSES,
        "all_to_all",
        "for tokens, part in zip(handle.tokens.split(handle.sending), parts, strict=True):",
        "for tokens, part in list(zip(handle.tokens.split(handle.sending), parts))[1:]:",
    ),
    package_mutant(
        "sums-overwrite-each-other",
        _PROCESSES,
        "all_to_all",
        "total.index_add_(0, tokens, part)",
        "total.index_copy_(0, tokens, part)",
    ),
    package_mutant(
        "tokens-without-expert-uninitialised",
        "article",
        "all_to_all",
        "total = home.new_zeros(self._num_tokens, home.shape[1])",
        "total = home.new_full((self._num_tokens, home.shape[1]), 7.0)",
    ),
    package_mutant(
        "combined-in-the-order-sent",
        _PROCESSES,
        "all_to_all",
        "for tokens, part in zip(handle.tokens.split(handle.sending), parts, strict=True):",
        "for tokens, part in zip([t.flip(0) for t in handle.tokens.split(handle.sending)], parts, strict=True):",
    ),
    package_mutant(
        "every-weight-of-the-token-sent-to-slot-0",
        _PROCESSES,
        "all_to_all",
        "topk_weights[tokens].where(here, 0.0))",
        "topk_weights[tokens].where(here, 0.0).sort(1, descending=True).values)",
    ),
)
