"""The runs of a golden set that the engine can repeat, and how far it may be off in each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from minideepinfer.config import EngineConfig, TextConfig
from minideepinfer.errors import ConfigError, VerificationError
from minideepinfer.testing.golden_manifest import GoldenSequence

CLEAR_MARGIN = 1e-5
"""A discrete choice is compared only where the golden scores at the cut are further apart than this."""

_NAME = re.compile(r"(fp32|bf16)-(q|noq)(-a8)?")
_RECORDED = {"engram": "engram", "mhc": "glue", "attention": "attn", "experts": "ffn"}
"""What the manifest calls a column of the report."""
_FIXED_BY_VARIANT = ("dtype", "kv_quantization", "activation_quantization", "replay")


@dataclass(frozen=True)
class Variant:
    """Precision switches, named as the runs of a golden set: `fp32-noq`, `fp32-q`, `fp32-q-a8`, `bf16-q`, ...

    Attributes:
        name: the run.
        dtype: `float32` or `bfloat16`.
        quantizes_kv: cache boundaries are on.
        quantizes_activations: inputs of FP8 and FP4 products are quantised.
    """

    name: str
    dtype: str
    quantizes_kv: bool
    quantizes_activations: bool

    @classmethod
    def find(cls, name: str) -> Variant | None:
        """The variant of this name, None if no run is called so."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        precision, boundaries, activations = match.groups()
        dtype = "float32" if precision == "fp32" else "bfloat16"
        return cls(name, dtype, boundaries == "q", activations is not None)

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant of this name.

        Raises:
            VerificationError: no run is called so.
        """
        variant = cls.find(name)
        if variant is None:
            raise VerificationError(
                f"variant {name!r} is unknown; variants are fp32|bf16, then -q|-noq, then -a8 or not"
            )
        return variant

    @property
    def exact(self) -> bool:
        """Nothing is rounded or quantised, so that only the order of sums differs."""
        return self.dtype == "float32" and not self.quantizes_kv and not self.quantizes_activations

    @property
    def inputs(self) -> str:
        """The run whose tensors go into modules: the same one in float32."""
        return self.name.replace("bf16", "fp32")

    @property
    def bf16_figures(self) -> dict[str, float]:
        """Figures of `golden/README.md` for bfloat16, by column of the report."""
        kind = "a8" if self.quantizes_activations else "q" if self.quantizes_kv else "noq"
        return {
            "engram": 0.04,
            "mhc": 0.0035,
            "norm": 0.0035,
            "attention": {"noq": 0.02, "q": 0.10, "a8": 0.11}[kind],
            "experts": {"noq": 0.006, "q": 0.006, "a8": 0.08}[kind],
            "selection": {"noq": 0.05, "q": 0.09, "a8": 0.16}[kind],
        }

    def engine_config(self, base: EngineConfig, num_pages: int, replay: str) -> EngineConfig:
        """A user's configuration with this variant's switches, and caches for one sequence.

        Args:
            base: operators, device and so on.
            num_pages: pages that the longest sequence needs.
            replay: `full` or `bounded`.

        Raises:
            ConfigError: `base` sets what the variant decides.
        """
        if fixed := [key for key in _FIXED_BY_VARIANT if key in base.model_fields_set]:
            raise ConfigError(f"verify: {', '.join(fixed)} cannot be set, the variant decides; choose with --variant")
        data = base.model_dump(exclude_unset=True)
        data["cache"] = {**data.get("cache", {}), "num_pages": num_pages, "max_requests": 1}
        return EngineConfig(
            **{
                **data,
                "dtype": self.dtype,
                "kv_quantization": "released" if self.quantizes_kv else "none",
                "activation_quantization": "released" if self.quantizes_activations else "none",
                "replay": replay,
            }
        )


@dataclass(frozen=True)
class ModuleBounds:
    """How far a module may be off on golden inputs: the figures of `golden/README.md`.

    In bfloat16 these are the rounded worst errors of the oracle's own modules. The manifest has the unrounded ones, by
    sequence and layer (`teacher_forced`); where one is larger than its rounded figure, it is the bound.
    """

    variant: Variant
    sequence: GoldenSequence
    config: TextConfig

    def __call__(self, module: str, measure: str, layer: int | None) -> float | None:
        """Largest error that passes; None = reported only.

        Args:
            module: a column of the report.
            measure: any.
            layer: block, None outside of blocks.
        """
        if module in ("embed", "hash"):
            return 0.0
        if self.variant.dtype == "float32":
            return 1e-5 if self.variant.exact else 1e-3
        figure = self.variant.bf16_figures.get(module)
        recorded = self._recorded(module, layer)
        return figure if figure is None or recorded is None else max(figure, recorded)

    def _recorded(self, module: str, layer: int | None) -> float | None:
        if module not in _RECORDED or layer is None:
            return None
        errors = self.sequence.teacher_forced.get(f"{self.variant.inputs} inputs into {self.variant.name}", {})
        index = self.config.layers[layer].engram_index if module == "engram" else layer
        values = errors.get(_RECORDED[module], [])
        return _upper_end(values[index]) if index is not None and index < len(values) else None


def _upper_end(value: float) -> float:
    """The largest number that three significant digits show as `value`."""
    return value + 0.5 * 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else value


def end_to_end_bound(variant: Variant, part: str, measure: str) -> float | None:
    """Largest error of a whole run; None = reported only.

    Only without rounding and quantisation can there be one: else a single flipped code snowballs.

    Args:
        variant: the run.
        part: `prefill`, `prefill+decode` or `bounded`.
        measure: see `Cell`.
    """
    if not variant.exact:
        return None
    if part == "bounded":
        return 1e-4 if measure == "whole" else None
    return {"median token": 1e-5, "whole": 1e-4, "rows": 0.0}.get(measure)
