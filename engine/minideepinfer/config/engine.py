"""How the engine runs a checkpoint: precision, step and cache budgets, placement, and the choice of operators."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from minideepinfer.config.model import describe
from minideepinfer.errors import ConfigError


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OperatorChoice(_Frozen):
    """An operator together with its own options."""

    name: str = Field(description="operator name, or `auto`")
    options: dict[str, Any] = Field(default_factory=dict, description="options of that operator, as it declares them")


Choice = str | OperatorChoice
"""An operator's name, or `{name, options}`."""


class PhaseChoice(_Frozen):
    """A choice that differs between the phases."""

    prefill: Choice | None = Field(None, description="operator for prefill rows")
    decode: Choice | None = Field(None, description="operator for decode rows")


class OperatorRule(PhaseChoice):
    """The choice for one family; the most specific wins: layers and phase, layers, phase, default."""

    default: Choice = Field("auto", description="operator where nothing more specific is said")
    layers: dict[str, Choice | PhaseChoice] = Field(
        default_factory=dict, description='by layers, e.g. `{"0-2": "naive", "5": {"decode": "fused"}}`'
    )


class CacheConfig(_Frozen):
    """The caches of all requests together."""

    layout: Literal["auto", "float32", "bf16", "released"] = Field(
        "auto",
        description="storage layout; `auto` follows `dtype`; `released` holds the formats that the model was trained "
        "with, FP8 and FP4, and needs `kv_quantization: released`",
    )
    page_tokens: int = Field(64, gt=0, lt=2**31, description="tokens per page of the global pool")
    num_pages: int = Field(
        1024, gt=0, lt=2**31, description="pages of the global pool, the page budget of the scheduler"
    )
    prefix: bool = Field(
        False,
        description="keep global entries of earlier prompts; one that begins alike runs what is new (with `replay: "
        "halo` also its tail) and, to rebuild window rings, rows before that: (W - 1) x layers with `full`, (W - 1) x "
        "layers before the candidate source with `halo`, W with `bounded`; shorter hits save nothing",
    )
    max_requests: int = Field(16, gt=0, lt=2**31, description="requests that hold window rings at the same time")


class EngramConfig(_Frozen):
    """The Engram tables."""

    placement: Literal["device", "host", "mmap"] = Field(
        "device", description="where tables live; with `mmap` they stay in the checkpoint and only rows are read"
    )


class PluginsConfig(_Frozen):
    """Which plugins are loaded."""

    ignore: tuple[str, ...] = Field(
        (), description="entry points to leave out, as `distribution:entry-point` or a whole `distribution`"
    )


class ParallelConfig(_Frozen):
    """Ranks: attention and caches are data parallel, experts and Engram tables are shared out, over the same ranks."""

    expert: int = Field(1, gt=0, description="ranks that share the experts; left out = as many as `data`")
    data: int = Field(1, gt=0, description="ranks that serve their own requests; left out = as many as `expert`")
    timeout_seconds: float = Field(
        30.0, ge=1, allow_inf_nan=False, description="most seconds until every rank has stopped when one is lost"
    )

    @model_validator(mode="before")
    @classmethod
    def _the_same(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        either = value.get("expert", value.get("data", 1))
        return {"expert": either, "data": either, **value}

    @model_validator(mode="after")
    def _one_layout(self) -> ParallelConfig:
        if self.expert != self.data:
            fits = " or ".join(f"{{expert: {n}, data: {n}}}" for n in sorted({self.expert, self.data}))
            raise ValueError(f"expert is {self.expert} and data is {self.data}; both count the same ranks: {fits}")
        return self


class EngineConfig(_Frozen):
    """Everything about a run that is not in the checkpoint. Frozen; unknown keys are refused."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute dtype; `auto` is float32 on CPU and bfloat16 on CUDA"
    )
    device: str = Field("auto", description="`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`")
    kv_quantization: Literal["released", "none"] = Field(
        "released", description="quantise-dequantise cached values as the model was trained (spec 3.11)"
    )
    activation_quantization: Literal["released", "none"] = Field(
        "none", description="quantise inputs of FP8 / FP4 products to E4M3 per 32 channels (`wo_a` never)"
    )
    replay: Literal["full", "halo", "bounded"] = Field(
        "full",
        description="prompt rows that run the layers from the candidate source on: all; as many as the last row and "
        "decode need to be exact; or the last window, an approximation",
    )
    max_tokens_per_step: int = Field(2048, gt=0, description="most rows of one step; longer prompts are chunked")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="cache budgets")
    engram: EngramConfig = Field(default_factory=EngramConfig, description="Engram tables")
    ops: dict[str, OperatorChoice | OperatorRule | str] = Field(
        default_factory=dict, description='operator choice by family, e.g. `{"attention": "naive"}`'
    )
    plugins: PluginsConfig = Field(default_factory=PluginsConfig, description="plugin loading")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="ranks")

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        kind, _, index = value.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (
            ":" in value and not (kind == "cuda" and index.isascii() and index.isdigit() and len(index) < 4)
        ):
            raise ValueError(f"device {value!r} is not one of auto, cpu, cuda, cuda:N")
        return value

    @model_validator(mode="after")
    def _layout_holds_what_is_cached(self) -> EngineConfig:
        if self.cache.layout == "released" and self.kv_quantization != "released":
            raise ValueError(
                f"cache.layout is released and kv_quantization is {self.kv_quantization}; that layout holds only "
                "values quantised as the model was trained: set kv_quantization to released, or cache.layout to auto"
            )
        return self

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(f"engine config: {describe(error)}") from None

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "engine config") -> EngineConfig:
        """Validate plain data.

        Raises:
            ConfigError: a key is unknown or a value is impossible; every problem is listed.
        """
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: holds a {type(data).__name__}; a table of settings is needed")
        try:
            return cls(**data)
        except ConfigError as error:
            raise ConfigError(str(error).replace("engine config", where, 1)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> EngineConfig:
        """Read a TOML or JSON file, told apart by its suffix.

        Raises:
            ConfigError: the file cannot be read or parsed, or holds something unknown.
        """
        file = Path(path)
        parsers = {".toml": tomllib.loads, ".json": json.loads}
        if file.suffix not in parsers:
            raise ConfigError(f"{file}: has suffix {file.suffix!r}; an engine config is .toml or .json")
        try:
            return cls.from_dict(parsers[file.suffix](file.read_text(encoding="utf-8")), str(file))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be parsed ({error})") from None
