"""`bench kernel` on a CPU: what is timed is right, what is wrong is not timed, and everything is kept."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import minideepinfer.cli.bench_kernel as command
import pytest
import torch
from fake_plugins import declaration
from measured import within_budget
from minideepinfer.cli.main import main
from minideepinfer.errors import OperatorError
from minideepinfer.measure.kernels import PRESETS, kernel_family
from minideepinfer.measure.kernels.bench import Entrant, KernelBench, entrants, own_cost
from minideepinfer.measure.kernels.records import plain_data, ratio
from minideepinfer.measure.kernels.table import print_family
from minideepinfer.measure.record import Measurement, Record, read_records
from minideepinfer.operators import FAMILIES, Cost, OperatorOptions, RegisteredOperator, Tier, load_registry
from minideepinfer.testing.recipes.batch import BatchRecipe
from minideepinfer.testing.subject import including
from mutants import Mutant, attention, comm, epilogue, indexer, moe, residual

CPU = torch.device("cpu")
REGISTRY = load_registry()
RATES = {"copy_tb_s": 0.01, "float32_tflops": 0.1}
MUTANTS = {
    "attention": attention,
    "indexer": indexer,
    "moe": moe,
    "comm": comm,
    "residual": residual,
    "epilogue": epilogue,
}


def naive(family: str) -> RegisteredOperator:
    """The reference operator."""
    return REGISTRY.get(family, "single" if family == "comm" else "naive")


def bench(operators: Sequence[RegisteredOperator], **arguments: Any) -> KernelBench:
    """A benchmark of operators of one family."""
    family = operators[0].declaration.family
    registry = including(REGISTRY, operators[0])
    every = entrants(operators, naive(family), operators)
    return KernelBench(family, every, registry, CPU, RATES, repeats=3, **arguments)


def run(arguments: Sequence[str], tmp_path: Path) -> tuple[int, list[Record]]:
    """The command's exit code and records."""
    file = tmp_path / "records.json"
    code = main(["bench", "kernel", "--preset", "tiny", "--device", "cpu", "--output", str(file), *arguments])
    return code, read_records(file)


def test_every_family_has_problems_in_every_preset() -> None:
    for family in FAMILIES:
        problems = kernel_family(family).problems
        assert set(problems) == set(PRESETS)
        for preset, named in problems.items():
            assert named, f"{family} has nothing in {preset}"


