"""The conformance kit itself: the command, the pytest module, what a stranger's operator meets, and the docs page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import declaration
from minideepinfer.cli.main import main
from minideepinfer.errors import OperatorError
from minideepinfer.operators import FAMILIES, OperatorRegistry, Properties, RegisteredOperator, Support, load_registry
from minideepinfer.testing.checking import check_one, check_operator, find_operators
from minideepinfer.testing.contract import ExplicitCase
from minideepinfer.testing.recipes.attention import AttentionRecipe
from minideepinfer.testing.recipes.batch import BatchRecipe
from minideepinfer.testing.replay import replay
from minideepinfer.testing.rounding import UNIT, Approximate
from minideepinfer.testing.search import PROFILES
from minideepinfer.testing.subject import Subject
from minideepinfer.testing.tensors import Guarded, PoisonedAllocations, same_bits
from minideepinfer.testing.tolerances import conformance, with_tables
from mutants.indexer import NAIVE as indexer_mutants

ROOT = Path(__file__).parents[1]
SMALL = replace(PROFILES["quick"], examples=3, shrink=False)


@pytest.fixture(scope="module")
def registry() -> OperatorRegistry:
    return load_registry()


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with acme-ops installed from its wheel."""
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip"]
    options = ["--no-deps", "--no-index", "-q"]
    source = str(ROOT / "examples/acme_ops")
    subprocess.run([*pip, "wheel", source, "--no-build-isolation", "--wheel-dir", str(wheels), *options], check=True)
    (wheel,) = wheels.glob("acme_ops-*.whl")
    subprocess.run([*pip, "install", str(wheel), "--target", str(target), *options], check=True)
    return target


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where acme-ops is installed."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=site, capture_output=True, text=True)


def test_the_command_passes_the_one_and_fails_the_other_with_a_shrunk_input(acme: Path) -> None:
    wanted = ["acme_ops:attention/acme-tiled", "attention:acme-broken"]
    done = python(acme, "-m", "minideepinfer", "ops", "check", *wanted, "--json")
    assert done.returncode == 1, done.stderr
    tiled, broken = json.loads(done.stdout)["operators"]
    assert tiled["passed"] and tiled["calls"] > 500 and 0 < tiled["worst"] <= 1 and not tiled["refused"]
    assert not broken["passed"]
    failed = {outcome["name"]: outcome for outcome in broken["outcomes"] if outcome["status"] == "failed"}
    wrong = {"matches-reference", "A3", "L1", "L2", "end-to-end", "tile-borders", "64-bit-offsets"}
    assert set(failed) == wrong
    assert not failed["matches-reference"]["crash"]
    code = failed["matches-reference"]["code"]
    # Shrunk: one row, one head.
    assert "seqlens=(1,)" in code and "num_heads" not in code
    pasted = python(acme, "-c", code)
    assert pasted.returncode == 1 and "Violation: heads at" in pasted.stderr
    assert python(acme, "-c", code.replace("acme-broken", "acme-tiled")).returncode == 0


def test_a_stranger_needs_no_test_file(acme: Path) -> None:
    pytest_arguments = ["-m", "pytest", "-p", "minideepinfer.testing.pytest_plugin", "-p", "no:cacheprovider", "-q"]
    collect = [*pytest_arguments, "--pyargs", "minideepinfer.testing.conformance", "--operator"]
    passed = python(acme, *collect, "acme_ops:attention/acme-tiled")
    assert passed.returncode == 0, passed.stdout
    failed = python(acme, *collect, "acme_ops:attention/acme-broken")
    assert failed.returncode == 1
    assert "7 failed" in failed.stdout and "replay('attention:acme-broken', 'A3')" in failed.stdout


def test_the_command_prints_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "check", "comm:single", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert "profile quick, seed 3, device cpu" in text
    assert "comm:single (mini-deepinfer" in text and "passed" in text
    assert "has world size 4, needs 1" in text and "problems, of which it refuses 0 (0.0%)" in text
    assert "identity-round-trip" in text and "1 of 1 operators passed" in text


@pytest.mark.parametrize("wanted", ["attention:nothing", "nonsense", "acme:attention/naive", "--device cuda comm"])
def test_a_mistake_is_a_message(wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in wanted and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["ops", "check", *wanted.split()]) == 1
    assert capsys.readouterr().err.startswith("mini-deepinfer: ")


