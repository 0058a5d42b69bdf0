"""How clear a model's discrete choices were, and what a choice that falls otherwise can change.

Two runs of one sequence differ by the order of their sums. Where scores at a cut lie closer than that noise, the runs
may choose differently, and then differ in earnest, in this row and in the rows that read it. Both halves are derived
from the captured intermediates of a run, so a test can say which rows of two runs must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minideepinfer.config import LayerSchedule, TextConfig
from minideepinfer.model.weights import LayerWeights
from minideepinfer.testing.bounds import index_scores
from minideepinfer.testing.recipes.indexer import IndexerCase

CLEAR_MARGIN = 1e-5
"""Choices whose scores at the cut are further apart than this fall the same way in every float32 run."""

CHOICES = ("layers.*.index.topk", "layers.*.index.candidates", "layers.*.ffn.expert_ids")
"""What `trace_choices` needs captured."""

SCORED = ("layers.*.index.query", "layers.*.index.head_weights", "layers.*.index.keys", "layers.*.ffn.in", CHOICES[1])
"""What `choice_margins` needs captured."""


def choice_margins(
    captured: Mapping[str, Tensor], config: TextConfig, weights: Sequence[LayerWeights]
) -> dict[str, Tensor]:
    """Score gaps at the cut, named as in golden sets.

    Args:
        captured: `SCORED` of one request from its first token on; rows of a layer end at the request's last token.
        config: the model's facts.
        weights: per layer, for the gates.

    Returns:
        `layers.L.index.topk_margin` on index sources, `layers.L.index.candidate_margin` on the candidate source and
        `layers.L.ffn.route_margin` everywhere: float64 `[rows]`, inf where nothing is cut off.
    """
    margins = {}
    num_tokens = len(captured["layers.0.ffn.in"])
    for layer, layer_weights in zip(config.layers, weights, strict=True):
        name = f"layers.{layer.layer_id}"
        if f"{name}.ffn.in" not in captured:  # bounded replay: no row of the request came so far
            continue
        if layer.is_index_source:
            scores, visible = _index_scores(captured, layer, num_tokens)
            if layer.is_candidate_source:
                best = _block_scores(scores, visible, config.candidate_block_size)
                margins[f"{name}.index.candidate_margin"] = _gap(best, config.candidate_topk_blocks)
            if layer.uses_candidates:
                blocks = captured[f"layers.{config.candidate_source_layer_id}.index.candidates"]
                scores = _restrict(scores, blocks, config.candidate_block_size)
            margins[f"{name}.index.topk_margin"] = _gap(scores, config.index_topk)
        assert layer_weights.moe is not None, "the runner was not asked to keep weights"
        gate, bias = layer_weights.moe.gate.cpu().double(), layer_weights.moe.gate_bias.cpu().double()
        affinity = F.softplus(captured[f"{name}.ffn.in"].double() @ gate.T).sqrt() + bias
        margins[f"{name}.ffn.route_margin"] = _gap(affinity, config.num_experts_per_tok)
    return margins


def _index_scores(captured: Mapping[str, Tensor], layer: LayerSchedule, num_tokens: int) -> tuple[Tensor, Tensor]:
    """float64 `[rows, entries]`, -inf where a row does not see an entry; and visible entries int64 `[rows]`."""
    query = captured[f"layers.{layer.layer_id}.index.query"].double()
    weights = captured[f"layers.{layer.layer_id}.index.head_weights"].double()
    keys = captured[f"layers.{layer.kv_source}.index.keys"].double()
    scores = torch.einsum("thd,ed->the", query, keys).relu_().mul_(weights.unsqueeze(-1)).sum(1)
    visible = (torch.arange(num_tokens - len(query), num_tokens) + 1) // layer.compress_ratio
    return scores.masked_fill(torch.arange(len(keys)) >= visible.unsqueeze(1), -torch.inf), visible


def _block_scores(scores: Tensor, visible: Tensor, size: int) -> Tensor:
    """Each block's best score `[rows, blocks]`, that of the newest visible block inf."""
    best: Tensor = F.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size)).amax(-1)
    newest = (visible.unsqueeze(1) - 1).div(size, rounding_mode="floor")
    return best.masked_fill(torch.arange(best.shape[1]) == newest, torch.inf)