def test_everything_is_timed_within_its_budget(tmp_path: Path) -> None:
    file, start = tmp_path / "records.json", time.perf_counter()
    words = ["-m", "minideepinfer", "bench", "kernel", "--preset", "tiny", "--device", "cpu", "--output", str(file)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    within_budget("bench kernel --preset tiny", time.perf_counter() - start)
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout
    records = read_records(file)
    wanted = {f"{family}:{naive(family).name}" for family in FAMILIES}
    assert {record.name.partition(",")[0] for record in records} >= wanted
    for record in records:
        assert record.values["time"].low <= record.values["time"].median <= record.values["time"].high
        assert record.values["bytes"].median > 0
        assert record.floors["time"] > 0
        assert 0.0 <= record.errors["of_bound"] <= 1.0
        assert set(record.rates) == {"copy_tb_s", "float32_tflops"}


def test_an_operator_that_does_not_serve_is_listed_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, records = run(["residual:fused", "--repeats", "1"], tmp_path)
    out = capsys.readouterr().out
    assert "not timed: residual:fused on 3 problems: has device cpu, needs cuda" in out
    assert "residual:fused (mini-deepinfer 0.1.0) was not timed on any problem" in out
    assert code == 1
    assert {record.name.partition(",")[0] for record in records} == {"residual:naive"}


def test_a_family_may_have_members_that_do_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert run(["residual", "--repeats", "1"], tmp_path)[0] == 0


def test_what_would_be_interpreted_is_timed_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused = REGISTRY.get("residual", "fused")
    for named in (False, True):
        every = entrants([fused], naive("residual"), [fused] * named)
        result, _ = next(iter(KernelBench("residual", every, REGISTRY, CPU, RATES, repeats=1).run("tiny")))
        assert (result.time is not None) is named
        assert bool(result.obstacles) is not named


def mutants() -> list[Any]:
    """One broken operator of each family that breaks on ordinary calls."""
    found = []
    for family, module in MUTANTS.items():
        relation = "rows-of-the-table" if family == "comm" else "matches-reference"
        chosen = next(mutant for mutant in module.NAIVE if mutant.killed_by == relation)
        found.append(pytest.param(family, chosen, id=f"{family}: {chosen.name}"))
    return found


@pytest.mark.parametrize(("family", "mutant"), mutants())
def test_what_is_wrong_is_not_timed(
    family: str, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = mutant.build(replace(naive(family).declaration, tier=Tier.OPTIMIZED))
    monkeypatch.setattr(command, "load_registry", lambda: including(REGISTRY, broken))
    code, records = run([f"{family}:{mutant.name}", "--repeats", "1"], tmp_path)
    failed = [record for record in records if not record.values]
    assert code == 1
    assert failed
    assert all(record.name.startswith(f"{family}:{mutant.name}") for record in failed)
    assert all(record.notes[0].startswith("FAILED: Violation: ") for record in failed)
    out = capsys.readouterr().out
    assert f"FAILED: {family}:{mutant.name}" in out
    assert failed[0].notes[0].removeprefix("FAILED: ") in out


class Odd:
    """The reference attention with an attribute or two changed."""

    def __init__(self, operator: Any, **changes: Any) -> None:
        self._operator = operator
        vars(self).update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def odd(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> RegisteredOperator:
    """An attention operator of a third party."""
    from minideepinfer.operators.build import _function

    make = _function(naive("attention"))
    monkeypatch.setitem(globals(), "build", lambda context: Odd(make(context), **changes))
    return RegisteredOperator(declaration("odd", build=f"{__name__}:build"), "acme", "1.0", "ops")


def test_a_crash_is_a_failure_of_that_operator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("of mine")

    operator = odd(monkeypatch, run=broken)
    first = next(iter(bench([operator]).run("tiny")))
    assert first[0].failure == "Crash: attention:odd (acme 1.0) raised ZeroDivisionError: of mine"
    assert first[0].time is None
    assert first[1].time is not None


@pytest.mark.parametrize("wrong", [None, torch.zeros(1, 8, 64)])
def test_what_is_no_tensor_or_has_other_rows_is_a_failure(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    first = next(iter(bench([odd(monkeypatch, run=lambda *args: wrong)]).run("tiny")))
    assert first[0].failure.startswith("Violation: heads: ")
    assert first[0].time is None


def test_an_operator_that_breaks_at_its_second_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from minideepinfer.operators.build import _function

    class Once(Odd):
        """Its second call raises."""

        def run(self, *args: Any) -> Any:
            """Count."""
            if vars(self).setdefault("called", False):
                raise RuntimeError("again")
            vars(self)["called"] = True
            return self._operator.run(*args)

    make = _function(naive("attention"))
    operator = odd(monkeypatch)
    monkeypatch.setitem(globals(), "build", lambda context: Once(make(context)))
    first = next(iter(bench([operator]).run("tiny")))
    assert first[0].failure == "Crash: attention:odd (acme 1.0) raised RuntimeError: again"


class Counting(Odd):
    """Its calls are counted, and are given their number."""

    def run(self, *args: Any) -> Any:
        """Count."""
        vars(self)["calls"] = vars(self).get("calls", 0) + 1
        return vars(self)["act"](vars(self)["calls"], self._operator.run(*args))


def counting(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, Any], Any]) -> RegisteredOperator:
    """An attention operator that does something to the result of a numbered call."""
    from minideepinfer.operators.build import _function

    make = _function(naive("attention"))
    operator = odd(monkeypatch)
    monkeypatch.setitem(globals(), "build", lambda context: Counting(make(context), act=act))
    return operator


def test_what_a_call_leaves_behind_for_the_next_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = counting(monkeypatch, lambda call, heads: call * heads)
    first = next(iter(bench([operator]).run("tiny")))
    assert first[0].failure.startswith("Violation: heads at ")
    assert first[0].time is None


def test_an_operator_that_overwrites_its_input_where_it_may_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from minideepinfer.operators.build import _function

    class InPlace(Odd):
        """Writes where its rows were."""

        def run(self, x: Any, *args: Any) -> Any:
            """As the reference."""
            return x.copy_(self._operator.run(x, *args)) if args[-1] else self._operator.run(x, *args)

    make = _function(naive("epilogue"))
    monkeypatch.setitem(globals(), "build", lambda context: InPlace(make(context)))
    operator = RegisteredOperator(declaration("odd", "epilogue", build=f"{__name__}:build"), "acme", "1.0", "ops")
    for odd_one, reference in bench([operator]).run("tiny"):
        assert odd_one.failure == ""
        assert odd_one.time is not None and reference.time is not None


def test_an_operator_that_breaks_while_it_is_timed_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = counting(monkeypatch, lambda call, heads: heads if call < 4 else 1 / 0)
    broken, reference = next(iter(bench([operator]).run("tiny")))
    assert broken.failure == "Crash: ZeroDivisionError while it was timed: division by zero"
    assert broken.time is None
    assert reference.time is not None


def test_an_interrupted_run_keeps_and_prints_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = KernelBench._problem

    def interrupted(self: KernelBench, name: str, *args: Any) -> Any:
        if name == "mix":
            raise KeyboardInterrupt
        return whole(self, name, *args)

    monkeypatch.setattr(KernelBench, "_problem", interrupted)
    file = tmp_path / "kernels.json"
    arguments = ["bench", "kernel", "residual:naive", "--preset", "tiny", "--device", "cpu", "--output", str(file)]
    assert main([*arguments, "--repeats", "1"]) == 130
    assert [record.name for record in read_records(file)] == [
        "residual:naive, tiny: enter",
        "residual:naive, tiny: advance",
    ]
    assert "advance" in capsys.readouterr().out


def test_a_candidate_source_without_candidates_is_a_failure() -> None:
    mutant = Mutant(
        "no-candidates", "", (("blocks if problem.emits_candidates else None", "None"),)
    )  # fmt: skip
    broken = mutant.build(replace(naive("indexer").declaration, tier=Tier.OPTIMIZED))
    plain, source, *_ = bench([broken]).run("tiny")
    assert plain[0].failure == ""
    assert source[0].failure == "Violation: candidates are None, emits_candidates is True"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_is_whole_in_a_terminal_and_in_a_file(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    problems = list(bench([naive("comm")]).run("tiny"))
    print_family("comm", problems, 1.0)
    out = capsys.readouterr().out
    for text in ("comm (1.0 s)", "Engram rows", "single", "20 to 80 %", "error / bound"):
        assert text in out


def test_an_operator_gives_its_own_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def cost(call: Any, least: Cost) -> Cost:
        seen.append(call.problem)
        return Cost({"fp8": 3 * least.total_flops}, 2 * least.num_bytes)

    operator = odd(monkeypatch, cost=cost, form="by hand")
    result, reference = next(iter(bench([operator]).run("tiny")))
    assert result.form == "by hand"
    assert result.cost is not None and reference.cost is not None
    assert result.cost.num_bytes == 2 * reference.cost.num_bytes
    assert result.floor > reference.floor > 0
    assert seen[0] == reference.case_problem


@pytest.mark.parametrize("wrong", [None, Cost({"int3": 1}, 1), Cost({"bf16": -1}, 1), Cost({}, math.nan)])  # type: ignore[arg-type]
def test_a_formula_that_returns_something_else_is_refused(wrong: Any) -> None:
    operator = Odd(None, cost=lambda call, least: wrong)
    with pytest.raises(OperatorError, match=r"attention:naive .* cost returned"):
        own_cost(naive("attention"), operator, None, Cost({}, 0))


def test_ratios_to_another_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(0.02)
        return slow_operator.run(*args)

    slow_operator: Any = None
    operator = odd(monkeypatch)
    make = globals()["build"]

    def build(context: Any) -> Any:
        nonlocal slow_operator
        slow_operator = make(context)._operator
        return Odd(slow_operator, run=slow)

    monkeypatch.setitem(globals(), "build", build)
    monkeypatch.setattr(command, "load_registry", lambda: including(REGISTRY, operator))
    code, records = run(["attention:naive", "--against", "attention:odd", "--repeats", "3"], tmp_path)
    assert code == 0
    for record in records:
        if record.name.startswith("attention:odd"):
            assert record.values["time"].median >= 20.0
            assert record.values["ratio_to_naive"].median > 2.0
            assert "ratio_to_attention:odd" not in record.values
        else:
            assert record.values["ratio_to_attention:odd"].median < 0.5
    assert "x attention:odd" in capsys.readouterr().out


class Choices(OperatorOptions):
    """An option that can be enumerated."""

    turbo: bool = False


def test_options_that_can_be_enumerated_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = odd(monkeypatch)
    operator = replace(operator, declaration=replace(operator.declaration, options=Choices))
    results = next(iter(bench([operator]).run("tiny")))
    assert [result.operator.title for result in results] == [
        "attention:odd",
        "attention:odd[turbo=True]",
        "attention:naive",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no operator family 'nothing'"),
        (["moe:nothing"], "there is no moe operator 'nothing'"),
        (["--against", "moe"], "--against moe: FAMILY:NAME is needed"),
        (["--against", "moe:nothing"], "there is no moe operator 'nothing'"),
        (["attention", "--against", "moe:naive"], "--against moe:naive: no moe operator is to be timed"),
        (["--repeats", "0"], "--repeats 0: at least 1 is needed"),
        (["--output", "/nonesuch/r.json"], "/nonesuch/r.json: cannot be written (No such file"),
        (["--preset", "decode"], "preset decode has the released sizes and the device is cpu; --preset tiny"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernel", "--preset", "tiny", "--device", "cpu", *arguments]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    family = kernel_family("attention")
    _, recipe = family.problems["tiny"]["ratio 2"]
    first, again, other = (family.make(replace(recipe, seed=seed), CPU).q for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "comm"])
def test_a_sample_is_the_same_call_on_fewer_rows(family: str) -> None:
    """The reference gives the sampled rows, alone, what it gives them among all."""
    known = kernel_family(family)
    for name, results in zip(known.problems["tiny"], bench([naive(family)]).run("tiny"), strict=True):
        (result,) = results
        assert result.failure == "" and result.errors is not None
        assert max(error for output, error in result.errors.items() if output != "of_bound") < 1e-6, name


def test_plain_data_is_what_differs_from_the_defaults() -> None:
    recipe = BatchRecipe((1, 1, 1), (9, 8, 7), decode=True)
    assert plain_data(recipe) == {"seqlens": "3 x 1", "context_lens": [9, 8, 7], "decode": True}


def test_a_ratio_has_the_widest_interval() -> None:
    time, base = (Measurement(median=m, low=m - 1, high=m + 1, repeats=n) for m, n in ((4.0, 9), (2.0, 3)))
    found = ratio(time, base)
    assert (found.median, found.low, found.high, found.repeats, found.unit) == (2.0, 1.0, 5.0, 3, "1")


def test_the_reference_is_always_among_them() -> None:
    reference = naive("moe")
    assert entrants([], reference) == [Entrant(reference, {}, is_reference=True)]
    assert entrants([reference], reference, [reference]) == [Entrant(reference, {}, is_reference=True, named=True)]
