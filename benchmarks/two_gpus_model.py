"""A part of `two_gpus_parts.py`: modules of a model on several ranks against one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.measure.prefill import PrefillBench, PrefillProblem
from minideepinfer.model.block import Block
from minideepinfer.model.rows import Rows
from minideepinfer.model.step import Step
from minideepinfer.operators import PackedExperts
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.scheduler import ScheduledRequest
from torch import Tensor
from two_gpus_bench import OPERATORS, Bench


def seven_layers(experts: int) -> ModelConfig:
    """The released widths in 7 layers that have every role: window, KV and index sources, candidate source, Engram."""
    raw = json.loads((resources.files("minideepinfer") / "data" / "config.full.json").read_text(encoding="utf-8"))
    text = raw["text_config"]
    text.update(
        compress_ratios=[0, 0, 2, 2, 1, 1, 1, *text["compress_ratios"][text["num_hidden_layers"] :]],
        num_hidden_layers=7,
        n_routed_experts=experts,
        kv_source_layer_ids=[2, 4],
        index_source_layer_ids=[2, 4, 5],
        candidate_source_layer_id=4,
        engram_layer_ids=[1],
        engram_num_embeddings=text["engram_num_embeddings"][:1],
        dspark_target_layer_ids=[1, 2, 3],
    )
    return ModelConfig.from_dict(raw)


def _model(bench: Bench) -> ModelConfig:
    if bench.cuda:
        return seven_layers(bench.sizes.experts)
    return ModelConfig.from_file(Path(str(resources.files("minideepinfer") / "data" / "config.tiny.json")))


def modules(bench: Bench) -> dict[str, Any]:
    """Engram and experts of every layer on several ranks, against all weights on one, on the same inputs.

    All else of a layer does not know of other ranks. How far whole models are apart is told, not judged: a difference
    of one rounding may turn a close choice of experts.
    """
    problem = PrefillProblem(
        context=1024 if bench.cuda else 96,
        new_tokens=_rows(bench),
        world_size=1,
        engram_fraction=1 / 64 if bench.cuda else 1.0,
    )
    one = PrefillBench(_model(bench), EngineConfig(device=str(bench.device)), problem)
    alone = [replace(block, comm=bench.comm("single")) for block in one.model.blocks]
    found: dict[str, Any] = {}
    shared_out = [_shared_out(bench, one, block) for block in alone]
    for name in OPERATORS:
        together = [replace(block, comm=bench.comm(name, one.rank.config.n_routed_experts)) for block in shared_out]
        for label, rows in _shapes(bench).items():
            found[f"{name}, {label}"] = _compared(bench, one, alone, together, rows[bench.rank % 2])
            bench.keep({"errors": found})
    worst = max(error for row in found.values() for error in row["experts"].values())
    return {"errors": found, "passed": worst < 2.0**-8 and all(row["engram rows equal"] for row in found.values())}


def _rows(bench: Bench) -> int:
    return 192 if bench.cuda else 24


def _shapes(bench: Bench) -> dict[str, tuple[int, int]]:
    rows = _rows(bench)
    return {"ragged": (rows, rows // 3), "rank 0 empty": (0, rows), "rank 1 empty": (rows // 2, 0)}


def _shared_out(bench: Bench, one: PrefillBench, block: Block) -> Block:
    """The block of one rank of several: its experts, its rows of tables."""
    made = one.rank._maker.moe(block.layer.layer_id)
    each = made.experts.num_local // bench.world
    part = slice(bench.rank * each, (bench.rank + 1) * each)
    tensors = (made.experts.w13, made.experts.w13_scale, made.experts.w2, made.experts.w2_scale)
    held = replace(made, experts=PackedExperts(*(tensor[part].clone() for tensor in tensors), expert_start=part.start))
    weights, engram = block.weights, block.weights.engram
    if engram is not None:
        per_rank = -(-len(engram.table) // bench.world)
        mine = slice(bench.rank * per_rank, (bench.rank + 1) * per_rank)
        engram = replace(engram, table=engram.table[mine], table_scale=engram.table_scale[mine], rows_per_rank=per_rank)
        weights = replace(weights, engram=engram)
    operator = next(iter(block.moe.values()))
    transformed = operator.transform_weights(held)
    return replace(block, weights=weights, moe_weights=dict.fromkeys(block.moe_weights, transformed))


def _compared(
    bench: Bench, one: PrefillBench, alone: Sequence[Block], together: Sequence[Block], rows: int
) -> dict[str, Any]:
    """Largest relative errors of any rank, by layer."""
    model, request = one.model, one._request
    captures = []
    for blocks in (alone, together):
        one.rewind()
        scheduled = [ScheduledRequest(request, rows)] if rows else []
        step, _ = one.rank.new_step(scheduled)
        step.counts, step.recorder = None, Capture(["layers.*.streams_out", "layers.*.ffn.in"])
        step.recorder.begin_step(range(len(scheduled)))
        model.blocks, model.comm = tuple(blocks), blocks[0].comm
        model.forward(step)
        captures.append(step.recorder)
    errors, drift, equal = {}, {}, True
    step, _ = one.rank.new_step([ScheduledRequest(request, rows)] if rows else [])
    step.counts = None
    step.meet(together[0].comm)
    others, _ = one.rank.new_step([ScheduledRequest(request, rows)] if rows else [])
    others.counts = None
    for first, second in zip(alone, together, strict=True):
        name, entering = first.name, step.rows_entering(first.layer)
        x = _captured(captures[0], f"{name}.ffn.in", one, entering, bench)
        a = first.experts(x, _after(first, others), others)
        b = second.experts(x, _after(second, step), step)
        errors[name] = bench.worst(_difference(b, a))
        both = [_captured(capture, f"{name}.streams_out", one, entering, bench) for capture in captures]
        drift[name] = bench.worst(_difference(both[1], both[0]))
        if first.weights.engram is not None:
            streams = torch.randn(entering.num_tokens, one.rank.config.hc_mult, one.rank.config.hidden_size)
            streams = streams.to(bench.device, bench.dtype)
            equal &= torch.equal(
                first.add_engram(streams, entering, others), second.add_engram(streams, entering, step)
            )
    return {
        "rows on rank 0": rows,
        "experts": errors,
        "whole model, not judged": drift,
        "engram rows equal": bench.everywhere(equal),
    }


def _after(block: Block, step: Step) -> Rows:
    """The rows that a layer's experts see."""
    return step.source if block.layer.is_candidate_source else step.rows_entering(block.layer)


def _captured(capture: Capture, name: str, one: PrefillBench, rows: Rows, bench: Bench) -> Tensor:
    """What the only request left under a name, on the device; nothing if there was none."""
    taken: Mapping[str, Tensor] = capture.of(0) if rows.num_tokens else {}
    if name in taken:
        return taken[name].to(bench.device)
    return torch.empty(0, one.rank.config.hidden_size, device=bench.device, dtype=bench.dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((found.float() - expected.float()).norm() / expected.float().norm())
