"""How much of a model and of its world one rank is, and what is decided for it before weights are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minideepinfer.config import EngineConfig, ModelConfig
from minideepinfer.errors import ConfigError
from minideepinfer.measure.rank_weights import CheckpointWeights, Part, RankWeights
from minideepinfer.measure.synthetic import Share, SyntheticWeights
from minideepinfer.operators import MoeProblem, OperatorRegistry, Phase, Problem
from minideepinfer.operators.plan import Plan
from minideepinfer.runtime.setup import Setup


@dataclass(frozen=True)
class RankShape:
    """How much of a model and its world one rank is.

    Attributes:
        world_size: ranks of the world of which one is measured.
        engram_fraction: share of this rank's Engram rows that is held.
        most_rows: rows of a step, for which there is room.
        num_layers: first layers of the model that run; None = all.
        seed: of everything random.
        checkpoint: whose weights they are; None = random ones.
    """

    world_size: int
    engram_fraction: float
    most_rows: int
    num_layers: int | None = None
    seed: int = 0
    checkpoint: str | None = None

    def share(self, model_config: ModelConfig, rank: int = 0) -> Share:
        """What a rank holds of a model.

        Raises:
            ConfigError: the model cannot be shared like that.
        """
        text = model_config.text_config
        if text.n_routed_experts % self.world_size:
            raise ConfigError(f"{text.n_routed_experts} experts cannot be shared by {self.world_size} ranks evenly")
        if (self.num_layers or 0) > text.num_hidden_layers:
            raise ConfigError(f"benchmark: num_layers is {self.num_layers}; the model has {text.num_hidden_layers}")
        return Share(
            num_layers=self.num_layers or text.num_hidden_layers,
            num_experts=text.n_routed_experts // self.world_size,
            engram_rows=self.part(rank).rows_per_rank(max(text.engram_num_embeddings)),
            rank=rank,
        )

    def part(self, rank: int) -> Part:
        """A rank's part of experts and tables."""
        return Part(rank, self.world_size, self.engram_fraction)

    def weights(self, setup: Setup, rank: int) -> RankWeights:
        """Where the weights come from.

        Raises:
            ConfigError: random tables are wanted elsewhere than on the device.
        """
        share, placement = self.share(setup.model_config, rank), setup.engine_config.engram.placement
        if self.checkpoint is None:
            if placement != "device":
                raise ConfigError(f"benchmark: engram.placement is {placement!r}; random tables are made on the device")
            return SyntheticWeights(setup.model_config.text_config, share, setup.dtype, setup.device, self.seed)
        engram = setup.engine_config.engram
        return CheckpointWeights(self.checkpoint, self.part(rank), share.num_layers, setup.dtype, setup.device, engram)


def rank_setup(
    model_config: ModelConfig, engine_config: EngineConfig, shape: RankShape, registry: OperatorRegistry
) -> Setup:
    """What is decided for a rank before weights are made.

    Args:
        model_config: the model.
        engine_config: how to run it.
        shape: how much of it.
        registry: operators to choose from.

    Raises:
        ConfigError: the model cannot be shared like that.
        OperatorError: a chosen operator cannot serve the rank's problem.
    """
    shape.share(model_config)
    return Setup.of(model_config, engine_config, registry, adjust=lambda problem: of_rank(problem, shape.world_size))


def moe_choice(plan: Plan, layer_id: int) -> list[object]:
    """What decides the form of a layer's experts: operator, options and problem of each phase."""
    chosen = [plan.operators["moe", layer_id, phase] for phase in Phase]
    return [(planned.registered, planned.options, planned.problem) for planned in chosen]


def of_rank(problem: Problem, world_size: int) -> Problem:
    """A rank's MoE problems hold only its share of the experts."""
    if not isinstance(problem, MoeProblem):
        return problem
    return replace(problem, num_local_experts=problem.num_experts // world_size, world_size=world_size)
