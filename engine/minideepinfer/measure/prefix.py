"""The prefix benchmark: the same prompt cold and behind a hit, through the real engine, scheduler and prefix tree.

A cold run computes the prompt in chunks and publishes its pages. Of these the last ones are evicted again, so that the
next run of the prompt finds just as many tokens as the problem says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from minideepinfer.config import EngineConfig, ModelConfig, TextConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.facts import MachineWatch, software
from minideepinfer.measure.random_cache import with_cache
from minideepinfer.measure.rank import Rank
from minideepinfer.measure.rank_runner import RankRunner
from minideepinfer.measure.rank_shape import RankShape
from minideepinfer.measure.record import Record
from minideepinfer.measure.step_values import once, rate, ratio
from minideepinfer.measure.timing import summary
from minideepinfer.runtime.engine import Engine
from minideepinfer.runtime.params import SamplingParams
from minideepinfer.runtime.replay import replay_start, tail_rows
from minideepinfer.runtime.world import World

OWN_SETTINGS = ("max_tokens_per_step", "cache.prefix", "replay")
"""Engine settings that the problem decides."""


@dataclass(frozen=True)
class PrefixProblem:
    """What is measured.

    Attributes:
        prompt: tokens of the prompt.
        hit: of them, those whose entries are found; whole pages.
        chunk: most rows of a step.
        world_size: ranks of the world of which one is measured.
        engram_fraction: share of this rank's Engram rows that is held.
        replays: in which replay, one after the other; behind `full` the others say what their decoder skip saves.
        repeats: measured runs with a hit, behind one that is not measured; the cold run is measured once.
        num_layers: first layers of the model that run; None = all.
        seed: of weights, tokens and the other ranks' rows.
        checkpoint: whose weights are used; None = random ones.
    """

    prompt: int
    hit: int
    chunk: int
    world_size: int
    engram_fraction: float
    replays: tuple[str, ...] = ("full", "bounded")
    repeats: int = 3
    num_layers: int | None = None
    seed: int = 0
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what leaves nothing to measure."""
        for name, number in (("num_layers", self.num_layers), ("repeats", self.repeats)):
            if number is not None and number < 1:
                raise ConfigError(f"prefix benchmark: {name} is {number}; at least 1 is needed")
        if len(set(self.replays)) < len(self.replays):
            raise ConfigError(f"prefix benchmark: replay {','.join(self.replays)}; each is measured once")

    @property
    def shape(self) -> RankShape:
        """The rank that it takes."""
        return RankShape(self.world_size, self.engram_fraction, self.chunk, self.num_layers, self.seed, self.checkpoint)


PRESETS = {
    "v41-rank": PrefixProblem(prompt=131072, hit=126976, chunk=4096, world_size=4, engram_fraction=1 / 8),
    "tiny": PrefixProblem(prompt=192, hit=128, chunk=64, world_size=2, engram_fraction=1.0),
}


@dataclass(frozen=True)
class Run:
    """One run of the prompt, until its first token.

    Attributes:
        steps: milliseconds of each step.
        layer_rows: rows of a rank times the layers that they ran, of all steps, as the engine counted them.
        hit: tokens that were found.
    """

    steps: tuple[float, ...]
    layer_rows: int
    hit: int

    @property
    def milliseconds(self) -> float:
        """Of all steps."""
        return sum(self.steps)


