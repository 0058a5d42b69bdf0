"""The arguments `--config`, `--set` and `--ops`, which every command that needs an engine configuration shares."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minideepinfer.config import EngineConfig
from minideepinfer.errors import ConfigError


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `engine_config` reads."""
    group = parser.add_argument_group("engine configuration, later arguments win")
    group.add_argument("--config", metavar="FILE", help="engine configuration, .toml or .json")
    group.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        type=_setting,
        default=[],
        help="one setting, e.g. cache.num_pages=64; the value is JSON, or else a string",
    )
    group.add_argument(
        "--ops",
        dest="settings",
        metavar="FAMILY=NAME,...",
        action="extend",
        type=_operators,
        default=[],
        help="operators by family, e.g. attention=naive,moe=naive",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the arguments describe: the file's, if any, changed by each setting in turn.

    Raises:
        ConfigError: the file or a setting is wrong.
    """
    data = EngineConfig.from_file(args.config).model_dump(exclude_unset=True) if args.config else {}
    for key, value in args.settings:
        _assign(data, key, value)
    return EngineConfig.from_dict(data)


def _assign(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    table = data
    for depth, name in enumerate(parents, start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--set {key}: {'.'.join(parents[:depth])} is {table!r}, not a table; set it as a whole, as JSON"
            )
    table[last] = value


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _operators(text: str) -> list[tuple[str, str]]:
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(family and name for family, _, name in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not FAMILY=NAME,...")
    return [(f"ops.{family}", name) for family, _, name in pairs]
