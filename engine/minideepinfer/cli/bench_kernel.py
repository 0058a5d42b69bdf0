"""The command `mini-deepinfer bench kernel`: operators one by one, checked and then timed on named problems."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minideepinfer.errors import ConfigError, OperatorError
from minideepinfer.measure.kernels import PRESETS
from minideepinfer.operators import FAMILIES, OperatorRegistry, RegisteredOperator, load_registry

if TYPE_CHECKING:
    import torch

    from minideepinfer.measure.kernels.bench import Result
    from minideepinfer.measure.record import Record


def add_kernel(actions: Any) -> None:
    """Register the action."""
    parser = actions.add_parser("kernel", help="operators one by one: checked against the reference, then timed")
    parser.add_argument(
        "operators",
        nargs="*",
        metavar="FAMILY[:NAME]",
        help="what to time, also as DISTRIBUTION:FAMILY/NAME; everything that is installed if nothing is named",
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="v41-rank",
        help="which problems: a prefill step of one rank of four, decode steps, or small ones for any machine",
    )
    parser.add_argument("--against", metavar="FAMILY:NAME", help="show ratios to this operator too, beside naive")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="rounds; slow calls take part in fewer")
    parser.add_argument("--seed", type=int, default=0, help="of all numbers")
    parser.add_argument("--output", metavar="FILE", help="write the records there, as JSON")
    parser.set_defaults(run=_kernel)


def _kernel(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("hypothesis") is None:
        raise OperatorError(
            "bench kernel checks what it times with the conformance kit, which needs hypothesis: "
            "pip install 'mini-deepinfer[testing]'"
        )
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats}: at least 1 is needed")
    from minideepinfer.measure.facts import MachineWatch, software
    from minideepinfer.measure.kernels.records import records
    from minideepinfer.measure.rates import measured_rates
    from minideepinfer.measure.record import require_writable, write_records
    from minideepinfer.testing.checking import find_operators

    registry = load_registry()
    operators = find_operators(registry, args.operators)
    names = [name for name in args.operators if ":" in name]  # a family may have members that do not serve here
    named = find_operators(registry, names) if names else []
    against = _against(registry, args.against)
    if args.operators and against and against.declaration.family not in _families(operators):
        raise OperatorError(f"--against {args.against}: no {against.declaration.family} operator is to be timed")
    device = _device(args.device, args.preset)
    if args.output:
        require_writable(args.output)
    watch, used = MachineWatch(device), software()
    rates = measured_rates(device)
    print("\n".join(_header(args, device, watch.machine().device, used.commit, rates)), flush=True)
    results: list[Result] = []
    kept: list[Record] = []
    for problem in _measure(args, operators, named, registry, against, device, rates):
        results += problem
        if args.output:  # problem by problem, so that an interrupted run keeps what it has
            kept += records(problem, args.preset, args.against or "", watch.machine(), used, rates, args.seed)
            write_records(args.output, kept)
    if (machine := watch.machine()).throttled:
        print(f"throttled meanwhile: {', '.join(machine.throttled)}")
    return _verdict(results, named)


def _measure(
    args: argparse.Namespace,
    operators: list[RegisteredOperator],
    named: list[RegisteredOperator],
    registry: OperatorRegistry,
    against: RegisteredOperator | None,
    device: torch.device,
    rates: dict[str, float],
) -> Iterator[list[Result]]:
    """The results of every problem; a family's are printed behind its last one, or where it was interrupted."""
    from minideepinfer.measure.kernels.bench import KernelBench, entrants
    from minideepinfer.measure.kernels.table import print_family
    from minideepinfer.testing.subject import reference_operator

    for family in _families(operators):
        chosen = [operator for operator in operators if operator.declaration.family == family]
        ours = against is not None and against.declaration.family == family
        if against is not None and ours and against not in chosen:
            chosen.append(against)
        every = entrants(chosen, reference_operator(registry, family), named)
        bench = KernelBench(family, every, registry, device, rates, args.repeats, args.seed)
        start, problems = time.perf_counter(), list[list["Result"]]()
        try:
            for problem in bench.run(args.preset):
                problems.append(problem)
                yield problem
        finally:
            print_family(family, problems, time.perf_counter() - start, args.against if ours else "")


def _verdict(results: list[Result], named: list[RegisteredOperator]) -> int:
    """1 if something failed, or an operator that was named served nothing."""
    failed = sorted({result.operator.title for result in results if result.failure})
    idle = [o for o in named if not any(r.operator.registered is o and not r.obstacles for r in results)]
    timed = sum(result.time is not None for result in results)
    print(f"{timed} measured, {sum(bool(result.failure) for result in results)} failed")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    for operator in idle:
        print(f"{operator.title} was not timed on any problem")
    return 1 if failed or idle else 0


def _against(registry: OperatorRegistry, name: str | None) -> RegisteredOperator | None:
    if name is None:
        return None
    family, colon, operator = name.partition(":")
    if not colon:
        raise OperatorError(f"--against {name}: FAMILY:NAME is needed")
    return registry.get(family, operator)


def _families(operators: list[RegisteredOperator]) -> list[str]:
    return [family for family in FAMILIES if any(o.declaration.family == family for o in operators)]


def _device(name: str, preset: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise OperatorError("--device cuda: this machine has no CUDA device; cpu always works")
    if name == "cpu" and preset != "tiny":
        raise ConfigError(
            f"bench kernel: preset {preset} has the released sizes and the device is cpu; --preset tiny runs on a CPU"
        )
    return torch.device(name)


def _header(
    args: argparse.Namespace, device: torch.device, name: str, commit: str, rates: dict[str, float]
) -> list[str]:
    clock = "events on the GPU, L2 cold" if device.type == "cuda" else "wall clock, caches warm"
    reached = ", ".join(f"{key} {value:.4g}" for key, value in rates.items())
    return [
        f"operators alone, preset {args.preset}, made-up numbers; {clock}; seed {args.seed}",
        f"{name}; commit {commit[:12] or 'unknown'}; rates of this run: {reached}",
    ]
