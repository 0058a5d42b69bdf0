"""Why an operator cannot serve a problem, in words."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec

from minideepinfer.operators.declaration import OperatorDeclaration, Support
from minideepinfer.operators.problem import AttentionProblem, Problem


def obstacles(declaration: OperatorDeclaration, problem: Problem) -> tuple[str, ...]:
    """Everything that keeps an operator from serving a problem.

    Args:
        declaration: the operator.
        problem: a problem of its family.

    Returns:
        One "has X, needs Y" per obstacle; empty if it serves. A `refuses` that fails is an obstacle too.
    """
    return (*_limits(declaration.support, problem), *_layouts(declaration, problem), *_own_check(declaration, problem))


def _limits(support: Support, problem: Problem) -> list[str]:
    found = []
    if not support.serves(problem.device):
        way_out = " (or TRITON_INTERPRET=1, to have its kernels interpreted)" if support.interpreted else ""
        found.append(f"has device {problem.device}, needs {' or '.join(support.devices) or 'none'}{way_out}")
    for what, has, accepted in (
        ("dtype", problem.dtype, support.dtypes),
        ("phase", problem.phase, support.phases),
    ):
        if has not in accepted:
            found.append(f"has {what} {has}, needs {' or '.join(accepted) or 'none'}")
    low, high = support.min_capability, support.max_capability
    if problem.device == "cuda" and problem.capability is not None:
        if low is not None and problem.capability < low:
            found.append(f"has compute capability {_dotted(problem.capability)}, needs at least {_dotted(low)}")
        if high is not None and problem.capability > high:
            found.append(f"has compute capability {_dotted(problem.capability)}, needs at most {_dotted(high)}")
    found += [f"has no module {name}, needs it" for name in support.requires if find_spec(name) is None]
    return found


def _layouts(declaration: OperatorDeclaration, problem: Problem) -> list[str]:
    found = []
    for field in fields(problem):
        role = field.name.removesuffix("_layout")
        if role == field.name or (role == "selection" and _has_no_selection(problem)):
            continue
        known = declaration.accepts.get(role, ()) + declaration.emits.get(role, ())
        if (has := getattr(problem, field.name)) not in known:
            found.append(f"has {role} layout {has}, needs {' or '.join(known) or 'none (it declares no such layout)'}")
    return found


def _own_check(declaration: OperatorDeclaration, problem: Problem) -> list[str]:
    if declaration.refuses is None:
        return []
    try:
        found = declaration.refuses(problem)
    except Exception as error:
        return [f"its own check failed: {type(error).__name__}: {error}"]
    if not isinstance(found, (list, tuple)) or not all(isinstance(reason, str) for reason in found):
        return [f"its own check returned {found!r}, needs a list of sentences"]
    return list(found)


def _has_no_selection(problem: Problem) -> bool:
    return isinstance(problem, AttentionProblem) and not problem.compress_ratio


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
