"""`fused`: routed rows sorted on the device, grouped products on packed experts, one combine (spec 3.10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from minideepinfer.operators import (
    Batch,
    BuildContext,
    MoeWeights,
    Stage,
    StageClock,
    TokenExchange,
)
from minideepinfer.operators.problem import MoeProblem
from torch import Tensor

from minideepinfer_moe.gate import gate_logits, select
from minideepinfer_moe.naive import choose_experts
from minideepinfer_moe.options import FusedOptions
from minideepinfer_moe.products import Products, choose, measure
from minideepinfer_moe.rows import combine, quantize, shared_expert
from minideepinfer_moe.schedule import Schedule, make_schedule


@dataclass(frozen=True, eq=False)
class FusedWeights:
    """One layer, as `run` wants it.

    Attributes:
        gate: `[num_experts, H]` in the compute dtype.
        gate_bias: float32 `[num_experts]`.
        products: what multiplies with the routed experts.
        experts: routed experts, as `products.pack` made them.
        num_local: how many they are.
        expert_start: global id of the first.
        shared_w13: `[2 I, H]` compute dtype, or None.
        shared_w2: `[H, I]` compute dtype, or None.
    """

    gate: Tensor
    gate_bias: Tensor
    products: Products
    experts: Any
    num_local: int
    expert_start: int
    shared_w13: Tensor | None
    shared_w2: Tensor | None


class FusedMoe:
    """See `MoeOperator`. `run` speaks to the device only through launches; sizes follow from T * k.

    Attributes:
        form: of the products of the layer whose weights were transformed last.
    """

    def __init__(self, problem: MoeProblem, options: FusedOptions, clock: StageClock) -> None:
        self._problem = problem
        self._options = options
        self._clock = clock
        self._quantize = problem.activation_quantization == "released"
        self.fuses = {Stage.FP4_DECODING: Stage.GROUPED_GEMM}
        self.form = ""

    def transform_weights(self, weights: MoeWeights) -> FusedWeights:
        """Choose the layer's products, reorder its packed experts, stack the shared expert's first two matrices."""
        shared, products = weights.shared, choose(self._problem, measure(weights.experts))
        self.form = products.form
        return FusedWeights(
            weights.gate.float() if self._problem.dtype == "float32" else weights.gate,
            weights.gate_bias,
            products,
            products.pack(weights.experts),
            weights.experts.num_local,
            weights.experts.expert_start,
            None if shared is None else torch.cat((shared.w1, shared.w3)),
            None if shared is None else shared.w2,
        )

    def prepare(self, batches: tuple[Batch, ...]) -> None:
        """Nothing to prepare: the schedule is made on the device."""

    def route(self, x: Tensor, weights: FusedWeights) -> tuple[Tensor, Tensor]:
        """See `MoeOperator.route`."""
        if self._options.gate == "torch":
            problem = self._problem
            return choose_experts(x, weights.gate, weights.gate_bias, problem.topk, problem.routed_scaling)
        logits = gate_logits(x, weights.gate)
        return select(logits, weights.gate_bias, self._problem.topk, self._problem.routed_scaling)

    def run(
        self,
        x: Tensor,
        weights: FusedWeights,
        comm: TokenExchange,
        metadata: None,
        routing: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `MoeOperator.run`. The shared expert runs while tokens travel, or else joins the combine's sum."""
        if routing is None:
            with self._clock.stage(Stage.GATE):
                routing = self.route(x, weights)
        if self._quantize:
            x = quantize(x.contiguous())
        if comm.world_size == 1:
            return self._routed(x, routing, weights, self._shared(x, weights), x.dtype)
        arriving = comm.dispatch(x, *routing)
        shared = self._shared(x, weights)
        tokens = arriving.wait()
        partial = self._routed(tokens.x, (tokens.topk_ids, tokens.topk_weights), weights, None, torch.float32)
        total = comm.combine(partial, tokens.handle).wait()
        with self._clock.stage(Stage.COMBINE):
            return total.to(x.dtype) if shared is None else torch.add(total, shared, out=torch.empty_like(shared))

    def schedule(self, routing: tuple[Tensor, Tensor], weights: FusedWeights, dtype: torch.dtype) -> Schedule:
        """The rows to compute here for one step's routing, T at least 1."""
        tile_rows = weights.products.tile_rows(routing[0].numel(), self._problem.num_experts, dtype)
        return make_schedule(*routing, weights.expert_start, weights.num_local, tile_rows)

    def _shared(self, x: Tensor, weights: FusedWeights) -> Tensor | None:
        if weights.shared_w13 is None or weights.shared_w2 is None or not len(x):
            return None
        with self._clock.stage(Stage.SHARED_EXPERT):
            return shared_expert(x, weights.shared_w13, weights.shared_w2, self._problem.swiglu_limit, self._quantize)

    def _routed(
        self,
        x: Tensor,
        routing: tuple[Tensor, Tensor],
        weights: FusedWeights,
        shared: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """For each token the sum over the experts held here, and the shared one's output if given, `[T', H]`."""
        if not len(x):
            return x.new_empty(x.shape, dtype=dtype)
        limit, products, packed = self._problem.swiglu_limit, weights.products, weights.experts
        with self._clock.stage(Stage.GROUPED_GEMM):
            schedule = self.schedule(routing, weights, x.dtype)
            r = products.gate_up(x.contiguous(), packed, schedule, schedule.row_weights, limit, self._quantize)
            y = products.down(r, packed, schedule)
        with self._clock.stage(Stage.COMBINE):
            return combine(y, schedule, shared, dtype)


def build(context: BuildContext) -> FusedMoe:
    """Build `fused`."""
    options = context.options if isinstance(context.options, FusedOptions) else FusedOptions()
    return FusedMoe(context.problem, options, context.clock)
