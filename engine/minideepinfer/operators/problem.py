"""What `supports` sees: the facts of one operator call that do not change from step to step.

Problems are frozen and hashable; two layers with equal problems and options share one built operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from minideepinfer.operators.declaration import Phase


@dataclass(frozen=True)
class Problem:
    """The facts every family shares.

    Attributes:
        phase: which rows will be given.
        device: torch device type, `cpu` or `cuda`.
        capability: CUDA compute capability, None on CPU.
        dtype: compute dtype, `float32` or `bfloat16`.
        kv_quantization: `released` if cached values are quantise-dequantised (spec 3.11), else `none`.
        activation_quantization: `released` if inputs of FP8 / FP4 products are, else `none`.
    """

    phase: Phase
    device: str
    capability: tuple[int, int] | None
    dtype: str
    kv_quantization: str
    activation_quantization: str


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """Attention of one layer.

    Attributes:
        num_heads: query heads (they share one latent key = value).
        head_dim: width of the latent.
        rope_dim: its last channels that are rotated.
        sliding_window: window entries a query sees, itself included.
        compress_ratio: tokens per global entry; 0 = the layer has no global path.
        index_topk: most selected entries per row.
        page_tokens: tokens per page of the global pool.
        cache_layout: layout of window rings and global pool: `float32`, `bf16` or `released`.
        selection_layout: layout of `Selection`, e.g. `token_indices/1`.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    sliding_window: int
    compress_ratio: int
    index_topk: int
    page_tokens: int
    cache_layout: str
    selection_layout: str


@dataclass(frozen=True)
class IndexerProblem(Problem):
    """Selection in one index-source layer.

    Attributes:
        num_heads: index heads.
        head_dim: width of index queries and keys.
        compress_ratio: tokens per entry, >= 1.
        topk: entries to select per row.
        emits_candidates: the layer is the candidate source.
        uses_candidates: only entries of the candidate blocks given may be selected.
        candidate_topk_blocks: most candidate blocks per row.
        candidate_block_size: entries per candidate block.
        page_tokens: tokens per page of the key pool.
        cache_layout: layout of the key pool.
        selection_layout: layout of the `Selection` wanted.
    """

    num_heads: int
    head_dim: int
    compress_ratio: int
    topk: int
    emits_candidates: bool
    uses_candidates: bool
    candidate_topk_blocks: int
    candidate_block_size: int
    page_tokens: int
    cache_layout: str
    selection_layout: str


@dataclass(frozen=True)
class MoeProblem(Problem):
    """Mixture of experts of one layer.

    Attributes:
        hidden_size: width of a token.
        intermediate_size: width inside an expert.
        num_experts: routed experts of the model.
        num_local_experts: routed experts of this rank.
        topk: routed experts per token.
        num_shared_experts: 0 or 1.
        routed_scaling: factor on the normalised routing weights.
        swiglu_limit: clamp of gate (above) and up (both sides).
        world_size: ranks among which the experts are shared.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_local_experts: int
    topk: int
    num_shared_experts: int
    routed_scaling: float
    swiglu_limit: float
    world_size: int


@dataclass(frozen=True)
class CommProblem(Problem):
    """Communication between the ranks of the engine.

    Attributes:
        hidden_size: width of a token.
        num_experts: routed experts of the model.
        world_size: ranks.
    """

    hidden_size: int
    num_experts: int
    world_size: int


@dataclass(frozen=True)
class ResidualProblem(Problem):
    """The residual streams of the model.

    Attributes:
        num_streams: parallel streams.
        hidden_size: width of a stream.
        sinkhorn_iterations: pairs of row and column steps; the first row step is the softmax.
        rms_norm_eps: added to mean squares, of the streams and of what is normalised.
        hc_eps: added to `pre`, to the softmax, and to the sums that are divided by.
    """

    num_streams: int
    hidden_size: int
    sinkhorn_iterations: int
    rms_norm_eps: float
    hc_eps: float


@dataclass(frozen=True)
class EpilogueProblem(Problem):
    """What follows dense products, everywhere in the model.

    Attributes:
        widths: every number of channels that is asked for, ascending.
        rope_dim: channels that are rotated, where any are.
        rms_norm_eps: added to mean squares.
    """

    widths: tuple[int, ...]
    rope_dim: int
    rms_norm_eps: float
