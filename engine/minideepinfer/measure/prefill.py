"""The fixed prefill benchmark: one rank of an expert-parallel world at the end of a long context.

Every step rewinds to the same position and computes the same final chunk, so that steps can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.cache.layouts import cache_layout
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.made_up_ranks import MadeUpRanks
from minideepinfer.measure.stages import StageRow, StageTimer
from minideepinfer.measure.synthetic import Share, SyntheticWeights
from minideepinfer.model.engram_hash import EngramHash
from minideepinfer.model.transformer import TextModel
from minideepinfer.operators import MoeProblem, NoClock, StageClock
from minideepinfer.operators.build import OperatorBuilder
from minideepinfer.operators.plan import Plan
from minideepinfer.operators.registry import load_registry
from minideepinfer.operators.resolve import resolve
from minideepinfer.quantization import qdq_fp8, qdq_mxfp4, qdq_nvfp4
from minideepinfer.runtime.assembly import assemble
from minideepinfer.runtime.batching import build_step, make_parts, wanted_rows
from minideepinfer.runtime.problems import (
    device_capability,
    layer_problems,
    resolve_cache_layout,
    resolve_device,
    resolve_dtype,
)
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest


@dataclass(frozen=True)
class PrefillProblem:
    """What is measured.

    Attributes:
        context: tokens behind the step.
        new_tokens: of them, computed in each step; the others are cached.
        world_size: ranks of the world of which one is measured.
        engram_fraction: share of this rank's Engram rows that is held.
        num_layers: first layers of the model that run; None = all.
        steps: measured steps.
        warmup: steps before them.
        seed: of weights, tokens and cache.
    """

    context: int
    new_tokens: int
    world_size: int
    engram_fraction: float
    num_layers: int | None = None
    steps: int = 10
    warmup: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that leave nothing to measure."""
        for name, number in (("num_layers", self.num_layers), ("steps", self.steps), ("warmup", self.warmup)):
            if number is not None and number < 1:
                raise ConfigError(f"prefill benchmark: {name} is {number}; at least 1 is needed")


PRESETS = {
    "v41-rank": PrefillProblem(context=131072, new_tokens=4096, world_size=4, engram_fraction=1 / 8),
    "tiny": PrefillProblem(context=192, new_tokens=64, world_size=2, engram_fraction=1.0, steps=3, warmup=1),
}


@dataclass(frozen=True)
class PrefillResult:
    """What was measured.

    Attributes:
        milliseconds: of each step, in order.
        stages: exclusive time and calls of each stage in one step, averaged over steps of their own.
        staged_milliseconds: the mean step while stages were timed; what timing costs shows in it.
        rows_per_expert: fewest, mean and most rows of this rank's experts, over all layers of a step.
        peak_bytes: of device memory; 0 on CPU.
    """

    milliseconds: tuple[float, ...]
    stages: tuple[StageRow, ...]
    staged_milliseconds: float
    rows_per_expert: tuple[int, float, int]
    peak_bytes: int


