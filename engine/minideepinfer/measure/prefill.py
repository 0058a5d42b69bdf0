"""The fixed prefill benchmark: one rank of an expert-parallel world at the end of a long context.

Every step rewinds to the same position and computes the same final chunk, so that steps can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from minideepinfer.cache.kv_cache import KVCache
from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.facts import MachineWatch, software
from minideepinfer.measure.random_cache import with_cache
from minideepinfer.measure.rank import Rank
from minideepinfer.measure.rank_shape import RankShape
from minideepinfer.measure.rates import measured_rates
from minideepinfer.measure.record import Measurement, Record
from minideepinfer.measure.step_values import once, step_values
from minideepinfer.measure.steps import WITH_STAGES, Profile, StepTimes, fused_stages, time_steps
from minideepinfer.model.step import Step
from minideepinfer.model.transformer import TextModel
from minideepinfer.operators import Phase, Stage
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.runtime.world import World


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
        warmup: steps before them, beside the one that is checked.
        seed: of weights, tokens, cache and the other ranks' rows.
        checkpoint: whose weights are used; None = random ones.
    """

    context: int
    new_tokens: int
    world_size: int
    engram_fraction: float
    num_layers: int | None = None
    steps: int = 10
    warmup: int = 3
    seed: int = 0
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that leave nothing to measure."""
        for name, number, least in (
            ("num_layers", self.num_layers, 1),
            ("steps", self.steps, 1),
            ("warmup", self.warmup, 0),
        ):
            if number is not None and number < least:
                raise ConfigError(f"prefill benchmark: {name} is {number}; at least {least} is needed")

    @property
    def shape(self) -> RankShape:
        """The rank that it takes."""
        return RankShape(
            self.world_size, self.engram_fraction, self.new_tokens, self.num_layers, self.seed, self.checkpoint
        )


PRESETS = {
    "v41-rank": PrefillProblem(context=131072, new_tokens=4096, world_size=4, engram_fraction=1 / 8),
    "tiny": PrefillProblem(context=192, new_tokens=64, world_size=2, engram_fraction=1.0, steps=3, warmup=1),
}


class PrefillBench:
    """A rank with random weights and a random cache, ready to repeat its step.

    Attributes:
        problem: what is measured.
        rank: the rank.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        problem: PrefillProblem,
        world: World | None = None,
    ) -> None:
        """Make weights and cache; see `Rank`."""
        pages = -(-problem.context // engine_config.cache.page_tokens)
        self.problem = problem
        self.rank = Rank(model_config, with_cache(engine_config, pages, 1), problem.shape, world)
        generator = torch.Generator().manual_seed(problem.seed + self.rank.world.rank)
        ids = torch.randint(self.rank.config.vocab_size, (problem.context,), generator=generator)
        self._request = Request(0, ids.tolist(), problem.context, problem.context, ring=0, pages=list(range(pages)))
        self.rewind()

    @property
    def model(self) -> TextModel:
        """The rank's."""
        return self.rank.model

    @property
    def cache(self) -> KVCache:
        """The rank's."""
        return self.rank.cache

    @property
    def headline(self) -> str:
        """What is absent or made up, and the precision."""
        new = self.problem.new_tokens
        line = f"{self.rank.headline()}; {new} new tokens behind {self.problem.context - new} cached ones"
        if self.rank.others is None:
            return f"{line}; each rank has as many of its own"
        others = (self.problem.world_size - 1) * new
        return (
            f"{line}; the other ranks' {others} tokens are random rows, fresh in each step and routed by "
            "the real gate outside its time; their partial sums are left out"
        )

    def change(self, engine_config: EngineConfig, problem: PrefillProblem) -> None:
        """Go over to another plan, with the same weights and cache; see `Rank.change`.

        Args:
            engine_config: with the device, dtype and cache of the one before.
            problem: that of the one before, with other steps or fewer layers.
        """
        pages = len(self._request.pages)
        self.problem = problem
        self.rank.change(with_cache(engine_config, pages, 1), problem.num_layers)
        self.rewind()

    def rewind(self) -> None:
        """Undo a step; see `Rank.rewind`."""
        self._request.num_computed_tokens = self.problem.context - self.problem.new_tokens
        self.rank.rewind()

    def renew(self) -> None:
        """Rewind, with fresh rows of the other ranks."""
        self.rewind()
        self.rank.draw_others()

    def before_layer(self, layer_id: int) -> None:
        """Say that the experts of this layer are the next ones to run."""
        if self.rank.others is not None:
            self.rank.others.next_layer = layer_id

    def new_step(self) -> Step:
        """The rows of the step."""
        return self.rank.new_step(self._scheduled)[0]

    @property
    def _scheduled(self) -> list[ScheduledRequest]:
        return [ScheduledRequest(self._request, self.problem.new_tokens)]

    def step(self) -> torch.Tensor:
        """Compute the chunk once, behind a `rewind`; logits of its last row, `[1, vocab]`."""
        return self.rank.run(self._scheduled)

    def check(self) -> list[str]:
        """Compute once and see that it is worth measuring; what a reader of its numbers must know.

        Raises:
            ConfigError: logits are not finite, or, with random weights, this rank's experts get another share of the
                rows than theirs.
        """
        self.renew()
        if not bool(self.rank.note_routing(self._scheduled).isfinite().all()):
            raise ConfigError("the benchmark's logits are not finite; an operator of the plan is wrong")
        low, mean, high = self.rows_per_expert()
        text, problem = self.rank.config, self.problem
        wanted = problem.world_size * problem.new_tokens * text.num_experts_per_tok / text.n_routed_experts
        noise = 4 / (wanted * len(self.rank.local)) ** 0.5  # four deviations of a fair gate, for small problems
        if abs(mean / wanted - 1) <= max(0.05, noise):
            return []
        found = (
            f"the benchmark's experts have {mean:.1f} rows on average (least {low}, most {high}) and should have "
            f"{wanted:.0f}, within 5 %"
        )
        if problem.checkpoint is None:
            raise ConfigError(f"{found}; the gate of its plan routes strangely")
        return [f"{found}; the checkpoint's gate sends random rows elsewhere"]

    def rows_per_expert(self) -> tuple[int, float, int]:
        """Fewest, mean and most rows of this rank's experts in a step, over the layers that run on all rows."""
        routing, local = self.rank.routing.values(), self.rank.local
        most = max(len(ids) for ids in routing)
        full = [ids.flatten().long() for ids in routing if len(ids) == most]
        counts = torch.stack([ids.bincount(minlength=local.stop)[local.start : local.stop] for ids in full])
        return int(counts.min()), float(counts.float().mean()), int(counts.max())


def measure_prefill(
    bench: PrefillBench,
    *,
    name: str = "prefill",
    profile: Profile = WITH_STAGES,
    rates: Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Record:
    """Run the benchmark.

    Args:
        bench: what is measured.
        name: of the record.
        profile: what is looked at beside the step.
        rates: of this machine in this run; None = they are measured now, behind the steps.
        progress: told what comes next.

    Raises:
        ConfigError: what comes out is not worth measuring.
    """
    device, problem = bench.rank.setup.device, bench.problem
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    watch = MachineWatch(device)
    progress("warming up")
    notes = bench.check()
    progress("measuring")
    times = time_steps(bench.rank, bench.step, bench.renew, steps=problem.steps, warmup=problem.warmup, profile=profile)
    machine = watch.machine()
    values = _values(bench, times)
    if device.type == "cuda" and times.stages and times.kernels is None:
        why = "the profiler saw no kernels" if profile.gaps else "no step was traced"
        notes.append(f"{why}, so waiting counts in the stage that waits")
    if rates is None:
        progress("measuring rates")
        rates = measured_rates(device)
    bench.rewind()
    floors = bench.rank.costs(bench.new_step(), num_logits=1).floors(rates)
    return Record(
        benchmark="prefill",
        name=name,
        headline=bench.headline,
        machine=machine,
        software=software(),
        problem={"context": problem.context, "new_tokens": problem.new_tokens, **bench.rank.described()},
        precision=bench.rank.precision(),
        plan=bench.rank.setup.plan.to_dict(),
        seed=problem.seed,
        values=values,
        stages=times.stages,
        inside=fused_stages(bench.rank.operators(Phase.PREFILL)) if times.stages else {},
        floors={**floors, "step": sum(floors.values()) - floors[Stage.FP4_DECODING]},
        rates=dict(rates),
        notes=tuple(notes),
    )


def _values(bench: PrefillBench, times: StepTimes) -> dict[str, Measurement]:
    values = step_values(times, bench.problem.new_tokens)
    for kind, number in zip(("least", "mean", "most"), bench.rows_per_expert(), strict=True):
        values[f"rows_per_expert_{kind}"] = once(number, "rows")
    if bench.rank.setup.device.type == "cuda":
        values["peak_memory"] = once(torch.cuda.max_memory_allocated(bench.rank.setup.device), "bytes")
    return values
