"""`naive`: the reference mixture of experts, one expert after the other (spec 3.10)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from minideepinfer.model.linear import quantized_linear
from minideepinfer.operators import (
    Batch,
    BuildContext,
    Dispatched,
    MoeWeights,
    PackedExperts,
    SharedExpert,
    Stage,
    StageClock,
    TokenExchange,
)
from minideepinfer.operators.problem import MoeProblem
from minideepinfer.quantization import decode_mxfp4
from torch import Tensor


class NaiveMoe:
    """See `MoeOperator`. Experts stay packed; one is decoded at a time, and only if a token chose it."""

    def __init__(self, problem: MoeProblem, clock: StageClock) -> None:
        self._problem = problem
        self._clock = clock

    def transform_weights(self, weights: MoeWeights) -> MoeWeights:
        """Keep the weights as they are."""
        return weights

    def prepare(self, batches: tuple[Batch, ...]) -> None:
        """Nothing to prepare."""

    def route(self, x: Tensor, weights: MoeWeights) -> tuple[Tensor, Tensor]:
        """See `MoeOperator.route`."""
        problem = self._problem
        return choose_experts(x, weights.gate, weights.gate_bias, problem.topk, problem.routed_scaling)

    def run(
        self,
        x: Tensor,
        weights: MoeWeights,
        comm: TokenExchange,
        metadata: None,
        routing: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `MoeOperator.run`."""
        if routing is None:
            with self._clock.stage(Stage.GATE):
                routing = self.route(x, weights)
        arriving = comm.dispatch(x, *routing)
        with self._clock.stage(Stage.SHARED_EXPERT):  # while tokens travel
            shared = self._shared(x, weights.shared)
        dispatched = arriving.wait()
        with self._clock.stage(Stage.GROUPED_GEMM):
            partial = self._local_experts(dispatched, weights.experts)
        total = comm.combine(partial, dispatched.handle).wait()
        with self._clock.stage(Stage.COMBINE):
            if shared is not None:
                total = total + shared.float()
            return total.to(x.dtype)

    def _shared(self, x: Tensor, shared: SharedExpert | None) -> Tensor | None:
        return None if shared is None else self._expert(x, shared.w1, shared.w3, shared.w2)

    def _local_experts(self, tokens: Dispatched, experts: PackedExperts) -> Tensor:
        """For each token the float32 sum over the experts held here, `[T', H]`, in the order of its ids."""
        x, weights = tokens.x, tokens.topk_weights
        local = tokens.topk_ids.long() - experts.expert_start
        used = torch.unique(local[(local >= 0) & (local < experts.num_local)]).tolist()
        # One place per token and slot, so that an id named twice needs no atomic addition.
        outputs = x.new_zeros(*local.shape, x.shape[-1])
        for expert in used:
            rows, slots = (local == expert).nonzero(as_tuple=True)
            with self._clock.stage(Stage.FP4_DECODING):
                w1, w3 = decode_mxfp4(experts.w13[expert], experts.w13_scale[expert], x.dtype)
                w2 = decode_mxfp4(experts.w2[expert], experts.w2_scale[expert], x.dtype)
            outputs[rows, slots] = self._expert(x[rows], w1, w3, w2, weights[rows, slots, None])
        with self._clock.stage(Stage.COMBINE):
            return outputs.sum(1, dtype=torch.float32)

    def _expert(self, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """One expert on `[n, H]` rows with weights `[n, 1]`; every product is rounded to x's dtype."""
        quantization, limit = self._problem.activation_quantization, self._problem.swiglu_limit
        gate = quantized_linear(x, w1, quantization).float().clamp(max=limit)
        up = quantized_linear(x, w3, quantization).float().clamp(-limit, limit)
        return quantized_linear((F.silu(gate) * up * weight).to(x.dtype), w2, quantization)


def choose_experts(x: Tensor, gate: Tensor, bias: Tensor, topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The gate, see `MoeOperator.route`.

    Args:
        x: `[T, H]`.
        gate: `[num_experts, H]`.
        bias: float32 `[num_experts]`.
        topk: k.
        scaling: factor on the normalised weights.
    """
    scores = F.softplus(F.linear(x.float(), gate.float())).sqrt()
    ranked = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    ids = ranked[:, :topk].sort(dim=-1).values
    chosen = scores.gather(-1, ids)
    return ids.int(), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def build(context: BuildContext) -> NaiveMoe:
    """Build `naive`."""
    return NaiveMoe(context.problem, context.clock)