class PrefillBench:
    """A rank with random weights and a random cache, ready to repeat its step."""

    def __init__(self, model_config: ModelConfig, engine_config: EngineConfig, problem: PrefillProblem) -> None:
        """Make weights and cache, and route the rows of the other ranks.

        Raises:
            ConfigError: layers, ranks or device do not fit the model or the machine.
            OperatorError: a chosen operator cannot serve the rank's problem.
        """
        text = model_config.text_config
        if text.n_routed_experts % problem.world_size:
            raise ConfigError(f"{text.n_routed_experts} experts cannot be shared by {problem.world_size} ranks evenly")
        if (problem.num_layers or 0) > text.num_hidden_layers:
            raise ConfigError(
                f"prefill benchmark: num_layers is {problem.num_layers}; the model has {text.num_hidden_layers}"
            )
        self.problem, self.config = problem, text
        self.device = resolve_device(engine_config)
        self.dtype_name = resolve_dtype(engine_config, self.device.type)
        pages = -(-problem.context // engine_config.cache.page_tokens)
        self.engine_config = engine_config.model_copy(
            update={"cache": engine_config.cache.model_copy(update={"num_pages": pages, "max_requests": 1})}
        )
        self._clock = _SwitchedClock()
        self._hash = EngramHash(model_config, None, self.device)
        self._make(model_config)
        ids = torch.randint(text.vocab_size, (problem.context,), generator=torch.Generator().manual_seed(problem.seed))
        self._request = Request(0, ids.tolist(), problem.context, problem.context, ring=0, pages=list(range(pages)))
        self._kept = [tensor.clone() for tensor in self._overwritten()]
        self.rewind()

    def _make(self, model_config: ModelConfig) -> None:
        problem, text = self.problem, self.config
        dtype = getattr(torch, self.dtype_name)
        share = Share(
            num_layers=problem.num_layers or text.num_hidden_layers,
            num_experts=text.n_routed_experts // problem.world_size,
            engram_rows=int(max(text.engram_num_embeddings) / problem.world_size * problem.engram_fraction),
        )
        self.plan = rank_plan(model_config, self.engine_config, problem.world_size, self.device)
        maker = SyntheticWeights(text, share, dtype, self.device, problem.seed)
        layout = cache_layout(resolve_cache_layout(self.engine_config, self.dtype_name))
        self.cache = KVCache(text, self.engine_config.cache, layout, self.device)
        fill_cache(self.cache, self.engine_config, maker)
        strangers = maker.normal((problem.world_size - 1) * problem.new_tokens, text.hidden_size)
        self.ranks = MadeUpRanks(problem.world_size, strangers)
        builder = OperatorBuilder(self.device, self._clock)
        weights = maker.make()
        self.model = assemble(text, self.engine_config, weights, self.cache, self.plan, builder, dtype, self.ranks)
        self._route_strangers(self.model)

    def _route_strangers(self, model: TextModel) -> None:
        routing = []
        with torch.inference_mode():
            for block in model.blocks:
                phase = next(iter(block.moe))
                routing.append(block.moe[phase].route(self.ranks.strangers, block.moe_weights[phase]))
        self.ranks.set_routing(routing)

    def rewind(self) -> None:
        """Undo a step: window rings and pending pairs are as they were; entries in pages will be written again."""
        self._request.num_computed_tokens = self.problem.context - self.problem.new_tokens
        self.ranks.reset()
        for now, before in zip(self._overwritten(), self._kept, strict=True):
            now.copy_(before)

    def _overwritten(self) -> list[torch.Tensor]:
        return [*self.cache.window, *self.cache.pending.values()]

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Compute the chunk once, behind a `rewind`; logits of its last row, `[1, vocab]`."""
        scheduled = ScheduledRequest(self._request, self.problem.new_tokens)
        parts = make_parts([scheduled], self.config, self.engine_config.replay)
        step = build_step(parts, self.config, self._hash, self.engine_config.cache.page_tokens, self.device)
        step.clock = self._clock
        return self.model.logits(self.model.forward(step), step, wanted_rows(parts).to(self.device))

    def run(self, progress: Callable[[str], None] = lambda what: None) -> PrefillResult:
        """Warm up, measure steps, then measure stages in steps of their own."""
        problem, cuda = self.problem, self.device.type == "cuda"
        progress("warming up")
        for _ in range(problem.warmup):
            self.rewind()
            logits = self.step()
        if not bool(logits.isfinite().all()):
            raise ConfigError("the benchmark's logits are not finite; an operator of the plan is wrong")
        progress("measuring steps")
        milliseconds = tuple(self._timed_step() for _ in range(problem.steps))
        progress("measuring stages")
        timer = StageTimer(self.device)
        self._clock.target = timer
        staged = [self._timed_step() for _ in range(problem.warmup)]
        self._clock.target = NoClock()
        count = len(staged)
        rows = [replace(r, milliseconds=r.milliseconds / count, calls=r.calls // count) for r in timer.table()]
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        return PrefillResult(milliseconds, tuple(rows), sum(staged) / len(staged), self._rows_per_expert(), peak)

    def _timed_step(self) -> float:
        self.rewind()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - begin)

    def _rows_per_expert(self) -> tuple[int, float, int]:
        """Of the layers that ran on all rows."""
        most = max(len(ids) for ids in self.ranks.dispatched_ids)
        local = self.config.n_routed_experts // self.problem.world_size
        counts = torch.stack(
            [
                torch.bincount(ids.flatten().long(), minlength=self.config.n_routed_experts)[:local]
                for ids in self.ranks.dispatched_ids
                if len(ids) == most
            ]
        )
        return int(counts.min()), float(counts.float().mean()), int(counts.max())


class _SwitchedClock:
    """A `StageClock` whose target can be changed after operators were built with it."""

    def __init__(self) -> None:
        self.target: StageClock = NoClock()

    def stage(self, name: str) -> Any:
        return self.target.stage(name)


def rank_plan(model_config: ModelConfig, engine_config: EngineConfig, world_size: int, device: torch.device) -> Plan:
    """The plan of one rank of a world: its MoE problems hold only the rank's share of the experts."""
    problems = layer_problems(model_config, engine_config, device.type, device_capability(device))
    for key, problem in problems.items():
        if isinstance(problem, MoeProblem):
            local = problem.num_experts // world_size
            problems[key] = replace(problem, num_local_experts=local, world_size=world_size)
    return resolve(load_registry(engine_config.plugins.ignore), engine_config, problems)


def fill_cache(cache: KVCache, engine_config: EngineConfig, maker: SyntheticWeights) -> None:
    """Random entries, as the model would have rounded them, in every ring and page."""
    released = engine_config.kv_quantization == "released"
    for pools, rounded in (
        (dict(enumerate(cache.window)), qdq_fp8),
        (cache.main, qdq_nvfp4),
        (cache.index_keys, qdq_mxfp4),
    ):
        for pool in pools.values():
            values = maker.normal(*pool.shape)
            pool.copy_(rounded(values) if released else values)
    for pool in cache.pending.values():
        pool.normal_()
