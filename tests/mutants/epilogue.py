"""Broken epilogue operators, from `naive`."""

from __future__ import annotations

from mutants import mutant

_NORM = "y = rms_norm(y, norm_weight, self._eps)"
_TURN = "y = apply_rope(y, cos, sin)"
_ROUND = "y = ROUNDED[quantization](y)"
_RETURN = "return y.clone() if y is x and not in_place else y"
_START = "        y = x\n"
_STEPS = """        if norm_weight is not None:
            y = rms_norm(y, norm_weight, self._eps)
        if cos is not None and sin is not None:
            y = apply_rope(y, cos, sin)
"""
_NORM_STEP, _TURN_STEP = (f"{text}\n" for text in _STEPS.rstrip().rsplit("\n        if ", 1))
_TURN_STEP = f"        if {_TURN_STEP}"
_ROUND_STEP = '        if quantization != "none":\n            y = ROUNDED[quantization](y)\n'
_TABLE = 'ROUNDED = {"fp8": qdq_fp8, "mxfp4": qdq_mxfp4, "nvfp4": qdq_nvfp4}'


def _normed(formula: str) -> str:
    """The norm, with another formula of x32, weight and eps."""
    return f"y = (lambda x32, weight, eps: {formula})(y.float(), norm_weight, self._eps).to(y.dtype)"


def _rounded(name: str, formula: str) -> str:
    """The table, with another rounding of x."""
    return f"import minideepinfer.quantization as q\nimport torch\n\n{_TABLE}\nROUNDED[{name!r}] = lambda x: {formula}"


