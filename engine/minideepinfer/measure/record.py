"""A measurement as data: what ran, on what, and what came out. Every benchmark writes it, `bench compare` reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from minideepinfer.config.model import describe
from minideepinfer.errors import ConfigError

RECORD_VERSION: Literal[1] = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(_Frozen):
    """Where it ran; two records are comparable only if `device` and `driver` agree."""

    device: str = Field(description="name of the GPU, or the processor's")
    driver: str = Field("", description="GPU driver; empty on a CPU")
    power_limit_watts: float | None = None
    sm_clock_mhz: tuple[int, int] | None = Field(None, description="before and after the measurement")
    throttled: tuple[str, ...] = Field((), description="reasons for lower clocks that were active, as the driver says")


class Software(_Frozen):
    """With what it ran."""

    commit: str = Field(description="of this project; empty where it is no checkout")
    dirty: bool = Field(description="whether tracked files differed from the commit")
    versions: dict[str, str] = Field(description="python, torch, triton, mini-deepinfer and plugins' distributions")


class Measurement(_Frozen):
    """One quantity, repeated. `low` and `high` are the 20th and 80th percentiles."""

    median: float
    low: float
    high: float
    repeats: int = Field(ge=1)
    unit: Literal["ms", "tokens/s", "GB/s", "TFLOP/s", "bytes", "rows", "1"] = "ms"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"median {self.median} is not between low {self.low} and high {self.high}")
        return self

    @property
    def spread(self) -> float:
        """`(high - low) / median`; 0 where the median is."""
        return (self.high - self.low) / self.median if self.median else 0.0


class Record(_Frozen):
    """One benchmark result.

    Attributes:
        benchmark: what was run: `kernel`, `parts` of one (benchmarks/), `prefill`, `decode`, `prefix` or `ladder`.
        name: within a benchmark, e.g. `attention:fused` or a rung of the ladder; unique in a file.
        headline: the first line of its report; says what is absent or made up.
        problem: what was measured, in plain data; equal problems are comparable.
        precision: the precision switches: dtype, kv_quantization, activation_quantization, replay, cache layout.
        plan: operators with providers and versions, as `Plan.to_dict` has them.
        seed: of everything random.
        values: measured quantities by name, e.g. `step`, `tokens_per_second`, `ratio_to_naive`.
        stages: exclusive milliseconds of each stage in a step; a stage that runs inside another one has none.
        inside: stages that are fused into another: name -> the stage that holds it.
        floors: least milliseconds by name of a value or stage, from rates of the same run.
        rates: of the same run: `copy_tb_s`, `bf16_tflops`, `fp8_tflops`.
        errors: against the reference on the same inputs, by name; relative unless the name says otherwise.
        notes: sentences that a reader needs.
    """

    version: Literal[1] = RECORD_VERSION
    benchmark: Literal["kernel", "parts", "prefill", "decode", "prefix", "ladder"]
    name: str
    headline: str
    machine: Machine
    software: Software
    problem: dict[str, Any]
    precision: dict[str, str] = {}
    plan: list[dict[str, Any]] | dict[str, Any] | None = None
    seed: int
    values: dict[str, Measurement]
    stages: dict[str, float] = {}
    inside: dict[str, str] = {}
    floors: dict[str, float] = {}
    rates: dict[str, float] = {}
    errors: dict[str, float] = {}
    notes: tuple[str, ...] = ()


def require_writable(path: str | Path) -> None:
    """Find out whether a file can be written, which is better known before minutes of measuring; leaves nothing behind.

    Raises:
        ConfigError: it cannot.
    """
    path = Path(path)
    try:
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_records(path: str | Path, records: list[Record]) -> None:
    """Write a file of records, which `read_records` reads back equal; who interrupts it keeps what was there before.

    Raises:
        ConfigError: the file cannot be written.
    """
    text, path = json.dumps([record.model_dump(mode="json") for record in records], indent=1) + "\n", Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe, a terminal
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        except PermissionError:  # the file may be written, and nothing beside it
            path.write_text(text, encoding="utf-8")
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


def read_records(path: str | Path) -> list[Record]:
    """Read a file of records.

    Raises:
        ConfigError: it cannot be read, or holds something else; names the record and the field.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be parsed ({error})") from None
    if not isinstance(data, list):
        raise ConfigError(f"{path}: holds a {type(data).__name__}; a list of records is needed")
    records = []
    for index, item in enumerate(data):
        try:
            records.append(Record.model_validate(item))
        except ValidationError as error:
            raise ConfigError(f"{path}: record {index}: {describe(error)}") from None
    return records
