"""A part of `two_gpus_parts.py`: the fixed benchmark's step on all ranks, and on each with the others made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from minideepinfer.cli.bench_steps import CONFIGS
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.measure.made_up_ranks import MadeUpRanks
from minideepinfer.measure.prefill import PRESETS, PrefillBench, PrefillProblem, measure_prefill
from minideepinfer.measure.rates import measured_rates
from minideepinfer.measure.record import Record
from minideepinfer.operators import Stage
from minideepinfer.runtime.world import World
from two_gpus_bench import OPERATORS, Bench
from two_gpus_model import seven_layers

FEW_EXPERTS = 16
MADE_UP_WORLD = 32
"""Ranks of a world in which a rank has few experts."""


class Run(NamedTuple):
    """One measurement; without a comm operator there is no network."""

    comm: str
    tokens: int
    replay: str = "full"

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.comm or 'no network'}, {self.tokens} tokens a rank, {self.replay}"


def _runs(tokens: Sequence[int]) -> list[Run]:
    """What is wanted most first."""
    most = max(tokens)
    runs = [Run("collective", most), Run("", most)]
    runs += [Run(comm, fewer) for fewer in sorted(tokens)[:-1] for comm in ("collective", "")]
    runs += [Run("all_to_all", each) for each in sorted(tokens, reverse=True)]
    return [*runs, Run("collective", most, "bounded"), Run("", most, "bounded")]


class Connected:
    """A `World` whose process group exists already."""

    def __init__(self, ranks: World) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def connect(self, device: torch.device) -> None:
        """Nothing is left to do."""


def _model(bench: Bench) -> ModelConfig:
    name = CONFIGS["v41-rank" if bench.cuda else "tiny"]
    return ModelConfig.from_file(Path(str(resources.files("minideepinfer") / "data" / name)))


def _problem(bench: Bench, ranks: int) -> PrefillProblem:
    """The fixed benchmark in as many layers as fit; each rank holds as many Engram rows as one of the preset's."""
    preset = PRESETS["v41-rank" if bench.cuda else "tiny"]
    fraction = min(1.0, preset.engram_fraction * ranks / preset.world_size)
    return replace(preset, world_size=ranks, num_layers=bench.sizes.layers, engram_fraction=fraction, steps=4, warmup=1)


def fixed_step(bench: Bench) -> dict[str, Any]:
    """Steps with and without a network, by tokens a rank: records with stages, and what travels in a layer."""
    problem = _problem(bench, bench.world)
    engine = EngineConfig(device=bench.device.type, parallel={"expert": bench.world}, ops={"comm": OPERATORS[0]})
    world = Connected(bench.ranks)
    one = PrefillBench(_model(bench), engine, problem, world)
    tokens = bench.sizes.tokens if bench.cuda else (problem.new_tokens // 4, problem.new_tokens)
    rates, records, layers = measured_rates(bench.device), [], {}
    for run in _runs(tokens):
        made_up = None if run.comm else _others(bench, one, problem)
        one.rank.world, one.rank.others = World() if made_up else world, made_up
        plan = engine.model_copy(update={"replay": run.replay, "ops": {"comm": run.comm or OPERATORS[0]}})
        changed = replace(problem, new_tokens=run.tokens)
        one.change(plan, changed)
        bench.everywhere(True)
        record = measure_prefill(_model(bench), plan, changed, name=run.name, rates=rates, bench=one)
        records.append(record.model_dump(mode="json"))
        layers[run.name] = _a_layer(record) | (_travelling(bench, one, run) if run.comm else {})
        bench.keep({"records": records, "a layer": layers})
    return {"records": records, "a layer": layers}


def _others(bench: Bench, one: PrefillBench, problem: PrefillProblem) -> MadeUpRanks:
    row = one.model.blocks[0].weights.attention.wq_a
    return MadeUpRanks(bench.world, problem.new_tokens, row, one.rank.clock)


def _a_layer(record: Record) -> dict[str, float]:
    """Milliseconds of a layer, Engram's rows in them."""
    layers: int = record.problem["layers"]
    found = {"ms": record.values["step"].median / layers}
    if exposed := record.stages.get(Stage.COMMUNICATION):
        found["ms exposed"] = exposed / layers
    if "communication_hidden" in record.values:
        found["ms hidden"] = record.values["communication_hidden"].median / layers
    return found


def _travelling(bench: Bench, one: PrefillBench, run: Run) -> dict[str, Any]:
    """Bytes that this rank sends in a step, counted; and by the formulas of the operators' docstrings."""
    comm, text = one.model.comm, one.rank.config
    one.renew()
    before = comm.sent_bytes
    one.step()
    found: dict[str, Any] = {
        "bytes a step": comm.sent_bytes - before,
        "bytes of Engram by formula": _engram(bench, one),
    }
    if run.comm == "collective" and run.replay == "full":
        row = text.hidden_size * bench.dtype.itemsize + 8 * text.num_experts_per_tok + text.hidden_size * 4
        found["bytes of tokens by formula"] = len(one.model.blocks) * (bench.world - 1) * run.tokens * row
    return found


def _engram(bench: Bench, one: PrefillBench) -> int:
    """What `rows.fetch_rows` says: ids to the owners, their numbers, and rows to those who ask here."""
    step, total = one.new_step(), 0
    for block in one.model.blocks:
        if (weights := block.weights.engram) is not None:
            owners = step.engram_rows_of(block.layer).unique() // weights.rows_per_rank
            asked = bench.ranks.exchange(owners.bincount(minlength=bench.world).tolist())
            others = [rank for rank in range(bench.world) if rank != bench.rank]
            answer = weights.table.shape[1] + weights.table_scale.shape[1]
            total += sum(8 + 8 * asked[bench.rank][rank] + answer * asked[rank][bench.rank] for rank in others)
    return total


def warm(bench: Bench) -> dict[str, Any]:
    """Compile what `fixed_step` will run; what is compiled stays on disk.

    There is room for few layers and experts beside other parts. So one device runs the steps with few experts in all,
    and the other one, for the kernels of experts, all but few of them here: as a rank of many, which have as many rows.
    """
    many = bench.cuda and bench.device.index
    problem = _problem(bench, MADE_UP_WORLD if many else 2)
    problem = replace(problem, num_layers=None, engram_fraction=1 / 64)
    shrink = MADE_UP_WORLD // 2 if many else 1
    config = seven_layers(bench.sizes.experts if many else FEW_EXPERTS) if bench.cuda else _model(bench)
    one = PrefillBench(config, EngineConfig(device=str(bench.device)), problem)
    tokens = [each // shrink for each in bench.sizes.tokens] if bench.cuda else [problem.new_tokens]
    for each in sorted(tokens, reverse=True):
        for replay in ("full", "bounded"):
            one.problem = replace(problem, new_tokens=each)
            one.rank.set_replay(replay)
            one.renew()
            one.step()
            one.rank.synchronize()
            print(f"{each} tokens, {replay}", flush=True)
    return {"tokens": tokens}