_MEAN = "(x32 * x32).mean(-1, keepdim=True)"
NAIVE = (
    mutant(
        "halves-for-neighbours",
        "quarter-turn",
        _TURN,
        "import torch\n"
        "            c = cos.shape[-1]\n"
        "            start = y.shape[-1] - 2 * c\n"
        "            order = torch.stack([torch.arange(c), torch.arange(c) + c], -1).flatten()\n"
        "            turned = apply_rope(y[..., start:][..., order], cos, sin)[..., order.argsort()]\n"
        "            y = torch.cat([y[..., :start], turned], -1)",
    ),
    mutant("sign-of-sin", "quarter-turn", _TURN, "y = apply_rope(y, cos, -sin)"),
    mutant(
        "first-channels-rotated",
        "quarter-turn",
        _TURN,
        "y = apply_rope(y.roll(-2 * cos.shape[-1], -1), cos, sin).roll(2 * cos.shape[-1], -1)",
    ),
    mutant(
        "angles-of-the-head",
        "heads-alone",
        _TURN,
        "rows = y.reshape(-1, y.shape[-1])\n"
        "            turns = [a.repeat(len(rows) // max(1, len(a)), 1) for a in (cos, sin)]\n"
        "            y = apply_rope(rows, *turns).view(y.shape)",
    ),
    mutant("rotated-in-bfloat16", "matches-reference", _TURN, "y = apply_rope(y, cos.bfloat16(), sin.bfloat16())"),
    mutant("norm-behind-the-rotation", "matches-reference", _STEPS, f"{_TURN_STEP}{_NORM_STEP}"),
    mutant(
        "rounded-before-the-rotation",
        "matches-reference",
        f"{_TURN_STEP}{_ROUND_STEP}",
        f"{_ROUND_STEP}{_TURN_STEP}",
    ),
    mutant("eps-left-out", "P1", _NORM, "y = rms_norm(y, norm_weight, 0.0)"),
    mutant("eps-of-1e-6-by-habit", "P1", _NORM, "y = rms_norm(y, norm_weight, 1e-6)"),
    mutant("eps-outside-the-root", "P1", _NORM, _normed(f"weight * x32 / ({_MEAN}.sqrt() + eps)")),
    mutant("norm-without-its-weight", "matches-reference", _NORM, "y = rms_norm(y, norm_weight * 0 + 1, self._eps)"),
    mutant("weight-plus-one", "matches-reference", _NORM, "y = rms_norm(y, norm_weight + 1, self._eps)"),
    mutant(
        "weight-in-bfloat16", "matches-reference", _NORM, "y = rms_norm(y, norm_weight.bfloat16().float(), self._eps)"
    ),
    mutant(
        "mean-over-heads",
        "heads-alone",
        _NORM,
        _normed("weight * x32 * ((x32 * x32).mean(tuple(range(1, x32.dim())), keepdim=True) + eps).rsqrt()"),
    ),
    mutant("mean-over-the-batch", "units-alone", _NORM, _normed("weight * x32 * ((x32 * x32).mean() + eps).rsqrt()")),
    mutant("sum-for-the-mean", "matches-reference", _NORM, _normed(f"weight * x32 * ({_MEAN} * 2 + eps).rsqrt()")),
    mutant("mean-subtracted", "matches-reference", _NORM, f"y = y - y.mean(-1, keepdim=True)\n            {_NORM}"),
    mutant("groups-of-16-in-fp8", "matches-reference", _TABLE, _rounded("fp8", "q.qdq_fp8(x, 16)")),
    mutant("groups-of-16-in-mxfp4", "matches-reference", _TABLE, _rounded("mxfp4", "q.qdq_mxfp4(x, 16)")),
    mutant("one-scale-for-a-row", "matches-reference", _TABLE, _rounded("fp8", "q.qdq_fp8(x, x.shape[-1])")),
    mutant(
        "scale-of-any-size",
        "matches-reference",
        _TABLE,
        _rounded(
            "mxfp4",
            "(lambda g, s: q.decode_e2m1(q.encode_e2m1(g / s)).mul(s).flatten(-2).to(x.dtype))"
            "(x.float().unflatten(-1, (-1, 32)), x.float().unflatten(-1, (-1, 32)).abs().amax(-1, True) / 6 + 1e-30)",
        ),
    ),
    mutant("scale-of-nvfp4-in-e8m0", "matches-reference", _TABLE, _rounded("nvfp4", "q.qdq_mxfp4(x, 16)")),
    mutant(
        "scale-of-fp8-truncated",
        "P2",
        _TABLE,
        _rounded(
            "fp8",
            "(lambda g, s: (g / s).clamp(-448, 448).to(torch.float8_e4m3fn).float().mul(s).flatten(-2).to(x.dtype))"
            "(x.float().unflatten(-1, (-1, 32)), x.float().unflatten(-1, (-1, 32)).abs().amax(-1, True).clamp(min=1e-4)"
            ".div(448).log2().floor().exp2())",
        ),
    ),
    mutant("no-floor-under-the-scale", "P1", _TABLE, _rounded("fp8", "x / x * q.qdq_fp8(x)")),
    mutant("fp8-for-mxfp4", "matches-reference", _TABLE, _rounded("mxfp4", "q.qdq_fp8(x)")),
    mutant("nan-becomes-a-number", "broken-rows", _TABLE, _rounded("mxfp4", "q.qdq_mxfp4(x.nan_to_num())")),
    mutant("infinity-becomes-the-largest", "broken-rows", _TABLE, _rounded("nvfp4", "q.qdq_nvfp4(x.clamp(-9e9, 9e9))")),
    mutant(
        "rows-mixed-by-a-product-with-zeros",
        "broken-rows",
        _START,
        "        y = x + 0 * x.sum(0, keepdim=True) if len(x) else x\n",
    ),
    mutant(
        "rounded-once-at-the-end",
        "matches-reference",
        _TURN,
        "y = apply_rope(rms_norm(x.float(), norm_weight, self._eps) if norm_weight is not None else y, cos, sin)"
        ".to(x.dtype)",
    ),
    mutant("x-overwritten", "inputs-left-alone", _RETURN, "return x.copy_(y)"),
    mutant("x-returned", "outputs-own-memory", _RETURN, "return y"),
    mutant(
        "last-row-unwritten",
        "outputs-written",
        _RETURN,
        "out = x.new_empty(x.shape)\n        out[:-1] = y[:-1]\n        return out",
    ),
    mutant(
        "norm-weight-scaled-in-place", "inputs-left-alone", _NORM, "y = rms_norm(y, norm_weight.mul_(1.5), self._eps)"
    ),
    mutant(
        "state-between-calls",
        "repeatable",
        _RETURN,
        "self._eps = self._eps * 1.0 + 1.0\n        return y.clone() if y is x and not in_place else y",
    ),
    mutant(
        "last-channels-left-out",
        "P3",
        _NORM,
        _normed(
            "weight * x32 * ((x32[..., : max(1, x32.shape[-1] // 64 * 64)] ** 2).mean(-1, keepdim=True) + eps).rsqrt()"
        ),
    ),
    mutant("gate-of-the-other-sign", "matches-reference", "torch.where(dot < 0", "torch.where(dot > 0"),
    mutant("root-without-its-floor", "P4", ".clamp(min=1e-6).sqrt()", ".sqrt()"),
    mutant("gate-without-eps", "P4", "x.square().mean(-1) + self._eps)", "x.square().mean(-1))"),
    mutant("gate-without-a-root", "matches-reference", ".clamp(min=1e-6).sqrt()", ".clamp(min=1e-6)"),
    mutant("gate-without-its-weight", "matches-reference", "(x * weight * keys)", "(x * keys)"),
    mutant("gate-without-its-scale", "matches-reference", "dot = dot * streams.shape[-1] ** -0.5", "dot = dot * 1.0"),
    mutant("keys-shifted", "matches-reference", "values[:, :-1].float()", "values[:, 1:].float()"),
    mutant("first-key-for-the-value", "matches-reference", "values[:, -1:].float()", "values[:, :1].float()"),
    mutant("gate-of-the-batch", "units-alone", "keys.square().mean(-1)", "keys.square().mean()"),
    mutant(
        "streams-overwritten",
        "inputs-left-alone",
        "return (x + gate.unsqueeze(-1) * value).to(streams.dtype)",
        "return streams.copy_(x + gate.unsqueeze(-1) * value)",
    ),
)
