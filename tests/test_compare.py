"""Records: written and read back, compared, refused; and the gate for regressions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.cli.main import main
from minideepinfer.errors import ConfigError
from minideepinfer.measure.compare import Change, Gate, compare, differences, gate
from minideepinfer.measure.record import (
    Machine,
    Measurement,
    Record,
    Software,
    read_records,
    require_writable,
    write_records,
)

H200 = Machine(device="NVIDIA H200", driver="580.1", power_limit_watts=700.0, sm_clock_mhz=(1980, 1410))


def measurement(median: float, spread: float = 0.02, unit: Any = "ms") -> Measurement:
    """With a symmetric interval."""
    low, high = median * (1 - spread / 2), median * (1 + spread / 2)
    return Measurement(median=median, low=low, high=high, repeats=20, unit=unit)


def record(name: str = "moe:fused, experts", ratio: float = 0.1, **changes: Any) -> Record:
    """One kernel, some of it changed."""
    fields: dict[str, Any] = {
        "benchmark": "kernel",
        "name": name,
        "headline": "alone",
        "machine": H200,
        "software": Software(commit="a" * 40, dirty=False, versions={"torch": "2.11"}),
        "problem": {"preset": "v41-rank", "sizes": {"tokens": 4096, "batch": {"seqlens": "64 x 1"}}},
        "precision": {"dtype": "bfloat16", "kv_quantization": "released"},
        "seed": 0,
        "values": {"time": measurement(10 * ratio), "ratio_to_naive": measurement(ratio, unit="1")},
    }
    return Record(**{**fields, **changes})


NUMBERS = st.floats(min_value=1e-6, max_value=1e9)
MEASUREMENTS = st.builds(
    lambda numbers, **others: Measurement(low=numbers[0], median=numbers[1], high=numbers[2], **others),
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS).map(sorted),
    repeats=st.integers(1, 99),
    unit=st.sampled_from(["ms", "1"]),
)
TEXT = st.text(max_size=8)
RECORDS = st.builds(
    Record,
    benchmark=st.sampled_from(["kernel", "prefill", "decode", "ladder"]),
    name=TEXT,
    headline=TEXT,
    machine=st.builds(Machine, device=TEXT, sm_clock_mhz=st.none() | st.tuples(st.integers(), st.integers())),
    software=st.builds(Software, commit=TEXT, dirty=st.booleans(), versions=st.dictionaries(TEXT, TEXT, max_size=2)),
    problem=st.dictionaries(TEXT, st.integers() | TEXT | st.lists(st.integers(), max_size=3), max_size=3),
    seed=st.integers(),
    values=st.dictionaries(TEXT, MEASUREMENTS, max_size=3),
    stages=st.dictionaries(TEXT, NUMBERS, max_size=3),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)


@given(st.lists(RECORDS, max_size=3))
def test_records_are_read_back_equal(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    file = tmp_path_factory.mktemp("records") / "r.json"
    write_records(file, records)
    assert read_records(file) == records


def with_time(**changes: Any) -> str:
    """A file of one record, its time edited by hand."""
    data = record().model_dump(mode="json")
    data["values"]["time"] |= changes
    return json.dumps([data])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_time(low=2.0), "record 0: values.time: median 1.0 is not between low 2.0 and high 1.01"),
        (with_time(repeats=0), "record 0: values.time.repeats"),
        ("{", "cannot be parsed"),
        ("{}", "holds a dict; a list of records is needed"),
        ("[{}]", "record 0: "),
        (json.dumps([record().model_dump(mode="json") | {"seed": "x"}]), "record 0: seed"),
        (json.dumps([record().model_dump(mode="json") | {"colour": 1}]), "record 0: colour"),
        (json.dumps([record().model_dump(mode="json") | {"version": 2}]), "record 0: version"),
    ],
)
def test_a_bad_file_is_a_clear_error(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, good = tmp_path / "bad.json", tmp_path / "good.json"
    file.write_text(text)
    write_records(good, [record()])
    assert main(["bench", "compare", str(good), str(file)]) == 1
    error = capsys.readouterr().err
    assert f"mini-deepinfer: {file}: {message}" in error


def test_an_interrupted_write_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.json"
    write_records(file, [record()])

    def interrupted(path: Path, text: str, **how: Any) -> None:
        with path.open("w") as stream:
            stream.write(text[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_records(file, [record("other")])
    assert read_records(file) == [record()]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_in_a_folder_that_takes_no_other_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "r.json", Path.write_text
    file.touch()

    def only_this(path: Path, *args: Any, **how: Any) -> int:
        if path != file:
            raise PermissionError(path)
        return write(path, *args, **how)

    monkeypatch.setattr(Path, "write_text", only_this)
    write_records(file, [record()])
    assert read_records(file) == [record()]


def test_asking_whether_a_file_can_be_written_leaves_none_behind(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    (tmp_path / "old").write_text("kept")
    require_writable(tmp_path / "old")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(ConfigError, match="cannot be written"):
        require_writable(tmp_path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", str(tmp_path / "none.json"), str(tmp_path / "none.json")]) == 1
    assert "none.json: cannot be read (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"machine": H200.model_copy(update={"device": "B200"})},
            "machine.device is 'NVIDIA H200' in the first and 'B200'",
        ),
        ({"machine": H200.model_copy(update={"driver": "590"})}, "machine.driver is '580.1' in the first and '590'"),
        (
            {"machine": H200.model_copy(update={"power_limit_watts": 500.0})},
            "machine.power_limit_watts is 700.0 in the first and 500.0",
        ),
        ({"problem": {**record().problem, "preset": "tiny"}}, "problem.preset is 'v41-rank' in the first and 'tiny'"),
        (
            {"problem": {"preset": "v41-rank", "sizes": {"tokens": 8, "batch": {"seqlens": "64 x 1"}}}},
            "problem.sizes.tokens is 4096 in the first and 8 in the second",
        ),
        ({"problem": {"preset": "v41-rank"}}, "problem.sizes is {'tokens': 4096, 'batch': {'seqlens': '64 x 1'}}"),
        ({"precision": {"dtype": "float32", "kv_quantization": "released"}}, "precision.dtype is 'bfloat16'"),
        ({"precision": {"dtype": "bfloat16"}}, "precision.kv_quantization is 'released' in the first and absent"),
        ({"values": {"time": measurement(1.0, unit="GB/s")}}, "unit of time is 'ms' in the first and 'GB/s'"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    changes: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = record(), record(**changes)
    (found,) = differences(before, after)
    assert found.startswith(sentence)
    (pair,) = compare([before], [after])
    assert pair.differences == (found,)
    assert pair.changes == ()
    for name, each in (("a", before), ("b", after)):
        write_records(tmp_path / name, [each])
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-over", "5%"]) == 1
    out = capsys.readouterr().out
    assert "kernel moe:fused, experts: cannot be compared" in out
    assert sentence in out


def test_versions_commits_clocks_and_plans_may_differ() -> None:
    other = record(
        machine=H200.model_copy(update={"sm_clock_mhz": (1980, 1980), "throttled": ("power cap",)}),
        software=Software(commit="", dirty=True, versions={"torch": "2.12"}),
        plan={"operator": "fused"},
        seed=1,
        problem={**record().problem, "says": "in other words", "rungs": ["a"]},
    )
    assert list(differences(record(), other)) == []


def test_records_are_paired_by_benchmark_and_name() -> None:
    pairs = compare([record("x"), record("y")], [record("y", 0.2), record("z")])
    assert [(pair.title, pair.before is None, pair.after is None) for pair in pairs] == [
        ("kernel x", False, True),
        ("kernel y", False, False),
        ("kernel z", True, False),
    ]
    change = pairs[1].change("ratio_to_naive")
    assert change is not None
    assert change.ratio == pytest.approx(2.0)


def test_two_records_of_a_name_or_no_common_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="the second file has two records of kernel x"):
        compare([record("x")], [record("x"), record("x")])
    with pytest.raises(ConfigError, match="no benchmark of one name in common"):
        compare([record("x")], [record("y")])


def test_overlapping_intervals_are_within_the_spread() -> None:
    near, far = (
        Change("time", measurement(1.0), measurement(1.015)),
        Change("time", measurement(1.0), measurement(1.03)),
    )
    assert (near.within_spread, far.within_spread) == (True, False)
    assert (near.is_worse, far.is_worse) == (True, True)
    rate = Change("tokens", measurement(1.0, unit="tokens/s"), measurement(1.5, unit="tokens/s"))
    assert (rate.is_worse, rate.within_spread) == (False, False)
    same = Change("time", measurement(1.0), measurement(1.0))
    assert (same.is_worse, same.within_spread) == (False, True)


@pytest.mark.parametrize(
    ("before", "after", "allowed", "slower"),
    [
        (0.1, 0.104, 0.05, False),  # worse, less than allowed
        (0.1, 0.107, 0.05, True),
        (0.1, 0.107, 0.10, False),
        (0.1, 0.05, 0.05, False),  # better
    ],
)
def test_the_gate_looks_at_the_ratio_to_naive(before: float, after: float, allowed: float, slower: bool) -> None:
    found = gated([record(ratio=before)], [record(ratio=after)], allowed)
    assert (bool(found.failed), bool(found.passed), found.undecided) == (slower, not slower, ())


def gated(before: list[Record], after: list[Record], allowed: float = 0.05) -> Gate:
    """The gate on the ratio to naive."""
    return gate(compare(before, after), "ratio_to_naive", allowed)


def test_the_gate_ignores_a_slower_card() -> None:
    throttled = record(values={"time": measurement(2.0), "ratio_to_naive": measurement(0.1, unit="1")})
    assert gated([record()], [throttled]) == Gate(("kernel moe:fused, experts",), (), ())


@pytest.mark.parametrize("spread", [0.2, 100.0])
def test_a_change_that_its_spread_hides_is_undecided_and_not_passed(spread: float) -> None:
    noisy = record(values={"ratio_to_naive": measurement(0.107, spread=spread, unit="1")})
    found = gated([record()], [noisy])
    assert (found.passed, found.failed) == ((), ())
    assert found.undecided == (
        "kernel moe:fused, experts: ratio_to_naive 0.1 -> 0.107, more than allowed but within the spread",
    )


def test_the_gate_fails_for_a_kernel_that_is_no_longer_right() -> None:
    wrong = record(values={}, notes=("FAILED: heads",))
    assert gated([record()], [wrong]).failed == ("kernel moe:fused, experts: FAILED: heads",)


def test_the_gate_fails_for_a_kernel_or_ratio_that_is_gone() -> None:
    no_ratio = record("y", values={"time": measurement(1.0)})
    found = gated([record("x"), record("y"), record("z")], [no_ratio, record("z"), record("new")])
    assert found.failed == tuple(f"kernel {name}: has no ratio_to_naive in the second file" for name in "xy")
    assert found.passed == ("kernel z",)


def test_values_that_are_none_or_negative_have_no_ratio() -> None:
    overhead = Change("stage_overhead", measurement(-0.06, unit="1", spread=0.0), measurement(0.04, unit="1"))
    assert (overhead.ratio, overhead.is_worse, overhead.verdict) == (None, True, "worse")
    hidden = Change("communication_hidden", measurement(0.0), measurement(5.0))
    assert (hidden.ratio, hidden.verdict) == (None, "worse")


def test_one_look_has_no_spread_and_rows_are_neither_better_nor_worse() -> None:
    once = [measurement(number, spread=0.0).model_copy(update={"repeats": 1}) for number in (1.0, 1.001)]
    ratios = [record(values={"ratio_to_naive": time.model_copy(update={"unit": "1"})}) for time in once]
    assert gated(ratios[:1], ratios[1:], 0.0).failed[0].endswith("1 -> 1.001, more than allowed; measured once")
    assert Change("step", *once).verdict == "worse, measured once: spread unknown"
    assert Change("rows", measurement(10.0, unit="rows"), measurement(12.0, unit="rows")).verdict == "different"


def test_errors_that_changed_stand_beside_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {"of_bound": 0.01, "layers.3.block": 1.0, "heads": 1e-3}
    write_records(tmp_path / "a", [record(errors=errors)])
    write_records(tmp_path / "b", [record(errors={"of_bound": 0.9, "layers.3.block": 2.0, "heads": 1e-3})])
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "error of_bound       0.01 -> 0.9" in out
    assert "times are of two runs, which may differ by more than the spread within one" in out
    assert "block" not in out and "heads" not in out


@pytest.mark.parametrize(
    ("ratio", "arguments", "code", "text"),
    [
        (0.2, [], 0, "ratio_to_naive       0.1 -> 0.2, B / A 2.000, worse"),
        (
            0.2,
            ["--fail-over", "5%"],
            1,
            "FAILED kernel moe:fused, experts: ratio_to_naive 0.1 -> 0.2, more than allowed and than the spread",
        ),
        (0.2, ["--fail-over", "150"], 0, "ratio_to_naive, 150 % allowed: 1 passed, 0 failed, 0 undecided"),
        (0.1005, ["--fail-over", "0.04"], 0, "0.04 % allowed: 0 passed, 0 failed, 1 undecided"),
        (0.05, ["--fail-over", "5%"], 0, "better"),
    ],
)
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratio: float, arguments: list[str], code: int, text: str
) -> None:
    for name, each in (("a", record()), ("b", record(ratio=ratio))):
        write_records(tmp_path / name, [each])
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"), *arguments]) == code
    assert text in capsys.readouterr().out


def test_a_gate_that_nothing_could_fail_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = record("moe:naive, experts", values={"time": measurement(1.0)})
    write_records(tmp_path / "a", [reference])
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "a"), "--fail-over", "5%"]) == 1
    assert "no kernel of the first file has a ratio_to_naive" in capsys.readouterr().err


def test_a_percentage_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("five", "-1%", "nan", "inf"):
        assert main(["bench", "compare", "a", "b", f"--fail-over={wrong}"]) == 2
    assert "percentage" in capsys.readouterr().err
