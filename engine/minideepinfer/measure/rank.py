"""One rank of an expert-parallel world, with random weights or a checkpoint's, and a cache of random entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.measure.made_up_ranks import MadeUpRanks
from minideepinfer.measure.random_cache import fill_cache
from minideepinfer.measure.rank_shape import RankShape, moe_choice, rank_setup
from minideepinfer.measure.rank_weights import FoldedHash
from minideepinfer.measure.stages import SwitchedClock
from minideepinfer.measure.step_costs import ExpertRows, StepCosts
from minideepinfer.model.step import NoRecorder, Recorder, Step
from minideepinfer.operators import NoClock, Phase, load_registry
from minideepinfer.operators.build import OperatorBuilder
from minideepinfer.runtime.assembly import assemble
from minideepinfer.runtime.batching import build_step, make_parts, wanted_rows
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.runtime.world import World


class Rank:
    """A rank whose steps can be repeated.

    Attributes:
        registry: operators to choose from.
        setup: device, precision and plan.
        cache: random entries, rounded as the model rounds them.
        model: its blocks, embedding and head.
        world: the ranks that there are.
        others: the ranks that there are not; None if all are there.
        clock: told of stages; its target can be changed.
        engram_hash: finds the tokens' rows among those that the ranks hold.
        routing: experts of the rows of all ranks, by layer, int32 `[T', k]`; see `note_routing`.
    """

    def __init__(
        self, model_config: ModelConfig, engine_config: EngineConfig, shape: RankShape, world: World | None = None
    ) -> None:
        """Make weights and cache.

        Args:
            model_config: the model.
            engine_config: `cache` says how many pages and rings there are.
            shape: how much of it.
            world: all ranks of the shape's world; None = this one alone, which makes the others up.

        Raises:
            CheckpointError: the checkpoint is damaged.
            ConfigError: layers, ranks or device do not fit the model or the machine.
            OperatorError: a chosen operator cannot serve the rank's problem.
        """
        self.shape, self.config, self.world = shape, model_config.text_config, world or World()
        self.registry = load_registry(engine_config.plugins.ignore)
        self.setup = rank_setup(model_config, engine_config, shape, self.registry)
        device, rank = self.setup.device, self.world.rank
        self.clock = SwitchedClock(NoClock())
        self.routing: dict[int, torch.Tensor] = {}
        self.engram_hash = FoldedHash(model_config, shape.checkpoint, device, shape.part(rank))
        self._maker = shape.weights(self.setup, rank)
        self._weights = weights = self._maker.make()
        self.others: MadeUpRanks | None = None
        if self.world.size == 1:
            row = weights.layers[0].attention.wq_a
            self.others = MadeUpRanks(shape.world_size, shape.most_rows, row, self.clock)
        else:
            self.world.exchange("loaded", patient=True)  # or the first step would wait for those that still make theirs
            self.world.connect(device)
        self.cache, self.model = self.setup.build(weights, self.clock, self.others)
        self._generator = torch.Generator(device).manual_seed(shape.seed + rank)
        fill_cache(self.cache, engine_config.kv_quantization == "released", self.setup.dtype, self._generator)
        self._kept = [tensor.clone() for tensor in self._overwritten()]
        self.draw_others()

    def change(self, engine_config: EngineConfig, num_layers: int | None = None) -> None:
        """Go over to another plan, or fewer layers, with the same weights and cache.

        Experts exist only as their operator keeps them: where that changes, they are made again.

        Args:
            engine_config: with the device, dtype and cache of the one before.
            num_layers: first of the layers that the rank holds; None = all.

        Raises:
            OperatorError: a chosen operator cannot serve the rank's problem.
        """
        before = self.setup
        self.setup = rank_setup(before.model_config, engine_config, self.shape, self.registry)
        made = {
            block.layer.layer_id: block.moe_weights
            for block in self.model.blocks
            if moe_choice(before.plan, block.layer.layer_id) == moe_choice(self.setup.plan, block.layer.layer_id)
        }
        del self.model  # a rank has no room for experts in two forms
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()  # nor for the holes that other sizes would leave
        layers = [
            weights if layer_id in made else replace(weights, moe=self._maker.moe(layer_id))
            for layer_id, weights in enumerate(self._weights.layers[:num_layers])
        ]
        self.model = assemble(
            self.config,
            engine_config,
            replace(self._weights, layers=layers),
            self.cache,
            self.setup.plan,
            OperatorBuilder(self.setup.device, self.clock),
            self.setup.dtype,
            self.others,
            moe_weights=made,
        )
        self.draw_others()

    def set_replay(self, replay: str) -> None:
        """From now on this many prompt rows run the decoder layers; nothing else depends on it."""
        engine = self.setup.engine_config.model_copy(update={"replay": replay})
        self.setup = replace(self.setup, engine_config=engine)

    @torch.inference_mode()
    def draw_others(self) -> None:
        """Fresh rows of the ranks that are made up."""
        if self.others is not None:
            self.others.draw(self.model.blocks, self._generator)

    def rewind(self) -> None:
        """Undo a step: window rings and pending pairs are as they were; entries in pages will be written again."""
        if self.others is not None:
            self.others.next_layer = 0
        for now, before in zip(self._overwritten(), self._kept, strict=True):
            now.copy_(before)

    def _overwritten(self) -> list[torch.Tensor]:
        return [*self.cache.window, *self.cache.pending.values()]

    def new_step(self, scheduled: Sequence[ScheduledRequest]) -> tuple[Step, torch.Tensor]:
        """Pack requests: the step, and the rows of its output whose logits are wanted."""
        engine, device = self.setup.engine_config, self.setup.device
        parts = make_parts(scheduled, self.config, engine.replay)
        step = build_step(parts, self.config, self.engram_hash, engine.cache.page_tokens, device)
        step.clock = self.clock
        counts = self.world.exchange((step.encoder.num_tokens, step.decoder.num_tokens))
        if self.others is not None:
            counts *= self.shape.world_size
        step.counts = tuple(first for first, _ in counts), tuple(last for _, last in counts)
        return step, wanted_rows(parts).to(device)

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledRequest], recorder: Recorder | None = None) -> torch.Tensor:
        """Compute a step behind a `rewind`; logits of the rows that are wanted, float32 `[N, vocab]`."""
        step, rows = self.new_step(scheduled)
        step.recorder = recorder or NoRecorder()
        return self.model.logits(self.model.forward(step), step, rows)

    def note_routing(self, scheduled: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Compute a step as `run` does, and remember to which experts it sent the rows of all ranks."""
        kept = KeptRouting()
        logits = self.run(scheduled, None if self.others else kept)
        if self.others is not None:
            self.routing = dict(self.others.dispatched_ids)
        else:
            comm = self.model.comm
            counts = {layer: self.world.exchange(len(ids)) for layer, ids in kept.ids.items()}
            self.routing = {layer: comm.all_gather(ids, counts[layer]) for layer, ids in kept.ids.items()}
        return logits

    @property
    def local(self) -> range:
        """The experts of this rank."""
        return self.shape.part(self.world.rank).experts(self.config.n_routed_experts)

    def operators(self, phase: Phase) -> list[Any]:
        """The built operators that serve a phase."""
        found: list[Any] = [self.model.mixing.operators[phase]]
        for block in self.model.blocks:
            found += [block.moe[phase], block.attention.attention[phase]]
            found += [block.attention.indexer[phase]] if block.attention.indexer else []
        return found

    def costs(self, step: Step, num_logits: int) -> StepCosts:
        """What a step costs at least, if its rows are routed like those of `note_routing`."""
        experts = {layer: ExpertRows.of(ids, self.local) for layer, ids in self.routing.items()}
        return StepCosts(self.config, self.setup.plan, step, experts, num_logits)

    def described(self) -> dict[str, Any]:
        """What was measured, in plain data."""
        return {
            "world_size": self.shape.world_size,
            "ranks": self.world.size,
            "weights": "random" if self.shape.checkpoint is None else str(self.shape.checkpoint),
            "engram_fraction": self.shape.engram_fraction,
            "engram_placement": self.setup.engine_config.engram.placement,
            "page_tokens": self.setup.engine_config.cache.page_tokens,
            "layers": len(self.model.blocks),
            "model_layers": self.config.num_hidden_layers,
            "hidden_size": self.config.hidden_size,
            "experts": self.config.n_routed_experts,
            "vocab_size": self.config.vocab_size,
        }

    def precision(self) -> dict[str, str]:
        """The switches that change numbers."""
        engine = self.setup.engine_config
        return {
            "dtype": self.setup.dtype_name,
            "cache": self.setup.layout.name,
            "kv_quantization": engine.kv_quantization,
            "activation_quantization": engine.activation_quantization,
            "replay": engine.replay,
        }

    def headline(self) -> str:
        """What every benchmark of a rank says first: what is absent or made up, and the precision."""
        placement = self.setup.engine_config.engram.placement
        alone = f"one rank of {self.shape.world_size}, no network"
        weights = "random weights" if self.shape.checkpoint is None else f"weights of {self.shape.checkpoint}"
        engram = "all" if self.shape.engram_fraction == 1 else f"{self.shape.engram_fraction:.3g}"
        return (
            f"{alone if self.others else f'{self.world.size} ranks'}; "
            f"{', '.join(f'{name} {value}' for name, value in self.precision().items())}; "
            f"{len(self.model.blocks)} of {self.config.num_hidden_layers} layers, {weights}, random tokens "
            f"and cache, {engram} of the rank's Engram rows"
            f"{'' if placement == 'device' else f' ({placement})'}"
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize(self.setup.device)

    def meet(self) -> None:
        """Wait for the device and for all ranks."""
        self.synchronize()
        self.world.exchange(None)


class KeptRouting:
    """A `Recorder` of the experts of each layer's rows."""

    def __init__(self) -> None:
        self.ids: dict[int, torch.Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether it is a layer's experts."""
        return name.endswith(".ffn.expert_ids")

    def record(self, name: str, value: torch.Tensor, request_ids: torch.Tensor) -> None:
        """Keep them by layer."""
        self.ids[int(name.split(".")[1])] = value
