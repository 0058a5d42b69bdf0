"""A benchmark's rank in the place of a loaded checkpoint, so that the engine itself can be measured."""

from __future__ import annotations

from minideepinfer.measure.rank import Rank
from minideepinfer.runtime.runner import Runner
from minideepinfer.runtime.tokenizer import Tokenizer


class RankRunner(Runner):
    """A `Runner` of what a rank holds. It has no tokenizer: prompts are token ids, and all text is empty."""

    def __init__(self, rank: Rank) -> None:
        """Take the rank as it is set up now."""
        self.engine_config, self.config = rank.setup.engine_config, rank.setup.model_config
        self.plan, self.device = rank.setup.plan, rank.setup.device
        self.cache, self.model, self.engram_hash = rank.cache, rank.model, rank.engram_hash
        self.clock, self.world, self.tokenizer = rank.clock, rank.world, Tokenizer(None)
        self.shares = []
        self.skipped_bytes = self.bytes_read = 0
