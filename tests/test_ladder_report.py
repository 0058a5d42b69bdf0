"""A ladder's report says what its records say, and its pictures can be read."""

from __future__ import annotations

import re
import struct
from itertools import combinations
from pathlib import Path

import pytest
from ladder_records import NAIVE, ladder, measurement, rung
from minideepinfer.cli.main import main
from minideepinfer.errors import ConfigError
from minideepinfer.measure.ladder import pictures
from minideepinfer.measure.ladder.report import number, render
from minideepinfer.measure.record import Record, read_records, write_records
from minideepinfer.operators.context import Stage

ROOT = Path(__file__).parent.parent
TRACKED = "benchmarks/results/2026-11-30-h200-ladder.json"
LONG = "a rung with a rather long name, number {}, that says much"
LADDERS = {
    "one": ladder()[:1],
    "two": ladder()[-2:],
    "all": ladder(),
    "twelve": [
        rung(LONG.format(i), NAIVE | {"a stranger's": 30.0, "tiny": 1e-3}, layers=40 if i else 4) for i in range(12)
    ],
}


def tables(text: str) -> list[dict[str, dict[str, str]]]:
    """The tables of a Markdown text, by the first cell of a row and the head of a column."""
    found: list[dict[str, dict[str, str]]] = []
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else []
        if cells and not heads:
            heads = cells
            found.append({})
        elif cells and not cells[0].startswith("---"):
            found[-1][cells[0]] = dict(zip(heads, cells, strict=True))
        heads = heads if cells else []
    return found


def test_numbers_in_the_tables_are_those_of_the_records() -> None:
    records = ladder()
    rungs, evidence, stages, errors = tables(render(records))
    assert list(rungs) == [record.name for record in records]
    first = records[0].values["tokens_per_second"].median
    for record in records:
        speed = record.values["tokens_per_second"].median
        assert rungs[record.name]["tokens/s"] == f"{speed:,.0f}"
        assert rungs[record.name]["step, ms"].startswith(number(record.values["step"].median))
        assert float(rungs[record.name]["× first"]) == pytest.approx(speed / first, rel=0.01)
        assert stages["**sum**"][record.name] == number(sum(record.stages.values()))
        for stage, milliseconds in record.stages.items():
            assert stages[stage][record.name] == number(milliseconds)
        for name, error in record.errors.items():
            if not name.startswith("layers."):
                assert float(errors[name][record.name]) == pytest.approx(error, rel=0.05)
    assert evidence["+A"]["kernel"] == "attention:fused: 178 → 0.71"
    assert evidence["+A"]["stage"] == "attention core: 6,800 → 27.0"
    decoding = "FP4 decoding: 1,000 → in grouped GEMM"
    assert evidence["+C1"]["stage"] == f"grouped GEMM: 2,050 → 135<br>{decoding}"
    assert evidence["+A"]["step"] == "12,193 → 5,421"


def test_a_fused_stage_is_shown_inside_the_other_one_and_never_as_nothing() -> None:
    stages = tables(render(ladder()))[2]
    assert stages["FP4 decoding"]["+C1"] == "in grouped GEMM"
    assert stages["key gather"]["all naive"] == "–"


def test_a_rung_is_compared_with_the_one_that_it_builds_on() -> None:
    records = ladder()
    slower = rung("+slower", {**records[-2].stages, str(Stage.ATTENTION): 90.0}, "+mHC")
    rungs = tables(render([*records[:-1], slower, records[-1]]))[0]
    assert float(rungs["+slower"]["× before"]) < 1
    assert rungs["+bounded replay"]["builds on"] == "+mHC"
    assert float(rungs["+bounded replay"]["× before"]) == pytest.approx(1 / 0.55, rel=0.01)


def test_a_rung_that_never_ran_is_told() -> None:
    names = ["all naive", "+A", "+B1"]
    ran = [r.model_copy(update={"problem": {**r.problem, "rungs": names}}) for r in ladder()[:2]]
    assert "Rungs of this ladder without a record: +B1." in render(ran)


def test_nothing_is_scaled_from_fewer_layers() -> None:
    few = rung("all naive", NAIVE, layers=4)
    rungs, evidence, *_ = tables(render([few, *ladder()[1:]]))
    assert rungs["+A"]["× first"] == rungs["+A"]["× before"] == "–"
    assert rungs["all naive"]["tokens/s"].endswith("(4 layers)")
    assert "→" not in evidence["+A"]["step"]


def test_nothing_is_compared_stage_by_stage_where_layers_differ() -> None:
    evidence = tables(render([rung("all naive", NAIVE, layers=4), *ladder()[1:]]))[1]
    assert evidence["+A"]["stage"] == "–"
    assert "→" in evidence["+B1"]["stage"]


def test_a_gain_within_the_spread_says_so() -> None:
    records = [rung("all naive", NAIVE), rung("+luck", {**NAIVE, Stage.ATTENTION: 6700.0}, "all naive")]
    rungs = tables(render(records))[0]
    assert rungs["+luck"]["× before"] == rungs["+luck"]["× first"] == "1.008 (within the spread)"
    assert rungs["all naive"]["× first"] == "1.000"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": {}}, "has no step in ms"),
        ({"values": {"step": measurement(0.0)}}, "has no step in ms"),
        ({"problem": {"new_tokens": 4096, "layers": None}}, "has no number of layers"),
        ({"problem": {"new_tokens": 8, "layers": 40}}, "problem of 'odd' is {'new_tokens': 8}"),
        ({"plan": {"operators": [{"operator": "x"}]}}, "has no plan whose operators say family"),
        ({"precision": {"dtype": "float32"}}, "dtype of 'odd' is 'float32'"),
        ({"name": "all naive"}, "two records are named 'all naive'"),
    ],
)
def test_a_record_edited_by_hand_is_a_clear_error(changes: dict[str, object], message: str) -> None:
    first = rung("all naive", NAIVE)
    odd = rung("odd", NAIVE, "all naive").model_copy(update=changes)
    with pytest.raises(ConfigError, match=f"report: .*{re.escape(message)}"):
        render([first, odd])


