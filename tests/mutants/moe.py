"""Broken mixtures of experts, from `naive`."""

from __future__ import annotations

from mutants import Mutant, mutant

_IMPORT = "from minideepinfer.quantization import decode_mxfp4\n"


def _decoding(name: str, killed_by: str, expression: str) -> Mutant:
    """A mutant that decodes weights in another way; `decode` is the right one."""
    function = f"\n\ndef decode_mxfp4(packed, scale, dtype):\n    return {expression}\n\n"
    return mutant(
        name,
        killed_by,
        _IMPORT,
        "from minideepinfer.quantization import decode_mxfp4 as decode\n",
        "class NaiveMoe:",
        f"{function}class NaiveMoe:",
    )


def _quantizing(name: str, killed_by: str, rounding: str) -> Mutant:
    """A mutant that rounds the exponents of activation scales in another way; `.ceil()` is the right one."""
    function = f"""

def quantized_linear(x, weight, quantization):
    if quantization == "released":
        groups = x.float().unflatten(-1, (-1, 32))
        amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        scale = ((amax / 448).log2(){rounding}).exp2()
        x = ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
    return F.linear(x, weight)


"""
    imported = "from minideepinfer.model.linear import quantized_linear\n"
    return mutant(name, killed_by, imported, "", "class NaiveMoe:", f"{function}class NaiveMoe:")


