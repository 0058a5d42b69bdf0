"""Broken indexers, from `naive`."""

from __future__ import annotations

from mutants import mutant

NAIVE = (
    mutant("relu-forgotten", "matches-reference", ".relu_()", ""),
    mutant(
        "relu-after-the-weight",
        "matches-reference",
        "(q[:, head].double() @ keys.T).relu_() * head_weights[:, head, None].double()",
        "((q[:, head].double() @ keys.T) * head_weights[:, head, None].double()).relu_()",
    ),
    mutant(
        "sign-of-head-weight-lost",
        "matches-reference",
        "head_weights[:, head, None].double()",
        "head_weights[:, head, None].double().abs()",
    ),
    mutant("one-head-only", "matches-reference", "range(q.shape[1])", "range(min(1, q.shape[1]))"),
    mutant("newest-block-dropped", "matches-reference", "best.masked_fill(numbers == newest, torch.inf)", "best"),
    mutant(
        "wrong-block-pinned",
        "matches-reference",
        "(visible.unsqueeze(1) - 1).div(size",
        "visible.unsqueeze(1).div(size",
    ),
    mutant("candidates-ignored", "matches-reference", "if candidates is not None:", "if False:"),
    mutant(
        "candidates-numbered-by-entry",
        "two-levels",
        "return _best(best.masked_fill(numbers == newest, torch.inf), self._problem.candidate_topk_blocks)",
        "return _best(best.masked_fill(numbers == newest, torch.inf), self._problem.candidate_topk_blocks) * size",
    ),
    mutant(
        "empty-candidate-is-block-0",
        "matches-reference",
        "candidates.long().where(named, num_blocks)",
        "candidates.long().clamp(0, num_blocks)",
    ),
    mutant("own-group-visible", "I1", "entries >= visible.unsqueeze(1)", "entries > visible.unsqueeze(1)"),
    mutant(
        "visible-by-request-instead-of-row",
        "later-tokens",
        "entries >= visible.unsqueeze(1)",
        "entries >= visible.max()",
    ),
    mutant(
        "top-k-of-a-slice",
        "matches-reference",
        "indices[rows] = _best(scores, problem.topk)",
        "indices[rows] = _best(scores[:, : max(problem.topk, scores.shape[1] // 2)], problem.topk)",
    ),
    mutant(
        "higher-index-first",
        "I2",
        "values, columns = scores.sort(dim=-1, descending=True, stable=True)",
        "values, columns = scores.flip(-1).sort(dim=-1, descending=True, stable=True)\n"
        "    columns = scores.shape[1] - 1 - columns",
    ),
    mutant(
        "ties-by-tile",
        "I2",
        "values, columns = scores.sort(dim=-1, descending=True, stable=True)",
        "order = torch.arange(scores.shape[1])\n"
        "    order = (order % 4 * scores.shape[1] + order).argsort()\n"
        "    values, columns = scores[:, order].sort(dim=-1, descending=True, stable=True)\n"
        "    columns = order[columns]",
    ),
    mutant(
        "ties-by-schedule",
        "repeatable",
        "values, columns = scores.sort(dim=-1, descending=True, stable=True)",
        "global calls\n"
        "    calls = globals().get('calls', 0) + 1\n"
        "    values, columns = scores.roll(calls, -1).sort(dim=-1, descending=True, stable=True)\n"
        "    columns = (columns - calls) % max(1, scores.shape[1])",
    ),
    mutant("scores-in-bfloat16", "matches-reference", "total.float()", "total.bfloat16().float()"),
    mutant("keys-in-physical-order", "other-pages", "pages.long()[", "pages.long().sort().values["),
    mutant(
        "invisible-entries-fill-up",
        "matches-reference",
        "columns[:, :count].where(values[:, :count] > -torch.inf, -1).int()",
        "columns[:, :count].int()",
    ),
    mutant(
        "rows-that-see-nothing-unwritten",
        "outputs-written",
        "indices = torch.full((tokens, problem.topk), -1, dtype=torch.int32, device=q.device)",
        "indices = torch.empty(tokens, problem.topk, dtype=torch.int32, device=q.device)",
        "            if length:",
        "            if length and int(visible[start : start + length].max()) > 0:",
    ),
    mutant(
        "weights-changed-in-place",
        "inputs-left-alone",
        "problem, tokens = self._problem, q.shape[0]",
        "problem, tokens = self._problem, q.shape[0]\n        head_weights.mul_(2.0)",
    ),
    mutant(
        "unread-keys-in-a-sum",
        "unread-memory",
        "return form.decode(keys, torch.float32).double()",
        "return form.decode(keys, torch.float32).double() + 0.0 * form.decode(pool, torch.float32).double().sum()",
    ),
    mutant(
        "metadata-of-a-batch-with-as-many-rows",
        "end-to-end",
        "return _Metadata(batch, visible, tuple(requests))",
        "self.kept = getattr(self, 'kept', {})\n"
        "        return self.kept.setdefault(batch.num_tokens, _Metadata(batch, visible, tuple(requests)))",
    ),
    mutant(
        "quantised-again-with-another-scale",
        "M3",
        "(q[:, head].double() @ keys.T)",
        "((q[:, head].double() * 0.5).round() * 2.0 @ keys.T)",
    ),
    mutant(
        "int32-offset",
        "64-bit-offsets",
        "keys = pool[pages.long()[entries // per_page], entries % per_page]",
        "rows = pages.long()[entries // per_page] * per_page + entries % per_page\n"
        "    offsets = (rows * pool.shape[2]).int().long().unsqueeze(-1)\n"
        "    keys = pool.flatten()[offsets + torch.arange(pool.shape[2])]",
    ),
    mutant(
        "high-nibble-is-the-even-channel",
        "matches-reference",
        "return form.decode(keys, torch.float32).double()",
        "found = form.decode(keys, torch.float32).double()\n"
        "    return found.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if keys.dtype == torch.uint8 else found",
    ),
    mutant(
        "scale-of-the-neighbouring-group",
        "matches-reference",
        "return form.decode(keys, torch.float32).double()",
        "if keys.dtype == torch.uint8:\n"
        "        scales = keys.shape[1] // 17\n"
        "        keys = torch.cat([keys[:, :-scales], keys[:, -scales:].roll(1, 1)], 1)\n"
        "    return form.decode(keys, torch.float32).double()",
    ),
)
