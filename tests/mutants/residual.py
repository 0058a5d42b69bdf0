"""Broken residual operators, from `naive`."""

from __future__ import annotations

from mutants import mutant

_PROJECTED = "projected = (flat @ weights.fn.T) * rho"
_MEAN = "flat.square().mean(-1, keepdim=True)"
_MIXED = 'torch.einsum("tij,tih->tjh", site.comb, streams.float())'
_COLLAPSED = 'torch.einsum("ts,tsh->th", pre, streams.float()).to(streams.dtype)'
_LEFT = "return (mixed + site.post.unsqueeze(-1) * output.float().unsqueeze(1)).to(streams.dtype)"
_ROW, _COLUMN = (f"comb = comb / (comb.sum({axis}, keepdim=True) + eps)\n" for axis in (-1, -2))
_ROWS_THEN_COLUMNS = f"        {_ROW}        {_COLUMN}"
_FIRST = f"    comb = torch.softmax(logits, dim=-1) + eps\n    {_COLUMN}"
_ADVANCED = "return self.enter(self.mix(streams, output, site), site.pre, weights, norm_weight)"

NAIVE = (
    mutant(
        "own-pre-used-at-once",
        "pre-of-the-site-before",
        "return Entered(streams, self.collapse(streams, pre, norm_weight), self._coefficients(streams, weights))",
        "site = self._coefficients(streams, weights)\n"
        "        return Entered(streams, self.collapse(streams, site.pre, norm_weight), site)",
    ),
    mutant("comb-transposed", "source-to-destination", "tij,tih->tjh", "tji,tih->tjh"),
    mutant(
        "comb-stored-transposed", "matches-reference", "(num_streams, num_streams)),", "(num_streams, num_streams)).mT,"
    ),
    mutant(
        "column-first",
        "ends-on-columns",
        _FIRST,
        f"    comb = torch.softmax(logits, dim=-2) + eps\n    {_ROW}",
        _ROWS_THEN_COLUMNS,
        f"        {_COLUMN}        {_ROW}",
    ),
    mutant(
        "ends-on-a-row-step",
        "ends-on-columns",
        "    return comb\n",
        "    return comb / (comb.sum(-1, keepdim=True) + eps)\n",
    ),
    mutant("19-iterations", "R1", "range(iterations - 1)", "range(iterations - 2)"),
    mutant("21-iterations", "R1", "range(iterations - 1)", "range(iterations)"),
    mutant("softmax-without-eps", "R1", "torch.softmax(logits, dim=-1) + eps", "torch.softmax(logits, dim=-1)"),
    mutant(
        "first-column-sum-without-eps",
        "matches-reference",
        _FIRST,
        _FIRST.replace("keepdim=True) + eps)", "keepdim=True))"),
    ),
    mutant(
        "exponential-without-its-maximum",
        "R1",
        "torch.softmax(logits, dim=-1)",
        "(logits.exp() / logits.exp().sum(-1, keepdim=True))",
    ),
    mutant("pre-without-eps", "matches-reference", "torch.sigmoid(pre) + eps", "torch.sigmoid(pre)"),
    mutant("post-without-its-2", "matches-reference", "2 * torch.sigmoid(post)", "torch.sigmoid(post)"),
    mutant("pre-and-post-swapped", "matches-reference", "pre, post, comb = torch", "post, pre, comb = torch"),
    mutant(
        "scale-of-pre-everywhere",
        "matches-reference",
        "torch.repeat_interleave(weights.scale,",
        "torch.repeat_interleave(weights.scale[:1].expand(3),",
    ),
    mutant(
        "base-scaled-too",
        "matches-reference",
        "torch.addcmul(weights.base, projected, scale)",
        "((weights.base + projected) * scale)",
    ),
    mutant(
        "low-part-of-fn-dropped", "R3", _PROJECTED, _PROJECTED.replace("weights.fn", "weights.fn.bfloat16().float()")
    ),
    mutant(
        "product-in-tf32",
        "R3",
        _PROJECTED,
        _PROJECTED.replace("weights.fn", "(weights.fn.view(torch.int32) & -8192).view(torch.float32)").replace(
            "-8192", "-65536"
        ),
    ),
    mutant(
        "rounded-to-bfloat16-before-rho",
        "matches-reference",
        "(flat @ weights.fn.T)",
        "(flat @ weights.fn.T).bfloat16().float()",
    ),
    mutant("rho-left-out", "matches-reference", _PROJECTED, "projected = flat @ weights.fn.T"),
    mutant(
        "rho-of-the-first-stream", "matches-reference", _MEAN, "streams[:, 0].float().square().mean(-1, keepdim=True)"
    ),
    mutant("rho-of-the-batch", "units-alone", _MEAN, "flat.square().mean()"),
    mutant("eps-of-1e-6-by-habit", "R2", "+ self._problem.rms_norm_eps)", "+ 1e-6)"),
    mutant(
        "norm-eps-of-1e-6",
        "R2",
        "rms_norm(u, norm_weight, self._problem.rms_norm_eps)",
        "rms_norm(u, norm_weight, 1e-6)",
    ),
    mutant(
        "streams-flattened-by-channel",
        "matches-reference",
        "streams.float().flatten(1)",
        "streams.float().mT.flatten(1)",
    ),
    mutant("post-left-out", "matches-reference", "site.post.unsqueeze(-1) * output", "output"),
    mutant(
        "output-left-out-of-the-first-row",
        "permuted-units",
        _LEFT,
        "output = output * (torch.arange(len(output)) > 0)[:, None]\n        " + _LEFT,
    ),
    mutant("two-roundings", "matches-reference", "return (mixed + site", "return (mixed.to(streams.dtype) + site"),
    mutant(
        "streams-changed-in-place", "inputs-left-alone", _LEFT, _LEFT.replace("return ", "return streams.copy_(") + ")"
    ),
    mutant(
        "pre-normalised-in-place",
        "inputs-left-alone",
        "        u = torch.einsum",
        "        pre /= pre.sum(-1, keepdim=True)\n        u = torch.einsum",
    ),
    mutant(
        "view-where-there-is-one-stream",
        "outputs-own-memory",
        _COLLAPSED,
        f"streams[:, 0].mul_(pre) if streams.shape[1] == 1 else {_COLLAPSED}",
    ),
    mutant(
        "last-row-unwritten",
        "outputs-written",
        _COLLAPSED,
        f"{_COLLAPSED}\n        whole = torch.empty_like(u)\n        whole[:-1] = u[:-1]\n        u = whole",
    ),
    mutant(
        "sums-in-another-order-each-time",
        "repeatable",
        _COLLAPSED,
        "streams.float().mul(pre.unsqueeze(-1)).roll(self.calls, 1).unbind(1)\n"
        "        self.calls = self.calls + 1\n"
        "        u = sum(u, torch.zeros_like(streams[:, 0], dtype=torch.float32)).to(streams.dtype)",
        "        self._problem = problem\n",
        "        self._problem, self.calls = problem, 0\n",
    ),
    mutant(
        "advance-with-the-streams-before",
        "advance-is-its-parts",
        _ADVANCED,
        "entered = self.enter(streams, site.pre, weights, norm_weight)\n"
        "        return Entered(self.mix(streams, output, site), entered.x, entered.site)",
    ),
    mutant(
        "last-channel-left-out",
        "R4",
        "streams.float().flatten(1)",
        "(streams.float() * (torch.arange(streams.shape[-1]) < max(1, streams.shape[-1] // 8 * 8))).flatten(1)",
    ),
    mutant(
        "coefficients-of-an-earlier-step",
        "end-to-end",
        "return Entered(streams, self.collapse(streams, pre, norm_weight), self._coefficients(streams, weights))",
        "self.kept = getattr(self, 'kept', {})\n"
        "        site = self.kept.setdefault((id(weights), len(streams)), self._coefficients(streams, weights))\n"
        "        return Entered(streams, self.collapse(streams, pre, norm_weight), site)",
    ),
)
