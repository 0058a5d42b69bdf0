"""The command `mini-deepinfer ops check`: the conformance kit, operator by operator."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import warnings
from typing import Any

from minideepinfer.errors import OperatorError
from minideepinfer.operators import load_registry


def add_check(actions: Any) -> None:
    """Register the action."""
    parser = actions.add_parser("check", help="prove that operators are right: every relation of their family")
    parser.add_argument(
        "operators",
        nargs="*",
        metavar="FAMILY[:NAME]",
        help="what to check, also as DISTRIBUTION:FAMILY/NAME; everything that is installed if nothing is named",
    )
    parser.add_argument(
        "--plan",
        type=_plan,
        metavar="FAMILY=NAME,...",
        help="check these operators together, in a model, against reference operators; others only if they are named",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--profile", choices=("quick", "thorough"), default="quick", help="how hard to look")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same calls")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="operators checked at once, in N processes")
    parser.add_argument("--json", action="store_true", help="print data")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("hypothesis") is None:
        raise OperatorError("ops check needs hypothesis, which is not installed: pip install 'mini-deepinfer[testing]'")
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel's module is imported
        # The kit's NaN and infinities make numpy warn where Triton interprets; processes of --jobs inherit this.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::RuntimeWarning:triton.runtime.interpreter")
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    if args.jobs < 1:
        raise OperatorError(f"--jobs {args.jobs}: at least 1 is needed")
    if not 0 <= args.seed < 2**32:
        raise OperatorError(f"--seed {args.seed}: a number from 0 to 2**32 - 1 is needed")
    from minideepinfer.testing import report
    from minideepinfer.testing.checking import find_operators
    from minideepinfer.testing.parallel import check_operators
    from minideepinfer.testing.plans import check_plan

    registry = load_registry()
    operators = find_operators(registry, args.operators) if args.operators or not args.plan else []
    _require_device(args.device)
    if not args.json:
        print(f"profile {args.profile}, seed {args.seed}, device {args.device}", flush=True)
    reports = []
    for found in check_operators(operators, registry, args.profile, args.seed, args.device, args.jobs):
        reports.append(found)
        if not args.json:
            print("\n".join(report.lines(found)), flush=True)
    if args.plan:
        reports.append(check_plan(registry, args.plan, args.device))
        if not args.json:
            print("\n".join(report.lines(reports[-1])), flush=True)
    failed = [each.title for each in reports if not each.passed]
    if args.json:
        facts = {"profile": args.profile, "seed": args.seed, "device": args.device}
        print(json.dumps({**facts, "operators": [report.data(each) for each in reports]}, indent=1))
    else:
        what = "operators" if operators else "plans"
        print(f"{len(reports) - len(failed)} of {len(reports)} {what} passed")
    return 1 if failed else 0


def _plan(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(family and name for family, _, name in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not FAMILY=NAME,...")
    if len({family for family, _, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a family twice")
    return {family: name for family, _, name in pairs}


def _require_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise OperatorError("--device cuda: this machine has no CUDA device; cpu always works")
