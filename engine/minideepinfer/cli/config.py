"""The command `mini-deepinfer config`."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("config", help="show the engine configuration")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="the effective engine configuration as TOML, defaults included")
    add_engine_options(show)
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    data = engine_config(args).model_dump(mode="json", exclude_none=True)
    print(json.dumps(data, indent=1) if args.json else "\n".join(toml_lines(data)))
    return 0


def toml_lines(data: dict[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    """Plain data as TOML: values first, then each non-empty table.

    Raises:
        ConfigError: a value is null, which TOML cannot hold.
    """
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in data.items() if key not in tables]
    if path and (lines or not tables):
        lines.insert(0, f"[{'.'.join(map(_key, path))}]")
    for key, table in tables.items():
        lines += [*([""] if lines else []), *toml_lines(table, (*path, key))]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _value(value: Any) -> str:
    if value is None:
        raise ConfigError("config show: a value is null, which TOML cannot hold; --json shows it")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