class PrefixBench:
    """A rank with room for the prompt once.

    Attributes:
        problem: what is measured.
        rank: the rank.
    """

    def __init__(
        self, model_config: ModelConfig, engine_config: EngineConfig, problem: PrefixProblem, world: World | None = None
    ) -> None:
        """Make weights; see `Rank`.

        Raises:
            ConfigError: see `Rank`; or the hit is not made of whole pages.
        """
        page = engine_config.cache.page_tokens
        if problem.hit % page or not 0 < problem.hit < problem.prompt:
            raise ConfigError(
                f"prefix benchmark: a hit of {problem.hit} tokens in a prompt of {problem.prompt} is not made of whole "
                f"pages; a part of the prompt and a multiple of cache.page_tokens = {page} is needed"
            )
        update = {"max_tokens_per_step": problem.chunk, "replay": problem.replays[0]}
        engine_config = engine_config.model_copy(update=update)
        engine_config = with_cache(engine_config, -(-problem.prompt // page), 1, prefix=True)
        self.problem, self._page = problem, page
        self.rank = Rank(model_config, engine_config, problem.shape, world)
        generator = torch.Generator().manual_seed(problem.seed + self.rank.world.rank)
        ids = torch.randint(self.rank.config.vocab_size - 1, (2, problem.prompt), generator=generator)
        ids += ids >= model_config.image_token_id  # which no prompt may have
        self._prompt, self._other = ids.tolist()

    @property
    def headline(self) -> str:
        """What is absent or made up, and the precision."""
        problem = self.problem
        line = (
            f"{self.rank.headline()}; the same prompt of {problem.prompt} tokens cold and with a hit of {problem.hit}, "
            f"in steps of at most {problem.chunk} rows, in replay {', then '.join(problem.replays)}"
        )
        if self.rank.others is None:
            return f"{line}; each rank has a prompt of its own"
        return (
            f"{line}; each other rank has as many rows as this one in every step, random ones, fresh in each step and "
            "routed by the real gate outside its time; their partial sums are left out"
        )

    def engine(self, replay: str) -> Engine:
        """A new engine, whose prefix tree is empty."""
        self.rank.set_replay(replay)
        return Engine(RankRunner(self.rank))

    def warm_up(self, engine: Engine) -> None:
        """Compute the first two chunks of another prompt, for what is compiled or chosen at first use."""
        self._run(engine, self._other[: 2 * self.problem.chunk])

    def cold(self, engine: Engine) -> Run:
        """Compute the prompt, of which the tree knows nothing."""
        return self._run(engine, self._prompt)

    def hit(self, engine: Engine) -> Run:
        """Compute it once more behind a `cold`, with as much of a hit as the problem says."""
        assert engine.prefixes is not None
        too_many = len(engine.prefixes) - self.problem.hit // self._page
        engine.prefixes.evict(too_many)  # a prompt's last pages go first
        return self._run(engine, self._prompt)

    def _run(self, engine: Engine, prompt: Sequence[int]) -> Run:
        generation = engine.make_generation(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        assert engine.prefixes is not None
        statistics, times, work = engine.prefixes.statistics, engine.throughput, engine.work
        found, encoder, decoder = statistics.hit_tokens, work.encoder_rows, work.decoder_rows
        engine.start(generation)
        steps = []
        while generation.finish_reason is None:
            self.rank.draw_others()
            self.rank.meet()
            before = times.prefill_seconds + times.decode_seconds
            engine.step()
            steps.append(1e3 * (times.prefill_seconds + times.decode_seconds - before))
        ran = rows_times_layers(self.rank, work.encoder_rows - encoder, work.decoder_rows - decoder)
        return Run(tuple(steps), ran // self.rank.world.size, statistics.hit_tokens - found)


def rows_times_layers(rank: Rank, rows: int, kept: int) -> int:
    """Rows through the layers before the candidate source, and those that are kept through the others."""
    source, layers = rank.config.candidate_source_layer_id, len(rank.model.blocks)
    return rows * min(source, layers) + kept * max(0, layers - source)


def rows_by_formula(config: TextConfig, replay: str, prompt: int, hit: int) -> tuple[int, int]:
    """By formula: rows of a prompt that must run the encoder, and those that must run the decoder too (spec 4)."""
    start = replay_start(config, replay, hit, prompt) if hit else 0
    tail = tail_rows(config, replay)
    return prompt - start, prompt - start if tail is None else min(tail, prompt - start)


def measure_prefix(bench: PrefixBench, *, progress: Callable[[str], None] = lambda what: None) -> Iterator[Record]:
    """Run the benchmark, a record for each replay.

    Args:
        bench: what is measured.
        progress: told what comes next.

    Raises:
        ConfigError: a hit was not as long as it should be.
        MiniDeepInferError: logits are not finite, so that no token can be drawn.
    """
    full: Run | None = None
    for replay in bench.problem.replays:
        watch = MachineWatch(bench.rank.setup.device)
        engine = bench.engine(replay)
        progress(f"{replay}: warming up")
        bench.warm_up(engine)
        progress(f"{replay}: cold")
        cold = bench.cold(engine)
        progress(f"{replay}: behind a hit")
        hits = [bench.hit(engine) for _ in range(1 + bench.problem.repeats)][1:]
        if odd := [run.hit for run in (cold, *hits) if run.hit != (run is not cold) * bench.problem.hit]:
            raise ConfigError(f"prefix benchmark: {odd[0]} tokens were found, not those of the problem")
        yield _record(bench, replay, watch, cold, hits, full)
        full = cold if replay == "full" else full


def _record(
    bench: PrefixBench, replay: str, watch: MachineWatch, cold: Run, hits: Sequence[Run], full: Run | None
) -> Record:
    rank, problem = bench.rank, bench.problem
    text, device = rank.config, rank.setup.device
    cold_time, hit_time = summary([cold.milliseconds]), summary([run.milliseconds for run in hits])
    values = {
        "cold": cold_time,
        "hit": hit_time,
        "hit_over_cold": ratio([run.milliseconds / cold.milliseconds for run in hits]),
        "cold_tokens_per_second": rate(cold_time, problem.prompt),
        "hit_tokens_per_second": rate(hit_time, problem.prompt),
        "cold_step": summary(cold.steps),
    }
    for name, run, found in (("cold", cold, 0), ("hit", hits[0], problem.hit)):
        values[f"{name}_layer_rows"] = once(run.layer_rows, "rows")
        formula = rows_times_layers(rank, *rows_by_formula(text, replay, problem.prompt, found))
        values[f"{name}_layer_rows_by_formula"] = once(formula, "rows")
    if full is not None:
        skipping = list(zip(cold.steps, full.steps, strict=True))[:-1]  # the last chunk has rows for the decoder
        values["step_over_full"] = ratio([ours / all_rows for ours, all_rows in skipping])
    if device.type == "cuda":
        values["peak_memory"] = once(torch.cuda.max_memory_allocated(device), "bytes")
    return Record(
        benchmark="prefix",
        name=f"prefix, {replay}",
        headline=bench.headline,
        machine=watch.machine(),
        software=software(),
        problem={"prompt": problem.prompt, "hit": problem.hit, "chunk": problem.chunk, **rank.described()},
        precision=rank.precision(),
        plan=rank.setup.plan.to_dict(),
        seed=problem.seed,
        values=values,
    )
