"""Whole runs of a golden sequence: one prefill, prefill and decode, bounded replay."""

from __future__ import annotations

from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.request import LogitsKind
from minideepinfer.runtime.runner import Runner
from minideepinfer.testing.golden_bounds import Variant, end_to_end_bound
from minideepinfer.testing.golden_compare import Comparison
from minideepinfer.testing.golden_measures import Cell
from minideepinfer.testing.golden_runs import run_sequence
from minideepinfer.testing.golden_set import GoldenRun

_CAPTURED = (
    "layers.*.streams_out",
    "layers.*.attn.out",
    "layers.*.index.topk",
    "layers.*.index.candidates",
    "layers.*.ffn.expert_*",
    "final.normed",
)


def compare_end_to_end(runner: Runner, golden: GoldenRun, variant: Variant) -> list[Cell]:
    """Run a sequence as one prefill and, where errors don't snowball, as prefill and decode.

    Args:
        runner: the variant's model.
        golden: the sequence's outputs in that run.
        variant: the run.
    """
    length = len(golden.sequence.token_ids)
    prompt = length - length // 2
    cells = _compare(runner, golden, variant, "prefill", [length])
    if variant.exact and prompt < length:
        cells += _compare(runner, golden, variant, "prefill+decode", [prompt] + [1] * (length - prompt))
    return cells


def compare_bounded(runner: Runner, golden: GoldenRun, variant: Variant) -> list[Cell]:
    """Run a sequence in bounded replay: its prompt, then a token a step.

    Args:
        runner: the variant's model, with `replay: bounded`.
        golden: the sequence's outputs in that run in bounded replay.
        variant: the run.
    """
    assert golden.sequence.bounded is not None
    prompt, length = golden.sequence.bounded.prompt, len(golden.sequence.token_ids)
    return _compare(runner, golden, variant, "bounded", [prompt] + [1] * (length - prompt))


def _compare(runner: Runner, golden: GoldenRun, variant: Variant, part: str, chunks: list[int]) -> list[Cell]:
    config = runner.config.text_config

    def bound(module: str, measure: str, layer: int | None) -> float | None:
        return end_to_end_bound(variant, part, measure)

    comparison = Comparison(golden, variant, part, config, bound)
    capture = Capture(_CAPTURED)
    kept: LogitsKind = "kept" if part == "bounded" else "all"
    comparison.logits(run_sequence(runner, golden.sequence.token_ids, chunks, capture, prompt=chunks[0], logits=kept))
    own = capture.of(0)
    for name, value in own.items():
        if name == "final.normed":
            comparison.values("norm", name, value)
        elif name.endswith("streams_out"):
            comparison.values("streams", name, value)
        elif name.endswith("attn.out"):
            comparison.values("attention", name, value)
    for layer in config.layers:
        prefix = f"layers.{layer.layer_id}"
        if layer.is_index_source:
            comparison.selection(f"{prefix}.index.topk", own[f"{prefix}.index.topk"], layer)
        if layer.is_candidate_source:
            comparison.candidates(f"{prefix}.index.candidates", own[f"{prefix}.index.candidates"], layer)
        comparison.routing(f"{prefix}.ffn", own[f"{prefix}.ffn.expert_ids"], own[f"{prefix}.ffn.expert_weights"])
    return comparison.cells