def test_a_rung_of_other_precision_says_so() -> None:
    first, other = rung("all naive", NAIVE), rung("+fast", NAIVE, "all naive")
    for record in (first, other):
        record.precision["activation_quantization"] = "none"
    other.precision["activation_quantization"] = "released"
    text = render([first, other])
    assert "- **+fast**: attention naive (mini-deepinfer 0.1.0); activation_quantization released\n" in text
    assert "- **all naive**: attention naive (mini-deepinfer 0.1.0)\n" in text
    assert "the first rung has dtype bfloat16, activation_quantization none" in text


def test_a_name_of_two_lines_is_one_cell() -> None:
    assert "a b\\|c" in render([rung("a\nb|c", NAIVE)])


@pytest.mark.parametrize("name", ["$\\nothing$", "a rung with " + "one_long_word_" * 5])
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    records = [rung(name, NAIVE)]
    pictures.draw(records, tmp_path)
    lines = pictures._name(records[0]).splitlines()
    assert len(lines) <= 2
    assert all(len(line) > 1 for line in lines)


def test_records_of_other_sessions_or_benchmarks_are_refused() -> None:
    records = ladder()
    other = records[1].model_copy(update={"machine": records[1].machine.model_copy(update={"device": "NVIDIA B200"})})
    with pytest.raises(ConfigError, match=r"device of '\+A' is 'NVIDIA B200'.*not put together"):
        render([records[0], other])
    with pytest.raises(ConfigError, match="is of `bench prefill`, needs `bench ladder`"):
        render([records[0].model_copy(update={"benchmark": "prefill"})])
    with pytest.raises(ConfigError, match="no records"):
        render([])


@pytest.mark.parametrize("records", LADDERS.values(), ids=LADDERS)
def test_pictures_are_1000_pixels_wide_and_small(records: list[Record], tmp_path: Path) -> None:
    files = pictures.draw(records, tmp_path)
    assert [file.name for file in files] == [
        f"{name}.{kind}" for name in (pictures.STEPS, pictures.THROUGHPUT) for kind in ("svg", "png")
    ]
    for file in files:
        if file.suffix == ".png":
            width, height = struct.unpack(">II", file.read_bytes()[16:24])
            assert width == 1000
            assert 200 < height < 1100
        assert 2_000 < file.stat().st_size < 150_000
    assert "ms" in files[0].read_text()
    assert files[0].read_bytes() == pictures.draw(records, tmp_path)[0].read_bytes()


@pytest.mark.parametrize("records", LADDERS.values(), ids=LADDERS)
@pytest.mark.parametrize("figure", ["_steps", "_throughput"])
def test_no_two_texts_of_a_picture_overlap(records: list[Record], figure: str) -> None:
    from matplotlib.text import Text

    drawn = getattr(pictures, figure)(records)
    drawn.draw_without_rendering()
    texts = [text for text in drawn.findobj(Text) if text.get_text().strip() and text.get_visible()]
    # Ticks beyond the axis are found as well, though never drawn.
    boxes = {text.get_text(): text.get_window_extent() for text in texts if text.get_window_extent().x0 >= 0}
    assert len(boxes) > len(records)
    width, height = drawn.bbox.width, drawn.bbox.height
    for name, box in boxes.items():
        if not name.replace(",", "").isdigit():
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, name
    for (name, box), (other, second) in combinations(boxes.items(), 2):
        assert not box.overlaps(second), f"{name!r} and {other!r}"


def test_the_stages_drawn_add_up_to_the_step() -> None:
    for record in ladder():
        stages = pictures._drawn_stages([record])
        assert sum(pictures._drawn(record, stages).values()) == pytest.approx(record.values["step"].median)


def test_the_command_renders_without_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path / "records.json", ladder())
    assert main(["bench", "report", str(tmp_path / "records.json"), "--out", str(tmp_path / "out")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    written = (tmp_path / "out/ladder.md").read_text()
    assert f"bench report {tmp_path}/records.json" in written
    for name in (pictures.STEPS, pictures.THROUGHPUT):
        assert f"({name}.svg)" in written
        assert (tmp_path / f"out/{name}.svg").exists()


def test_the_page_is_that_of_its_records() -> None:
    assert (ROOT / "docs/ladder.md").read_text(encoding="utf-8") == render(read_records(ROOT / TRACKED), TRACKED)
    for name in (pictures.STEPS, pictures.THROUGHPUT):
        assert (ROOT / f"docs/{name}.svg").exists()
        assert (ROOT / f"docs/{name}.png").stat().st_size < 150_000


def test_a_missing_kit_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "ladder", "--preset", "tiny", "--out", str(tmp_path)]) == 1
    assert "needs hypothesis: pip install 'mini-deepinfer[report,testing]'" in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["bench", "ladder", "--preset", "tiny", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "pip install 'mini-deepinfer[report]'" in printed.err
    assert not printed.out