def _restrict(scores: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Scores with -inf outside the named blocks."""
    block_of = torch.arange(scores.shape[1]) // size
    named = (blocks.unsqueeze(-1) == block_of).any(1)
    return scores.masked_fill(~named, -torch.inf)


def _gap(scores: Tensor, count: int) -> Tensor:
    """Between the last score that is taken and the first that is not, inf if nothing is left out."""
    if scores.shape[1] <= count:
        return torch.full(scores.shape[:1], torch.inf, dtype=scores.dtype)
    ranked = scores.sort(dim=1, descending=True).values
    taken, left = ranked[:, count - 1], ranked[:, count]
    return torch.where(left == -torch.inf, torch.inf, taken - left)


@dataclass(frozen=True, eq=False)
class ChoiceTrace:
    """Where two runs of a sequence chose differently, and what follows.

    Attributes:
        roots: per name of a margin, bool `[T]`: rows that chose otherwise although nothing that they depend on had. In
            runs that are equal up to noise each of these has a margin below `CLEAR_MARGIN`.
        affected: bool `[T]`, rows whose logits depend on any choice that fell otherwise. All other rows have made the
            same choices in everything that they depend on, and must agree.
    """

    roots: dict[str, Tensor]
    affected: Tensor


def trace_choices(one: Mapping[str, Tensor], other: Mapping[str, Tensor], config: TextConfig) -> ChoiceTrace:
    """Compare the choices of two full-replay runs, layer by layer.

    What reaches a row in a layer is what its own stream, the streams of its window, and the streams behind any global
    entry that it sees (selected or not: an entry also competes) held when the layer, or the entry's source, began.

    Args:
        one: `CHOICES` of one request; T rows in every layer.
        other: the same of another run.
        config: the model's facts.
    """
    affected = torch.zeros(len(one["layers.0.ffn.expert_ids"]), dtype=torch.bool)
    published: dict[int, Tensor] = {}
    roots = {}
    for layer in config.layers:
        name = f"layers.{layer.layer_id}"
        if layer.is_kv_source:
            published[layer.layer_id] = _ever(affected)
        affected = _recently(affected, config.sliding_window)
        if layer.kv_source is not None:
            affected = affected | published[layer.kv_source]
        for choice, margin in (
            ("index.topk", "index.topk_margin"),
            ("index.candidates", "index.candidate_margin"),
            ("ffn.expert_ids", "ffn.route_margin"),
        ):
            if f"{name}.{choice}" in one:
                differs = _differing(one[f"{name}.{choice}"], other[f"{name}.{choice}"])
                roots[f"{name}.{margin}"] = differs & ~affected
                affected = affected | differs
    return ChoiceTrace(roots, affected)


def _differing(one: Tensor, other: Tensor) -> Tensor:
    """Rows `[T]` whose sets of distinct numbers differ."""
    return (one.sort(dim=1).values != other.sort(dim=1).values).any(1)


def _ever(rows: Tensor) -> Tensor:
    """Rows at or behind a marked one."""
    return rows.cumsum(0) > 0


def _recently(rows: Tensor, window: int) -> Tensor:
    """Rows that have a marked one in their window."""
    marked = rows.cumsum(0)
    return marked > F.pad(marked, (window, 0))[: len(rows)]


def is_close(case: IndexerCase, row: int) -> bool:
    """Whether a row's cut of entries, or of candidate blocks, lies within `CLEAR_MARGIN` of a tie."""
    problem = case.problem
    scores, _ = index_scores(case, row)
    size = problem.candidate_block_size
    cuts = [(scores, problem.topk)]
    if case.candidates is not None:
        named = torch.isin(torch.arange(len(scores)) // size, case.candidates[row])
        cuts = [(scores[named], problem.topk)]
    if problem.emits_candidates and len(scores):
        padded = F.pad(scores, (0, -len(scores) % size), value=-torch.inf)
        cuts.append((padded.view(-1, size).amax(1)[:-1], problem.candidate_topk_blocks - 1))
    return any(_distance(values, count) < CLEAR_MARGIN for values, count in cuts)


def _distance(values: Tensor, count: int) -> float:
    if not 0 < count < len(values):
        return torch.inf
    ranked = values.sort(descending=True).values
    return float(ranked[count - 1] - ranked[count])
