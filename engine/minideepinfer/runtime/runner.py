"""A loaded checkpoint with its operators and caches, ready to execute scheduled steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minideepinfer.checkpoint import Checkpoint
from minideepinfer.checkpoint.partition import Partition
from minideepinfer.config import EngineConfig
from minideepinfer.model.engram_hash import EngramHash
from minideepinfer.model.load import WeightLoader
from minideepinfer.model.step import Forced
from minideepinfer.operators import NoClock, Phase, StageClock
from minideepinfer.operators.registry import OperatorRegistry
from minideepinfer.runtime.agreement import agree, facts
from minideepinfer.runtime.batching import build_step, make_parts, wanted_rows
from minideepinfer.runtime.capture import Capture
from minideepinfer.runtime.request import Request
from minideepinfer.runtime.scheduler import ScheduledRequest
from minideepinfer.runtime.setup import Setup
from minideepinfer.runtime.tokenizer import load_tokenizer
from minideepinfer.runtime.world import World
from minideepinfer.transfer import upload


@dataclass(frozen=True, eq=False)
class RequestLogits:
    """Logits of one request in one step.

    Attributes:
        request: the request.
        positions: which of its positions; may be empty.
        logits: float32 `[len(positions), vocab]` on the compute device.
    """

    request: Request
    positions: range
    logits: Tensor


@dataclass(frozen=True)
class StepShare:
    """What one rank has in a step: the phase of its rows, how many there are, and how many run every layer."""

    phase: Phase
    num_tokens: int
    num_kept: int


class Runner:
    """Executes steps; knows nothing of sampling or of who asks.

    Attributes:
        world: the ranks that run each step together.
        shares: what each of them had in the latest step.
        config: the checkpoint's config.
        plan: which operator serves which layer and phase.
        cache: all state of requests.
        model: the text model.
        skipped_bytes: bytes of the checkpoint that are known and not run (draft, vision).
        bytes_read: bytes read from it.
    """

    def __init__(
        self,
        path: str | Path,
        engine_config: EngineConfig,
        clock: StageClock | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        registry: OperatorRegistry | None = None,
        keep_weights: bool = False,
        world: World | None = None,
    ) -> None:
        """Choose operators, then read the weights.

        Args:
            path: a checkpoint directory, or `tiny` for the packaged one.
            engine_config: how to run it.
            clock: told of the stages of every step.
            progress: called with blocks read and blocks in all.
            registry: operators to choose from; None = those of all installed plugins.
            keep_weights: keep experts as loaded beside what operators make of them, for tests.
            world: the ranks that share the experts; None = this one alone.

        Raises:
            CheckpointError: the checkpoint is damaged or incomplete.
            OperatorError: a chosen operator cannot serve it.
            ConfigError: the machine lacks the device, or the ranks cannot share the experts evenly.
            RankError: ranks differ in what must be the same; on all of them.
        """
        self.engine_config = engine_config
        self.clock = clock or NoClock()
        self.world = world or World()
        self.shares: list[StepShare] = []
        with Checkpoint.open(path) as checkpoint:
            self.config = checkpoint.config
            setup = Setup.of(self.config, engine_config, registry)
            self.plan, self.device = setup.plan, setup.device
            agree(self.world, facts(engine_config, checkpoint, self.plan, self.device))
            self.tokenizer = load_tokenizer(checkpoint.path, self.config)
            self.engram_hash = EngramHash(self.config, self.tokenizer.backend, self.device)
            part = Partition(self.world.rank, self.world.size)
            weights = WeightLoader(checkpoint, setup.dtype, self.device, engine_config.engram, part).load(progress)
            self.skipped_bytes = checkpoint.summary.skipped.bytes
            self.bytes_read = checkpoint.bytes_read
        self.world.exchange("loaded", patient=True)  # what follows waits for others no longer than a step does
        self.world.connect(self.device)
        self.cache, self.model = setup.build(weights, self.clock, keep_weights=keep_weights)
        self.world.exchange("ready", patient=True)

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return self.engine_config.cache.page_tokens

    @torch.inference_mode()
    def execute(
        self, scheduled: Sequence[ScheduledRequest], recorder: Capture | None = None, forced: Forced | None = None
    ) -> list[RequestLogits]:
        """Run one step and advance its requests. Every rank does so at the same time, with nothing if it has nothing.

        Args:
            scheduled: what to run, from the scheduler; requests hold their pages and ring.
            recorder: collects intermediates.
            forced: discrete choices to impose.

        Returns:
            One entry for each scheduled request, decode requests first.
        """
        text = self.config.text_config
        parts = make_parts(scheduled, text, self.engine_config.replay)
        step = build_step(parts, text, self.engram_hash, self.page_tokens, self.device)
        step.clock = self.clock
        self.shares = self.world.exchange(
            StepShare(step.encoder.phase, step.encoder.num_tokens, step.decoder.num_tokens)
        )
        step.counts = tuple(s.num_tokens for s in self.shares), tuple(s.num_kept for s in self.shares)
        if recorder is not None:
            recorder.begin_step([part.request.request_id for part in parts])
            step.recorder = recorder
        if forced is not None:
            step.forced = forced
        hidden = self.model.forward(step)
        logits = self.model.logits(hidden, step, upload(wanted_rows(parts), self.device))
        for part in parts:
            part.request.num_computed_tokens = part.end
        pieces = logits.split([len(part.wanted) for part in parts])
        return [RequestLogits(part.request, part.wanted, piece) for part, piece in zip(parts, pieces, strict=True)]
