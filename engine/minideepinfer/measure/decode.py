"""The decode benchmark: one rank of an expert-parallel world, one new token for each of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.facts import MachineWatch, software
from minideepinfer.measure.random_cache import with_cache
from minideepinfer.measure.rank import Rank
from minideepinfer.measure.rank_shape import RankShape
from minideepinfer.measure.rates import COPY, measured_rates
from minideepinfer.measure.record import Record
from minideepinfer.measure.step_values import once, step_values
from minideepinfer.measure.steps import Profile, fused_stages, time_steps
from minideepinfer.operators import Phase
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.runtime.world import World


@dataclass(frozen=True)
class DecodeProblem:
    """What is measured: each batch size with each context.

    Attributes:
        batch_sizes: requests of this rank; each other rank has as many.
        contexts: tokens before the new one, of every request.
        world_size: ranks of the world of which one is measured.
        engram_fraction: share of this rank's Engram rows that is held.
        num_layers: first layers of the model that run; None = all.
        steps: measured steps of each.
        warmup: steps before them.
        seed: of weights, tokens, cache and the other ranks' rows.
        checkpoint: whose weights are used; None = random ones.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    world_size: int
    engram_fraction: float
    num_layers: int | None = None
    steps: int = 10
    warmup: int = 3
    seed: int = 0
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that leave nothing to measure."""
        layers = 1 if self.num_layers is None else self.num_layers
        numbers = {"num_layers": layers, "steps": self.steps, "warmup": self.warmup}
        numbers |= {"batch size": min(self.batch_sizes, default=0), "context": min(self.contexts, default=0)}
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"decode benchmark: {name} is {number}; at least 1 is needed")
        for name, several in (("batch size", self.batch_sizes), ("context", self.contexts)):
            if twice := sorted({number for number in several if several.count(number) > 1}):
                raise ConfigError(
                    f"decode benchmark: {name} {twice[0]} is given twice; records need names of their own"
                )


PRESETS = {
    "v41-rank": DecodeProblem((1, 8, 32), (8192, 131072), world_size=4, engram_fraction=1 / 8),
    "tiny": DecodeProblem((1, 4), (64, 192), world_size=2, engram_fraction=1.0, steps=3, warmup=1),
}


class DecodeBench:
    """A rank with room for the largest batch and the longest context."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        problem: DecodeProblem,
        world: World | None = None,
    ) -> None:
        """Make weights and cache; see `Rank`."""
        most, longest = max(problem.batch_sizes), max(problem.contexts)
        self._pages = -(-(longest + 1) // engine_config.cache.page_tokens)
        self.problem = problem
        shape = RankShape(
            problem.world_size, problem.engram_fraction, most, problem.num_layers, problem.seed, problem.checkpoint
        )
        self.rank = Rank(model_config, with_cache(engine_config, most * self._pages, most), shape, world)

    def requests(self, batch_size: int, context: int) -> list[Request]:
        """Requests with a cached context and one known token behind it; no two share a page."""
        vocabulary, generator = (
            self.rank.config.vocab_size,
            torch.Generator().manual_seed(self.problem.seed + self.rank.world.rank),
        )
        ids = torch.randint(vocabulary, (batch_size, context + 1), generator=generator).tolist()
        return [
            Request(
                request_id=index,
                token_ids=ids[index],
                num_prompt_tokens=context,
                max_total_tokens=context + 1,
                num_computed_tokens=context,
                ring=index,
                pages=list(range(index * self._pages, (index + 1) * self._pages)),
            )
            for index in range(batch_size)
        ]

    @property
    def headline(self) -> str:
        """What is absent or made up, and the precision."""
        if self.rank.others is None:
            return f"{self.rank.headline()}; each rank has requests of its own"
        return (
            f"{self.rank.headline()}; each other rank has as many tokens as this one, random rows, fresh in each step "
            "and routed by the real gate outside its time; their partial sums are left out"
        )

    def renew(self) -> None:
        """Rewind, with fresh rows of the other ranks."""
        self.rank.rewind()
        self.rank.draw_others()


def measure_decode(
    bench: DecodeBench,
    *,
    profile: Profile | None = None,
    rates: Mapping[str, float] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[Record]:
    """Run the benchmark, a record for each batch size and context.

    Args:
        bench: what is measured.
        profile: what is looked at beside the step; a trace is that of the last batch.
        rates: of this machine in this run; None = they are measured now, before the steps.
        progress: told what comes next.

    Raises:
        ConfigError: logits are not finite.
    """
    device, problem = bench.rank.setup.device, bench.problem
    if rates is None:
        progress("measuring rates")
        rates = measured_rates(device)
    for context in problem.contexts:
        for batch_size in problem.batch_sizes:
            progress(f"batch {batch_size}, context {context}")
            yield _measure(bench, batch_size, context, profile or Profile(), rates)


def _measure(bench: DecodeBench, batch_size: int, context: int, profile: Profile, rates: Mapping[str, float]) -> Record:
    rank, problem = bench.rank, bench.problem
    requests = bench.requests(batch_size, context)
    scheduled = [ScheduledRequest(request, 1) for request in requests]
    watch = MachineWatch(rank.setup.device)
    bench.renew()
    if not bool(rank.note_routing(scheduled).isfinite().all()):
        raise ConfigError("the benchmark's logits are not finite; an operator of the plan is wrong")
    times = time_steps(
        rank,
        lambda: rank.run(scheduled),
        bench.renew,
        steps=problem.steps,
        warmup=problem.warmup,
        profile=profile,
    )
    step, rows = rank.new_step(scheduled)
    costs = rank.costs(step, len(rows))
    values, moved = step_values(times, batch_size), costs.num_bytes
    values["bytes"] = once(moved, "bytes")
    values["bandwidth"] = once(moved / values["step"].median / 1e6, "GB/s")
    floors = costs.floors(rates) if times.stages else {}
    return Record(
        benchmark="decode",
        name=f"batch {batch_size}, context {context}",
        headline=bench.headline,
        machine=watch.machine(),
        software=software(),
        problem={"batch_size": batch_size, "context": context, **rank.described()},
        precision=rank.precision(),
        plan=rank.setup.plan.to_dict(),
        seed=problem.seed,
        values=values,
        stages=times.stages,
        inside=fused_stages(rank.operators(Phase.DECODE)) if times.stages else {},
        floors={**floors, "step": moved / rates[COPY] / 1e9},
        rates=dict(rates),
    )
