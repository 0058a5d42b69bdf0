"""The released `config.json` as frozen models: unknown keys are refused, impossible schedules are refused."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from minideepinfer.config.schedule import LayerSchedule, check_schedule, layer_schedule
from minideepinfer.errors import CheckpointError, ConfigError

PositiveInt = Field(gt=0)
PositiveInteger = Annotated[int, PositiveInt]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RopeScaling(_Frozen):
    """YaRN parameters; they change frequencies only (spec 3.4)."""

    rope_type: Literal["yarn"]
    factor: float = PositiveInt
    beta_fast: float = PositiveInt
    beta_slow: float = PositiveInt
    original_max_position_embeddings: int = PositiveInt


class QuantizationSpec(_Frozen):
    """Weight quantisation of the checkpoint (spec 1.1)."""

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic"]
    weight_block_size: tuple[PositiveInteger, PositiveInteger]
    scale_fmt: Literal["ue8m0"]
    expert_dtype: Literal["fp4"]


class TextConfig(_Frozen):
    """Facts of the text model and its draft, named as released (spec 1.2)."""

    model_type: Literal["deepseek_v41_text"]
    dtype: Literal["bfloat16"] = "bfloat16"
    vocab_size: int = PositiveInt
    hidden_size: int = PositiveInt
    moe_intermediate_size: int = PositiveInt
    num_hidden_layers: int = PositiveInt
    num_attention_heads: int = PositiveInt
    num_key_value_heads: Literal[1]
    head_dim: int = PositiveInt
    qk_rope_head_dim: int = PositiveInt
    q_lora_rank: int = PositiveInt
    o_lora_rank: int = PositiveInt
    o_groups: int = PositiveInt
    hidden_act: Literal["silu"]
    swiglu_limit: float = PositiveInt
    rms_norm_eps: float = PositiveInt
    attention_bias: Literal[False]
    attention_dropout: float = Field(ge=0)
    initializer_range: float = PositiveInt
    use_cache: bool
    tie_word_embeddings: Literal[False]
    max_position_embeddings: int = PositiveInt
    rope_theta: float = PositiveInt
    rope_scaling: RopeScaling
    n_routed_experts: int = PositiveInt
    n_shared_experts: int = Field(ge=0, le=1)
    num_experts_per_tok: int = PositiveInt
    scoring_func: Literal["sqrtsoftplus"]
    topk_method: Literal["noaux_tc"]
    norm_topk_prob: Literal[True]
    routed_scaling_factor: float = PositiveInt
    sliding_window: int = PositiveInt
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float = PositiveInt
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int = PositiveInt
    index_head_dim: int = PositiveInt
    index_topk: int = PositiveInt
    candidate_source_layer_id: int = Field(ge=0)
    candidate_topk_blocks: int = PositiveInt
    candidate_block_size: int = PositiveInt
    hc_mult: int = PositiveInt
    hc_sinkhorn_iters: int = Field(gt=0, le=1000)
    hc_eps: float = PositiveInt
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int = Field(ge=2)
    engram_vocab_size: int = PositiveInt
    engram_n_heads: int = PositiveInt
    engram_head_dim: int = PositiveInt
    engram_pad_token_id: int = Field(ge=0)
    engram_compressed_vocab_size: int = PositiveInt
    num_nextn_predict_layers: int = Field(ge=0)
    dspark_block_size: int = PositiveInt
    dspark_noise_token_id: int = Field(ge=0)
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int = PositiveInt
    dspark_n_routed_experts: int = PositiveInt
    dspark_num_experts_per_tok: int = PositiveInt
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _possible(self) -> TextConfig:
        problems = check_schedule(self)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @cached_property
    def layers(self) -> tuple[LayerSchedule, ...]:
        """What each of the `num_hidden_layers` blocks does, in order."""
        return layer_schedule(self)

    @property
    def engram_columns(self) -> int:
        """Table rows per token and Engram layer: one per n-gram order and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


class VisionConfig(_Frozen):
    """The vision tower: known, never run here; only its keys are checked."""

    model_type: Literal["deepseek_v41_vision"] = "deepseek_v41_vision"
    num_hidden_layers: int = Field(ge=0)
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    patch_size: int | None = None
    rope_theta: float | None = None
    downsample_ratio: int | None = None
    max_image_tokens: int | None = None
    min_pixels: int | None = None
    max_wh_ratio: float | None = None


class ModelConfig(_Frozen):
    """A checkpoint's `config.json` (spec 1.1)."""

    architectures: tuple[Literal["DeepseekV41ForCausalLM"], ...]
    model_type: Literal["deepseek_v41"]
    dtype: Literal["bfloat16"]
    transformers_version: str | None = None
    bos_token_id: int = Field(ge=0)
    eos_token_id: int = Field(ge=0)
    pad_token_id: int = Field(ge=0)
    image_token_id: int = Field(ge=0)
    tie_word_embeddings: Literal[False] = False
    quantization_config: QuantizationSpec
    text_config: TextConfig
    vision_config: VisionConfig

    @model_validator(mode="after")
    def _ids_in_vocabulary(self) -> ModelConfig:
        vocab = self.text_config.vocab_size
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            if getattr(self, name) >= vocab:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {vocab}")
            nested = getattr(self.text_config, name, None)
            if nested not in (None, getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)} at the top and {nested} in text_config")
        if self.image_token_id in (self.bos_token_id, self.eos_token_id):
            raise ValueError(f"image_token_id {self.image_token_id} is also the begin or end token")
        return self

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "config") -> ModelConfig:
        """Validate a parsed `config.json`.

        Args:
            data: the parsed object.
            where: how to call it in an error.

        Raises:
            ConfigError: a key is unknown, missing or impossible; every problem is listed.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{where}: {describe(error)}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read `config.json`, given as the file or as the directory that holds it.

        Raises:
            CheckpointError: there is no such file, or it is not JSON.
            ConfigError: see `from_dict`.
        """
        file = Path(path)
        try:
            if file.is_dir():
                file = file / "config.json"
            data = json.loads(file.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read ({error.strerror or error}); a checkpoint needs it"
            ) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: is not JSON ({error})") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{file}: holds a {type(data).__name__}; a JSON object is needed")
        return cls.from_dict(data, str(file))


def describe(error: ValidationError) -> str:
    """One line for all problems pydantic found: `path: what is wrong (found ...)`."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "the whole"
        found = "" if item["type"] in ("missing", "value_error") else f" (found {item['input']!r:.120})"
        hint = "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        lines.append(f"{path}: {hint}{found}")
    return "; ".join(lines)
