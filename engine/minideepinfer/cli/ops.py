"""The command `mini-deepinfer ops`: which operators exist, and which ones a model would run with."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minideepinfer.cli.ops_check import add_check
from minideepinfer.cli.options import add_engine_options, engine_config
from minideepinfer.operators import FAMILIES, RegisteredOperator, load_registry


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser("ops", help="list the operators, explain the choice among them, or check them")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every operator of every installed plugin")
    add_engine_options(listing)
    listing.add_argument("--json", action="store_true", help="print data")
    listing.set_defaults(run=_list)
    explain = actions.add_parser("explain", help="the plan for a model on this machine, and why")
    explain.add_argument("--model", default="tiny", help="a checkpoint directory, a config.json, or tiny (the default)")
    add_engine_options(explain)
    explain.add_argument("--json", action="store_true", help="print data")
    explain.set_defaults(run=_explain)
    add_check(actions)


def _list(args: argparse.Namespace) -> int:
    registry = load_registry(engine_config(args).plugins.ignore)
    operators = [operator for family in FAMILIES for operator in registry.operators(family)]
    if args.json:
        print(json.dumps({"operators": [_describe(operator) for operator in operators]}, indent=1))
        return 0
    rows = [
        (f"{o.declaration.family}:{o.name}", o.declaration.tier, f"{o.distribution} {o.version}", o.declaration.summary)
        for o in operators
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        print("  ".join([*map(str.ljust, row[:3], widths), row[3]]))
    return 0


def _describe(operator: RegisteredOperator) -> dict[str, Any]:
    declaration = operator.declaration
    support, properties = declaration.support, declaration.properties
    return {
        "family": declaration.family,
        "name": declaration.name,
        "distribution": operator.distribution,
        "version": operator.version,
        "entry_point": operator.entry_point,
        "summary": declaration.summary,
        "source": declaration.source,
        "tier": declaration.tier.value,
        "priority": declaration.priority,
        "accepts": declaration.accepts,
        "emits": declaration.emits,
        "support": vars(support),
        "properties": vars(properties),
        "tolerances": [vars(row) for row in declaration.tolerances],
        "options": declaration.options.model_json_schema().get("properties", {}),
        "build": declaration.build,
    }


def _explain(args: argparse.Namespace) -> int:
    from minideepinfer.checkpoint.verify import directory_of
    from minideepinfer.config import ModelConfig
    from minideepinfer.operators import resolve
    from minideepinfer.runtime import problems

    config = engine_config(args)
    registry = load_registry(config.plugins.ignore)
    model = ModelConfig.from_file(directory_of(args.model))
    device = problems.resolve_device(config)
    capability = problems.device_capability(device)
    plan = resolve(registry, config, problems.layer_problems(model, config, device.type, capability))
    dtype = problems.resolve_dtype(config, device.type)
    machine = {
        "device": str(device),
        "capability": capability,
        "dtype": dtype,
        "cache_layout": problems.resolve_cache_layout(config, dtype),
    }
    if args.json:
        print(json.dumps({**machine, **plan.to_dict()}, indent=1))
        return 0
    print(f"device {device}, dtype {dtype}, cache layout {machine['cache_layout']}")
    print("\n".join(plan.lines()))
    if rejections := plan.rejection_lines():
        print("\nnot taken:", *rejections, sep="\n")
    return 0
