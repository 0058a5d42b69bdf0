"""Comm operators between processes: C1 and M4 on 2 and 4 ranks, and experts behind them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minideepinfer.errors import OperatorError
from minideepinfer.operators import CommProblem, PlannedOperator, Problem, RegisteredOperator
from minideepinfer.operators.build import build
from minideepinfer.operators.support import obstacles
from minideepinfer.testing.contract import Crash, Outputs, Violation
from minideepinfer.testing.families.moe_ranks import all_experts_here, on_ranks, split
from minideepinfer.testing.processes import started
from minideepinfer.testing.recipes.batch import facts
from minideepinfer.testing.recipes.comm import CommCase
from minideepinfer.testing.recipes.moe import MoeCase, MoeRecipe
from minideepinfer.testing.recipes.ranks import RankCase, RanksRecipe, expected
from minideepinfer.testing.subject import Subject, difference, on_device
from minideepinfer.testing.tensors import map_tensors

SIZES = (2, 4)
"""Numbers of processes tried."""
Runs = Callable[[Sequence[RankCase]], Sequence[Outputs]]
"""Calls every rank's comm operator with its part."""


def scenarios(size: int, dtype: str) -> list[RanksRecipe]:
    """Ragged ranks, ranks without tokens, all experts on the last rank, no token at all; hidden 32 and 1030."""
    ragged = (3, *[0] * (size - 2), 1)
    base = RanksRecipe(ragged, dtype)
    return [
        base,
        replace(base, routing="last"),
        replace(base, routing="first", topk=4),
        replace(base, routing="none"),
        replace(base, counts=(0,) * size),
        replace(base, counts=(0,) * (size - 1) + (5,), hidden_size=1030, topk=4),
        replace(base, counts=tuple(range(1, size + 1)), hidden_size=1030, topk=6, seed=1),
        replace(base, counts=(300, *[0] * (size - 1)), topk=6, seed=2),
    ]


def check_comm(run: Runs, recipe: RanksRecipe) -> None:
    """Every rank gets what it must, exactly.

    Raises:
        Violation: one does not.
    """
    cases = recipe.build()
    for rank, (found, wanted) in enumerate(zip(run(cases), expected(cases), strict=True)):
        for name, tensor in wanted.items():
            same = found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
            if not same or not bool((found[name] == tensor).all()):
                raise Violation(f"rank {rank} of {len(cases)}, {recipe}: {name}: {difference(found[name], tensor)}")


@dataclass(frozen=True)
class _Request:
    """What a process is to build and call: operators by family, each with its problem, and the case.

    `counts` are the rows of each rank where the case wants a `TokenExchange`, not the comm operator itself.
    """

    operators: Mapping[str, tuple[RegisteredOperator, Problem]]
    device: str
    case: Any
    counts: Sequence[int] | None = None


_BUILT: dict[Any, Any] = {}
"""Operators of this process."""


def serve(rank: int, request: _Request) -> Outputs:
    """Runs in a process: call the operators with the case, on the rank's own device."""
    device = torch.device(request.device, rank) if request.device == "cuda" else torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    built = {family: _built(*operator, device) for family, operator in request.operators.items()}
    if request.counts is not None:
        built["comm"] = built["comm"].prepare(request.counts)
    case = map_tensors(request.case, lambda tensor: tensor.to(device))
    outputs = case.run(*built.values())
    named = outputs if isinstance(outputs, dict) else {"y": outputs}
    return {name: tensor.cpu() for name, tensor in named.items()}


def _built(registered: RegisteredOperator, problem: Problem, device: torch.device) -> Any:
    key = (registered.declaration.build, problem)
    if key not in _BUILT:
        options = registered.declaration.options()
        _BUILT[key] = build(PlannedOperator(registered, options, problem, "explicit: conformance kit", {}), device)
    return _BUILT[key]


def _in_processes(subject: Subject, requests: Sequence[_Request]) -> list[Outputs]:
    """The outputs of every rank."""
    if len(requests) == 1:
        return [serve(0, requests[0])]
    try:
        answers: list[Outputs] = started(len(requests)).call(serve, requests)
    except OperatorError as error:
        raise Crash(f"{subject.registered.title}: {error}") from None
    return answers


def has_devices(subject: Subject, ranks: int) -> bool:
    """Whether this machine has a device for each rank; if not, that is counted."""
    if subject.device.type != "cuda" or torch.cuda.device_count() >= ranks:
        return True
    subject.tally.refused[f"has {torch.cuda.device_count()} CUDA devices, needs {ranks} for {ranks} ranks"] += 1
    return False


def _portable(registered: RegisteredOperator) -> RegisteredOperator:
    """The operator without its own check, which need not be importable."""
    declaration = replace(registered.declaration, refuses=None)
    return RegisteredOperator(declaration, registered.distribution, registered.version, registered.entry_point)


