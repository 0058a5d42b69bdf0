"""A ladder as data: which plans are run one after the other, and what each of them builds on."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minideepinfer.config import EngineConfig
from minideepinfer.config.model import describe
from minideepinfer.errors import ConfigError

PRESETS = ("v41-rank", "tiny")
"""Problems of `bench prefill` that have a ladder in the package."""

SHARED = ("dtype", "device", "cache", "engram", "plugins", "parallel")
"""Engine settings that all rungs have in common."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RungFile(_Frozen):
    """A rung as it is written."""

    name: str = Field(min_length=1, description="unique in the ladder")
    says: str = Field("", description="what is new, in a few words")
    builds_on: str | None = Field(None, description="an earlier rung whose settings it starts from; default: the last")
    engine: dict[str, Any] = Field({}, description="engine settings that differ from those of the rung it builds on")
    layers: int | None = Field(None, gt=0, description="first layers of the model that run; default: the ladder's")
    steps: int | None = Field(None, gt=0, description="measured steps; default: the ladder's")
    warmup: int | None = Field(None, ge=0, description="steps before them; default: the ladder's")
    gaps: bool = Field(True, description="tell the time between kernels apart; takes long where kernels are many")


class LadderFile(_Frozen):
    """A ladder as it is written, in TOML."""

    title: str = "The ladder"
    preset: str = Field("v41-rank", description="problem of `bench prefill`: v41-rank or tiny")
    seed: int = Field(0, ge=0, description="of weights, tokens and cache")
    layers: int | None = Field(None, gt=0, description="first layers of the model that run; default: all")
    steps: int = Field(5, gt=0, description="measured steps of a rung")
    warmup: int = Field(2, ge=0, description="steps before them, beside one that is checked")
    engine: dict[str, Any] = Field({}, description="engine settings of all rungs")
    rung: tuple[RungFile, ...] = Field(description="in the order in which they run")


@dataclass(frozen=True)
class Rung:
    """One plan of a ladder.

    Attributes:
        name: unique in the ladder.
        says: what is new.
        builds_on: the rung whose settings it starts from; None for the first.
        engine: its settings.
        layers: first layers of the model that run; None = all.
        steps: measured steps.
        warmup: steps before them, beside one that is checked.
        gaps: whether the time between kernels is told apart.
    """

    name: str
    says: str
    builds_on: str | None
    engine: EngineConfig
    layers: int | None
    steps: int
    warmup: int
    gaps: bool


@dataclass(frozen=True)
class Ladder:
    """Rungs on one problem; errors are taken against the first.

    Attributes:
        title: of the report.
        preset: problem of `bench prefill`.
        seed: of weights, tokens and cache.
        rungs: in order.
    """

    title: str
    preset: str
    seed: int
    rungs: tuple[Rung, ...]


def packaged_ladder(preset: str) -> Ladder:
    """The ladder that comes with a preset."""
    path = Path(str(resources.files("minideepinfer") / "data" / "ladders" / f"{preset}.toml"))
    return read_ladder(path)


def read_ladder(path: str | Path) -> Ladder:
    """Read a ladder from a TOML file.

    Raises:
        ConfigError: it cannot be read or parsed, or a key or value is wrong; names the rung and the key.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be parsed ({error})") from None
    return make_ladder(data, str(path))


def make_ladder(data: dict[str, Any], where: str = "ladder") -> Ladder:
    """A ladder from plain data; see `read_ladder`."""
    try:
        written = LadderFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_named(describe(error), data)}") from None
    if written.preset not in PRESETS:
        raise ConfigError(f"{where}: preset is {written.preset!r}, needs {' or '.join(PRESETS)}")
    if not written.rung:
        raise ConfigError(f"{where}: rung is empty, needs at least one")
    settings: dict[str, dict[str, Any]] = {}
    rungs: list[Rung] = []
    for item in written.rung:
        place = f"{where}: rung {item.name!r}"
        if item.name in settings:
            raise ConfigError(f"{place}: name is that of an earlier rung, needs its own")
        base = item.builds_on or (rungs[-1].name if rungs else None)
        if base is not None and base not in settings:
            raise ConfigError(f"{place}: builds_on is {base!r}, needs an earlier rung: {', '.join(settings) or 'none'}")
        settings[item.name] = _merged(written.engine if base is None else settings[base], item.engine)
        rungs.append(
            Rung(
                item.name,
                item.says,
                base,
                EngineConfig.from_dict(settings[item.name], f"{place}: engine"),
                item.layers or written.layers,
                item.steps or written.steps,
                written.warmup if item.warmup is None else item.warmup,
                item.gaps,
            )
        )
    _check_shared(rungs, where)
    return Ladder(written.title, written.preset, written.seed, tuple(rungs))


def _check_shared(rungs: list[Rung], where: str) -> None:
    """Refuse settings that rungs with one set of weights and one cache cannot differ in."""
    first = rungs[0]
    if first.engine.replay != "full":
        raise ConfigError(
            f"{where}: rung {first.name!r}: engine.replay is {first.engine.replay!r}, the first needs full"
        )
    if (parallel := first.engine.parallel) != type(parallel)():
        raise ConfigError(
            f"{where}: engine.parallel is {parallel.model_dump()}; a ladder runs in one process, needs none"
        )
    for rung in rungs[1:]:
        for key in SHARED:
            own, common = getattr(rung.engine, key), getattr(first.engine, key)
            if own != common:
                raise ConfigError(
                    f"{where}: rung {rung.name!r}: engine.{key} is {own!r}; one session shares weights and cache, so "
                    f"all rungs need that of {first.name!r}, {common!r}"
                )


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes; tables are merged by key, a family's choice is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _named(text: str, data: dict[str, Any]) -> str:
    """A description in which rungs are named, not numbered."""
    rungs = data.get("rung")
    for number, rung in reversed(list(enumerate(rungs))) if isinstance(rungs, list) else ():
        if isinstance(rung, dict) and isinstance(rung.get("name"), str):
            text = text.replace(f"rung.{number}.", f"rung {rung['name']!r}: ")
    return text
