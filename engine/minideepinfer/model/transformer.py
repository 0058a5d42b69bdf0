"""The text model: embedding, blocks, final collapse and head (spec 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minideepinfer.config import TextConfig
from minideepinfer.model.block import Block, HandOver
from minideepinfer.model.epilogue import Epilogue
from minideepinfer.model.hyper_connections import HyperConnections
from minideepinfer.model.linear import wide_linear
from minideepinfer.model.step import Step
from minideepinfer.model.weights import ModelWeights
from minideepinfer.operators import CommOperator, Phase, Stage


class TextModel:
    """The forward pass over packed rows."""

    def __init__(
        self,
        config: TextConfig,
        weights: ModelWeights,
        blocks: Sequence[Block],
        mixing: HyperConnections,
        comm: CommOperator,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.weights = weights
        self.blocks = tuple(blocks)
        self.mixing = mixing
        self.comm = comm
        self.epilogue = epilogue
        self.dtype = dtype

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Four equal streams `[T, S, H]` of a token's embedding, and the first `pre` `[T, S]`, one-hot on stream 0."""
        num_streams = self.config.hc_mult
        embedded = self.weights.embed[token_ids].to(self.dtype)
        pre = torch.zeros(len(token_ids), num_streams, device=token_ids.device)
        pre[:, 0] = 1.0
        return embedded.unsqueeze(1).repeat(1, num_streams, 1), pre

    def forward(self, step: Step) -> Tensor:
        """Run a step through all blocks that a row of any rank enters.

        Args:
            step: the rows.

        Returns:
            The collapsed output `[T', H]` of the rows that ran the last block (`step.decoder`).
        """
        step.meet(self.comm)
        blocks = [block for block in self.blocks if step.rows_anywhere(block.layer)]
        for block in blocks:
            block.start(step)
        with step.clock.stage(Stage.HEAD):
            streams, pre = self.embed(step.token_ids)
        state = HandOver(streams, pre)
        if step.recorder.wants("embed"):
            step.recorder.record("embed", streams[:, 0], step.encoder.request_ids)
        for block in blocks:
            block.prepare(step)
            state = block.forward(state, step)
        with step.clock.stage(Stage.MIXING):
            return self.mixing.collapse(state.streams, state.pre, step.decoder.phase)

    def logits(self, hidden: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Head of some rows.

        Args:
            hidden: `[T', H]` of `forward`.
            step: the step.
            rows: int64 `[N]` rows of `hidden`.

        Returns:
            float32 `[N, vocab]`.
        """
        with step.clock.stage(Stage.HEAD):
            normed = self.normalize(hidden[rows], step.decoder.phase)
            logits = self.head(normed)
        if step.recorder.wants("final.normed"):
            step.recorder.record("final.normed", normed, step.decoder.request_ids[rows])
        return logits

    def normalize(self, hidden: Tensor, phase: Phase) -> Tensor:
        """The final norm, `[N, H]`; may overwrite what it is given."""
        return self.epilogue.run(hidden, phase, norm=self.weights.norm)

    def head(self, normed: Tensor) -> Tensor:
        """float32 logits `[N, vocab]` of normalised rows `[N, H]`."""
        return wide_linear(normed, self.weights.head)