NAIVE = (
    _decoding("nibbles-swapped", "identity-experts", "decode(packed >> 4 | packed << 4, scale, dtype)"),
    _decoding("exponent-0-is-zero", "M2", "decode(packed, scale, dtype) * (scale != 0).repeat_interleave(32, -1)"),
    _decoding("exponent-255-is-a-number", "M2", "decode(packed, scale.clamp(max=254), dtype)"),
    _decoding("exponent-truncated-to-7-bits", "M2", "decode(packed, scale & 0x7F, dtype)"),
    _decoding(
        "scale-block-16-for-32",
        "matches-reference",
        "decode(packed, scale[..., torch.arange(2 * scale.shape[-1]).clamp(max=scale.shape[-1] - 1)], dtype, 16)",
    ),
    _decoding("scale-of-the-next-block", "matches-reference", "decode(packed, scale.roll(1, -1), dtype)"),
    mutant("bias-in-the-weights", "routing", "scores.gather(-1, ids)", "(scores + bias).gather(-1, ids)"),
    mutant("weights-not-normalised", "routing", "chosen / (chosen.sum(-1, keepdim=True) + 1e-20)", "chosen"),
    mutant("weights-not-scaled", "routing", " + 1e-20) * scaling", " + 1e-20)"),
    mutant("ids-not-ascending", "routing", ".sort(dim=-1).values", ""),
    mutant(
        "higher-expert-first-among-equals",
        "routing",
        "(scores + bias).sort(dim=-1, descending=True, stable=True).indices",
        "(scores + bias).flip(-1).sort(dim=-1, descending=True, stable=True).indices.neg() + scores.shape[1] - 1",
    ),
    mutant("bias-forgotten", "routing", "(scores + bias)", "scores"),
    mutant(
        "gate-in-bfloat16",
        "routing",
        "F.linear(x.float(), gate.float())",
        "F.linear(x.bfloat16(), gate).float()",
    ),
    mutant(
        "given-routing-ignored",
        "matches-reference",
        "        if routing is None:\n",
        "        if True:\n",
    ),
    mutant("gate-clamped-from-below", "matches-reference", ".clamp(max=limit)", ".clamp(-limit, limit)"),
    mutant("up-clamped-from-above-only", "matches-reference", ".clamp(-limit, limit)", ".clamp(max=limit)"),
    mutant(
        "shared-expert-not-clamped",
        "matches-reference",
        "self._problem.swiglu_limit\n",
        "self._problem.swiglu_limit if isinstance(weight, Tensor) else 1e30\n",
    ),
    mutant(
        "shared-expert-forgotten",
        "matches-reference",
        "if shared is not None:",
        "if shared is not None and False:",
    ),
    mutant(
        "weight-after-w2",
        "matches-reference",
        "quantized_linear((F.silu(gate) * up * weight).to(x.dtype), w2, quantization)",
        "(quantized_linear((F.silu(gate) * up).to(x.dtype), w2, quantization) * weight).to(x.dtype)",
    ),
    mutant("gate-and-up-swapped", "matches-reference", "w1, w3 = decode", "w3, w1 = decode"),
    mutant(
        "inner-activation-not-quantised",
        "matches-reference",
        "quantized_linear((F.silu(gate) * up * weight).to(x.dtype), w2, quantization)",
        "quantized_linear((F.silu(gate) * up * weight).to(x.dtype), w2, 'none')",
    ),
    mutant(
        "expert-start-ignored",
        "ranks-add-up",
        "tokens.topk_ids.long() - experts.expert_start",
        "tokens.topk_ids.long()",
    ),
    mutant(
        "duplicated-id-counts-once",
        "matches-reference",
        "        used = torch",
        "        local = local.masked_fill((local[:, :, None] == local[:, None]).tril(-1).any(-1), -1)\n"
        "        used = torch",
    ),
    mutant("slots-without-expert-unwritten", "outputs-written", "x.new_zeros(", "x.new_empty("),
    mutant(
        "remote-row-times-zero",
        "M4",
        "return outputs.sum(1, dtype=torch.float32)",
        "return outputs.sum(1, dtype=torch.float32) + 0.0 * x.float()",
    ),
    mutant(
        "unused-expert-times-zero",
        "unused-experts",
        "return outputs.sum(1, dtype=torch.float32)",
        "every = decode_mxfp4(experts.w13, experts.w13_scale, torch.float32)\n"
        "        return outputs.sum(1, dtype=torch.float32) + 0.0 * every.sum()",
    ),
    mutant(
        "last-partial-tile-of-hidden-dropped",
        "M4",
        "self._expert(x[rows], w1, w3, w2,",
        "self._expert(x[rows], w1 * (torch.arange(x.shape[1]) < max(32, x.shape[1] // 64 * 64)), w3, w2,",
    ),
    mutant(
        "sum-in-bfloat16",
        "matches-reference",
        "outputs.sum(1, dtype=torch.float32)",
        "outputs.bfloat16().sum(1).float()",
    ),
    mutant(
        "order-of-sums-by-schedule",
        "repeatable",
        "return outputs.sum(1, dtype=torch.float32)",
        "self.calls = getattr(self, 'calls', 0) + 1\n"
        "        ordered = outputs.float().roll(self.calls, 1)\n"
        "        return sum(ordered.unbind(1), torch.zeros_like(x, dtype=torch.float32))",
    ),
    mutant("output-in-place-of-x", "inputs-left-alone", "return total.to(x.dtype)", "return x.copy_(total)"),
    mutant(
        "x-changed-in-place",
        "inputs-left-alone",
        "        arriving = comm.dispatch(x, *routing)",
        "        x.nan_to_num_(0.0)\n        arriving = comm.dispatch(x, *routing)",
    ),
    mutant(
        "view-of-x-where-nothing-is-local",
        "outputs-own-memory",
        "return total.to(x.dtype)",
        "return total.to(x.dtype) if total.any() else x.nan_to_num_(0.0).mul_(0.0)",
    ),
    mutant(
        "rank-without-tokens-leaves",
        "ranks-together",
        "        arriving = comm.dispatch(x, *routing)",
        "        if not len(x):\n            return x\n        arriving = comm.dispatch(x, *routing)",
    ),
    mutant(
        "sums-not-brought-home",
        "ranks-together",
        "total = comm.combine(partial, dispatched.handle).wait()",
        "total = partial[: len(x)] + 0.0 * comm.combine(partial, dispatched.handle).wait()",
    ),
    mutant(
        "sums-brought-home-in-compute-dtype",
        "ranks-together",
        "total = comm.combine(partial, dispatched.handle).wait()",
        "total = comm.combine(partial.to(x.dtype), dispatched.handle).wait()",
    ),
    _quantizing("activation-scale-truncated", "M3", ".floor()"),
    _quantizing("activation-scale-twice-as-large", "M3", ".ceil() + 1"),
    _decoding(
        "format-guessed-from-bytes-on-disk",
        "L2",
        "decode(packed, torch.cat([scale, scale], -1), dtype, packed.shape[-1] // scale.shape[-1])",
    ),
    mutant(
        "experts-of-the-first-layer",
        "end-to-end",
        "w1, w3 = decode_mxfp4(experts.w13[expert], experts.w13_scale[expert], x.dtype)",
        "self.kept = getattr(self, 'kept', {})\n"
        "                w1, w3 = self.kept.setdefault(\n"
        "                    expert, decode_mxfp4(experts.w13[expert], experts.w13_scale[expert], x.dtype)\n"
        "                )",
    ),
    mutant(
        "store-before-the-start",
        "outputs-written",
        "            return outputs.sum(1, dtype=torch.float32)",
        "            if outputs.storage_offset():  # else it is the heap's\n"
        "                outputs.as_strided((1,), (1,), outputs.storage_offset() - 1).zero_()\n"
        "            return outputs.sum(1, dtype=torch.float32)",
    ),
    mutant(
        "int32-offset",
        "64-bit-offsets",
        "decode_mxfp4(experts.w13[expert],",
        "decode_mxfp4(self._wrapped(experts.w13, expert),",
        "    def _expert(self,",
        "    def _wrapped(self, stacked, expert):\n"
        "        one = stacked[0]\n"
        "        start = int(torch.tensor(expert * one.numel()).int())\n"
        "        return stacked.flatten()[start:][: one.numel()].view_as(one)\n\n"
        "    def _expert(self,",
    ),
    mutant(
        "hidden-rounded-down-to-the-tile",
        "M4",
        "return outputs.sum(1, dtype=torch.float32)",
        "total = outputs.sum(1, dtype=torch.float32)\n"
        "        total[:, max(32, x.shape[1] // 64 * 64) :] = 0.0\n"
        "        return total",
    ),
    mutant(
        "hidden-rounded-up-to-the-tile",
        "matches-reference",
        "self._expert(x[rows], w1, w3, w2,",
        "self._expert(_rounded_up(x)[rows], w1, w3, w2,",
        "class NaiveMoe:",
        "def _rounded_up(x):\n"
        '    """Rows as they lie if each were a multiple of 128 wide."""\n'
        "    width = -(-x.shape[1] // 128) * 128\n"
        "    starts = torch.arange(len(x))[:, None] * width + torch.arange(x.shape[1])\n"
        "    return x.flatten()[starts.clamp(max=x.numel() - 1)]\n\n\n"
        "class NaiveMoe:",
    ),
)
