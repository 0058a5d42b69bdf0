"""Family `moe`: routing, packed FP4 experts, the shared expert, and their combination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from minideepinfer.operators.batch import Batch
from minideepinfer.operators.comm import TokenExchange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The routed experts of one rank in MXFP4, as released (spec 2.2). E local experts, I inner, H hidden.

    Byte k of a row holds column 2k in its low and column 2k + 1 in its high nibble; one E8M0 exponent byte for every
    32 logical columns of a row. An odd number of 32-blocks is legal.

    Attributes:
        w13: uint8 `[E, 2, I, H / 2]`; `w13[:, 0]` is w1 (gate), `w13[:, 1]` is w3 (up).
        w13_scale: uint8 `[E, 2, I, H / 32]`.
        w2: uint8 `[E, H, I / 2]`.
        w2_scale: uint8 `[E, H, I / 32]`.
        expert_start: global id of local expert 0.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    expert_start: int = 0

    @property
    def num_local(self) -> int:
        """E, the experts held here."""
        return int(self.w13.shape[0])


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The expert every token visits, decoded to the compute dtype.

    Attributes:
        w1: `[I, H]` gate projection.
        w3: `[I, H]` up projection.
        w2: `[H, I]` down projection.
    """

    w1: Tensor
    w3: Tensor
    w2: Tensor


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """All weights of one MoE layer.

    Attributes:
        gate: bf16 `[num_experts, H]`, as stored (it is multiplied in float32).
        gate_bias: float32 `[num_experts]`; it selects, it never weighs.
        experts: this rank's routed experts.
        shared: the shared expert, None if the model has none (or a test leaves it out).
    """

    gate: Tensor
    gate_bias: Tensor
    experts: PackedExperts
    shared: SharedExpert | None


class MoeOperator(Protocol):
    """A built MoE operator (spec 3.10). Axes: T rows, H hidden, k experts per token."""

    def transform_weights(self, weights: MoeWeights) -> Any:
        """Bring one layer's weights into the form `run` wants, once, at build time; may return them as they are.

        The result must serve both phases: where they have the same operator and options, they share it.
        """
        ...

    def prepare(self, batches: tuple[Batch, ...]) -> Any:
        """Turn a step's batches (decode rows first) into launch metadata."""
        ...

    def route(self, x: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
        """Choose experts.

        Logits and scores are float32 on the stored gate weight; `score = sqrt(softplus(logit))`; the k largest
        `score + bias` are chosen, the lower id first among equals; weights are `score / (sum + 1e-20) * scaling`.

        Args:
            x: `[T, H]` compute dtype.
            weights: what `transform_weights` returned.

        Returns:
            `topk_ids` int32 `[T, k]` ascending in a row and `topk_weights` float32 `[T, k]`.
        """
        ...

    def run(
        self, x: Tensor, weights: Any, comm: TokenExchange, metadata: Any, routing: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Gate, dispatch, local experts, combine, shared expert.

        Expert e: `a = min(w1 x, limit)`, `b = clamp(w3 x, -limit, limit)` in float32 on compute-dtype products;
        `r = silu(a) * b * weight` rounded to the compute dtype; `y = w2 r`. The k outputs and the shared one (same
        formula, weight 1) are summed in float32 and rounded once. Duplicated ids in a row count twice.

        Args:
            x: `[T, H]` compute dtype. Rows none of whose experts is local are never read by the routed part.
            weights: what `transform_weights` returned.
            comm: moves tokens between ranks; `dispatch` and `combine` are called once each, in this order.
            metadata: what `prepare` returned for this step.
            routing: `(topk_ids, topk_weights)` as `route` returns them; the gate is then skipped. An id of -1 means
                no expert.

        Returns:
            `[T, H]` in x's dtype. Experts without a token are left alone; T = 0 gives `[0, H]`.
        """
        ...