def between_processes(subject: Subject, recipe: RanksRecipe) -> bool:
    """The calls of a recipe between processes; whether the operator serves so many ranks."""

    def run(cases: Sequence[RankCase]) -> list[Outputs]:
        operator = _portable(subject.registered)
        requests = [_Request({"comm": (operator, subject.problem(case))}, subject.device.type, case) for case in cases]
        subject.tally.ran += len(cases)
        return _in_processes(subject, requests)

    served = has_devices(subject, len(recipe.counts)) and subject.serves(recipe.build()[0].problem)
    if served:
        check_comm(run, recipe)
    return served


def some_between_processes(subject: Subject, case: CommCase) -> None:
    """As many tokens as a call on one rank has, shared out unevenly and routed unevenly, give every rank its own."""
    seed = int(case.topk_ids.sum()) + 31 * case.units + case.x.shape[1]
    dtype = str(case.x.dtype).removeprefix("torch.")
    chance = random.Random(seed)
    for size in (1, *SIZES):
        of = [chance.randrange(size) for _ in range(case.units)]
        counts = tuple(of.count(rank) for rank in range(size))
        routing = chance.choice(("any", "any", "first", "last", "none"))
        between_processes(subject, RanksRecipe(counts, dtype, case.x.shape[1], case.topk_ids.shape[1], routing, seed))


def with_experts(subject: Subject) -> None:
    """The reference experts behind a comm operator give what they give on one rank, on 1, 2 and 4 ranks."""
    moe = subject.reference_operator("moe")
    for whole, counts in _wholes(subject.dtypes, (1, *SIZES)):
        if has_devices(subject, len(counts)) and subject.serves(comm_problem(whole, len(counts))):
            check_chain(subject, moe, subject.registered, whole, counts)


def with_comm(subject: Subject) -> None:
    """A moe operator gives the same on one rank and on several, with every comm operator that serves these."""
    for whole, counts in _wholes(subject.dtypes, (1, *SIZES)):
        for comm in _comms(subject, whole, len(counts)):
            check_chain(subject, subject.registered, comm, whole, counts)


def experts_between_processes(subject: Subject, case: MoeCase) -> None:
    """A call of one rank gives the same on 2 or 4 ranks, shared out unevenly; not asked of interpreted kernels."""
    chance = random.Random(31 * case.units + case.x.shape[1] + case.problem.topk + case.weights.experts.num_local)
    size = chance.choice(SIZES)
    if subject.interpreted or case.weights.experts.num_local < size:
        return
    whole = all_experts_here(case, size)
    of = [chance.randrange(size) for _ in range(case.units)]
    for comm in _comms(subject, whole, size):
        check_chain(subject, subject.registered, comm, whole, [of.count(rank) for rank in range(size)])


def _comms(subject: Subject, whole: MoeCase, ranks: int) -> list[RegisteredOperator]:
    """Comm operators that serve so many ranks here; none if the operator or the machine does not."""
    if not has_devices(subject, ranks) or not subject.serves(on_ranks(whole, [[]] * ranks)[0].problem):
        return []
    problem = on_device(comm_problem(whole, ranks), subject.device)
    return [comm for comm in subject.registry.operators("comm") if not obstacles(comm.declaration, problem)]


def _wholes(dtypes: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[MoeCase, Sequence[int]]]:
    """Calls of one rank, and how many of their tokens each of several ranks has."""
    recipe = MoeRecipe(tokens=6, num_experts=8, num_local_experts=8, topk=3, hidden_size=128, intermediate_size=64)
    for dtype in dtypes:
        for given in ("gate", "one"):
            whole = replace(recipe, dtype=dtype, routing=given).build()
            for size in sizes:
                yield replace(whole, x=whole.x.nan_to_num(1.0)), (4, *[0] * (size - 2), 2) if size > 1 else (6,)


def check_chain(
    subject: Subject, moe: RegisteredOperator, comm: RegisteredOperator, whole: MoeCase, counts: Sequence[int]
) -> None:
    """Experts and communication together, in one process for each rank, against the reference on one rank."""
    from minideepinfer.testing.families.moe import FAMILY

    cases = on_ranks(whole, split(whole.units, counts))
    requests = []
    for case in cases:
        problems = {"moe": subject.problem(case), "comm": comm_problem(whole, len(counts))}
        operators = {"moe": (_portable(moe), problems["moe"]), "comm": (_portable(comm), problems["comm"])}
        requests.append(_Request(operators, subject.device.type, case, counts))
    subject.tally.ran += len(cases)
    found = _in_processes(subject, requests)
    y: Tensor = torch.cat([outputs["y"] for outputs in found])
    judge = Subject(moe, subject.registry, FAMILY, subject.device)
    judge.family.compare(judge, whole, {"y": y}, judge.reference(whole), 1.0)
    subject.tally.worst = max(subject.tally.worst, judge.tally.worst)


def comm_problem(case: MoeCase, size: int) -> CommProblem:
    """What a MoE call asks of its comm operator."""
    problem = case.problem
    shared = facts(case.x.dtype, problem.phase, problem.activation_quantization)
    shared |= {"device": problem.device, "capability": problem.capability}
    return CommProblem(**shared, hidden_size=problem.hidden_size, num_experts=problem.num_experts, world_size=size)