def test_operators_are_found_by_family_name_and_distribution(registry: OperatorRegistry) -> None:
    everything = find_operators(registry)
    assert {operator.declaration.family for operator in everything} == set(FAMILIES)
    for name in ("attention:naive", "mini_deepinfer:attention/naive", "Mini-DeepInfer:attention/naive"):
        assert [operator.name for operator in find_operators(registry, [name])] == ["naive"]
    assert len(find_operators(registry, ["comm", "comm:single"])) == len(find_operators(registry, ["comm"]))
    with pytest.raises(OperatorError, match="does not come from acme"):
        find_operators(registry, ["acme:attention/naive"])


class _Raises:
    def prepare(self, batch: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        raise RuntimeError("no such tile")


def build_raising(context: Any) -> _Raises:
    return _Raises()


def _operator(**changes: Any) -> RegisteredOperator:
    return RegisteredOperator(declaration("odd", build=f"{__name__}:build_raising", **changes), "odd", "1", "ops")


def test_an_exception_in_run_fails(registry: OperatorRegistry) -> None:
    report = check_operator(_operator(), registry, SMALL)
    assert not report.passed and not report.held
    assert all(outcome.crash for outcome in report.failures)
    assert "RuntimeError: no such tile" in report.failures[0].reason


def test_an_operator_that_refuses_everything_fails(registry: OperatorRegistry) -> None:
    report = check_operator(_operator(refuses=lambda problem: ["has a face, needs none"]), registry, SMALL)
    assert not report.calls
    cases = {"A1", "A2", "A3", "L1", "L2", "end-to-end", "tile-borders", "article", "64-bit-offsets"}
    assert {outcome.name for outcome in report.failures} == {*cases, "serves-something"}
    assert report.refused.total() > 20 and list(report.refused) == ["has a face, needs none"]


@pytest.mark.parametrize(
    ("device", "profile", "support", "reason"),
    [
        ("cpu", "quick", Support(), "heavy: asked on cuda, or with the profile thorough"),
        ("cpu", "thorough", Support(devices=("cuda",), interpreted=True), "heavy: asked on cuda only, here the"),
        ("cpu", "thorough", Support(), None),
        ("cuda", "quick", Support(), None),
    ],
)
def test_a_heavy_case_is_skipped_where_it_takes_too_long(
    registry: OperatorRegistry, device: str, profile: str, support: Support, reason: str | None
) -> None:
    asked: list[Subject] = []
    case = ExplicitCase("large", "", lambda subject: asked.append(subject) or "0.5 of everything", heavy=True)
    subject = Subject(_operator(support=support), registry, conformance("attention"), device)
    outcome = check_one(subject, case, PROFILES[profile], 0)
    if reason is None:
        assert asked and (outcome.status, outcome.note) == ("passed", "0.5 of everything")
    else:
        assert not asked and outcome.status == "skipped" and outcome.reason.startswith(reason)


def test_a_machine_without_the_memory_is_a_skip(registry: OperatorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("you tried to allocate too much")

    monkeypatch.setattr("minideepinfer.testing.recipes.far.torch.empty", empty)
    subject = Subject(registry.get("comm", "single"), registry, conformance("comm"))
    outcome = check_one(subject, subject.family.relation("64-bit-offsets"), SMALL, 0)
    assert outcome.status == "skipped" and outcome.reason.startswith("needs 4 GiB of address space on cpu: you tried")


def test_operators_can_be_checked_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    alone, together = [], []
    for found, jobs in ((alone, "1"), (together, "2")):
        assert main(["ops", "check", "comm:single", "indexer:naive", "--jobs", jobs, "--json", "--seed", "4"]) == 0
        found += json.loads(capsys.readouterr().out)["operators"]
    for report in alone + together:
        del report["seconds"]
    assert alone == together and len(alone) == 2
    assert main(["ops", "check", "comm:single", "--jobs", "0"]) == 1
    assert "--jobs 0: at least 1 is needed" in capsys.readouterr().err


def test_an_operator_is_not_asked_about_a_device_that_it_does_not_claim(registry: OperatorRegistry) -> None:
    report = check_operator(_operator(support=Support(devices=("cuda",))), registry, SMALL)
    assert report.passed and not report.calls
    assert {outcome.status for outcome in report.outcomes} == {"skipped"}


def test_dims_of_an_explicit_case_follow_the_operator(registry: OperatorRegistry) -> None:
    naive = registry.get("attention", "naive").declaration

    def refuses(problem: Any) -> list[str]:
        return [] if problem.head_dim % 128 == 0 else [f"has head_dim {problem.head_dim}, needs a multiple of 128"]

    wide = replace(naive, name="wide", refuses=refuses, support=Support(dtypes=("bfloat16",)))
    report = check_operator(RegisteredOperator(wide, "odd", "1", "ops"), registry, SMALL)
    assert report.passed and {"A1", "A2", "A3"} <= set(report.held)
    assert report.refused


def test_ties_without_a_promise_are_judged_by_their_scores(registry: OperatorRegistry) -> None:
    naive, family = registry.get("indexer", "naive").declaration, conformance("indexer")
    slices = next(mutant for mutant in indexer_mutants if mutant.name == "top-k-of-a-slice")
    backwards = next(mutant for mutant in indexer_mutants if mutant.name == "higher-index-first")
    promising, silent = naive, replace(naive, properties=Properties(deterministic=False))
    for mutant, declared, status in (
        (backwards, promising, "failed"),
        (backwards, silent, "passed"),
        (slices, silent, "failed"),
    ):
        subject = Subject(mutant.build(declared), registry, family)
        assert check_one(subject, family.relation("I2"), SMALL, 0).status == status
        assert subject.tally.ran


def test_the_same_seed_draws_the_same_calls(registry: OperatorRegistry) -> None:
    naive = registry.get("comm", "single")
    reports = [check_operator(naive, registry, SMALL, seed) for seed in (5, 5)]
    assert reports[0].calls == reports[1].calls and reports[0].worst == reports[1].worst


def test_a_recipe_makes_the_same_call_again() -> None:
    recipe = AttentionRecipe(BatchRecipe((3, 2), (9, 0)), index_topk=5, seed=7)
    one, two = recipe.build(), recipe.build()
    assert same_bits(one.q, two.q) and one.global_kv is not None and two.global_kv is not None
    assert same_bits(one.global_kv, two.global_kv)
    replay("attention:naive", "matches-reference", recipe)
    replay("attention:naive", "A2")
    with pytest.raises(OperatorError, match="is not asked for 'nothing'"):
        replay("attention:naive", "nothing", recipe)


def test_poison_reaches_what_nobody_wrote() -> None:
    with PoisonedAllocations():
        fresh = [torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(2).new_empty(4)]
        numbers = torch.empty(2, dtype=torch.int32)
        written = torch.zeros(2) + 1
    assert all(tensor.isnan().all() for tensor in fresh)
    assert (numbers > 10**9).all() and (written == 1).all()


def test_guards_lie_beside_what_is_allocated() -> None:
    with PoisonedAllocations() as memory:
        tensors = [
            torch.zeros(2, 3),
            torch.empty(5, dtype=torch.int32),
            torch.full((2,), 7.0),
            torch.ones_like(torch.ones(2)),
        ]
        tensors[0][1] += 1.0
    assert tensors[0].tolist() == [[0.0] * 3, [1.0] * 3] and tensors[2].tolist() == [7.0, 7.0]
    assert memory.untouched()
    for tensor in tensors:
        for place in (tensor.storage_offset() - 1, tensor.storage_offset() + tensor.numel()):
            neighbour = tensor.as_strided((1,), (1,), place)
            before = neighbour.clone()
            neighbour.zero_()
            assert not memory.untouched()
            neighbour.copy_(before)
    assert memory.untouched()


def test_guards_notice_a_store_past_an_edge() -> None:
    guarded = Guarded()
    inner = guarded.copy(torch.zeros(2, 3))
    assert guarded.untouched()
    inner.as_strided((7,), (1,), inner.storage_offset())[6] = 1.0
    assert not guarded.untouched()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [0.0, 1e-3, 0.3])
def test_the_interval_of_a_quantised_vector_holds(dtype: torch.dtype, error: float) -> None:
    from minideepinfer.quantization import qdq_fp8

    generator = torch.Generator().manual_seed(0)
    value = torch.randn(50, 64, generator=generator, dtype=torch.float64)
    interval = Approximate(value, torch.full_like(value, error)).quantized(dtype)
    for _ in range(20):
        inside = value + error * (2 * torch.rand(value.shape, generator=generator) - 1)
        found = qdq_fp8(inside.to(dtype)).double()
        assert ((found - interval.value).abs() <= interval.error + UNIT[torch.float32]).all()


def test_the_page_is_current() -> None:
    page = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    assert page == with_tables(page), "run `make docs`"
    assert page.count("| `matches-reference` |") == len(FAMILIES)
