"""The command as a whole: exit codes, messages instead of tracebacks, configuration files, pipes that close."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from minideepinfer.cli import main as cli
from minideepinfer.cli.main import COMMANDS, main
from minideepinfer.errors import ConfigError, MiniDeepInferError

ROOT = Path(__file__).parents[1]
TINY = ROOT / "engine/minideepinfer/data/tiny"
GENERATE = ["generate", "--json", "--max-tokens", "2", "--ids", "0,301,549"]


def failure(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one message of a command that exits with 1."""
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("mini-deepinfer: ")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_no_failure(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: mini-deepinfer")


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["ops"], ["checkpoint", "inspect"], ["generate", "--set", "x"]]
)
def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    assert "usage: mini-deepinfer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("x: is 3, 4 is needed"), 1, "mini-deepinfer: x: is 3, 4 is needed\n"),
        (MiniDeepInferError("closed"), 1, "mini-deepinfer: closed\n"),
        (KeyboardInterrupt(), 130, "mini-deepinfer: interrupted\n"),
    ],
)
def test_what_a_command_raises_decides_the_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("minideepinfer.cli.config._show", fail)
    assert main(["config", "show"]) == code
    assert capsys.readouterr() == ("", message)


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "build_parser", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.toml", None, "missing.toml: cannot be read (No such file or directory)"),
        ("folder.toml", "folder", "folder.toml: cannot be read (Is a directory)"),
        ("engine.yaml", "dtype: float32", "is .toml or .json"),
        ("engine.toml", "dtype = ", "engine.toml: cannot be parsed"),
        ("engine.json", "{", "engine.json: cannot be parsed"),
        ("engine.json", "\udcff", "engine.json: cannot be parsed"),
        ("engine.json", "[1]", "engine.json: holds a list; a table of settings is needed"),
        ("engine.toml", "dtyp = 'float32'", "engine.toml: dtyp: unknown key"),
        ("engine.toml", "dtype = 'float64'", "engine.toml: dtype: Input should be"),
        ("engine.toml", "[ops]\nattention = 'quick'", "ops.attention: there is no attention operator 'quick'"),
        ("engine.toml", "[ops]\nsampler = 'quick'", "ops.sampler: is no operator family"),
        ("engine.toml", "[cache]\npage_tokens = 20", "cache.page_tokens: 20 is no multiple of 8"),
        (
            "engine.json",
            '{"cache": {"num_pages": 3000000000}}',
            "engine.json: cache.num_pages: Input should be less than",
        ),
        ("engine.toml", "device = 'cuda:99'", "device: cuda:99 is not here"),
        ("engine.toml", "[plugins]\nignore = ['mini-deepinfer:moe']", "moe"),
    ],
)
def test_a_wrong_configuration_file_is_a_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    file = tmp_path / name
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert message in failure(capsys, [*GENERATE, "--config", str(file)])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("engine.toml", "kv_quantization = 'none'\ndtype = 'float32'\ndevice = 'cpu'\n[cache]\nnum_pages = 7\n"),
        (
            "engine.json",
            '{"kv_quantization": "none", "dtype": "float32", "device": "cpu", "cache": {"num_pages": 7}}',
        ),
    ],
)
def test_a_configuration_file_is_followed_and_later_settings_win(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    config = ["--config", str(tmp_path / name)]
    assert main([*GENERATE, *config]) == 0
    small = json.loads(capsys.readouterr().out)
    assert main([*GENERATE, *config, "--set", "cache.num_pages=14"]) == 0
    large = json.loads(capsys.readouterr().out)
    assert large["cache_bytes"] > small["cache_bytes"]
    assert large["token_ids"] == small["token_ids"]
    assert "needs 8 pages" in failure(capsys, [*GENERATE[:2], *config, "--max-tokens", "500", "--ids", "0"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "cannot be read"),
        (lambda path: (path / "config.json").unlink(), "config.json: cannot be read"),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
        (lambda path: (path / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
        (lambda path: (path / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.safetensors"),
        (lambda path: (path / "model-00003-of-00003.safetensors").write_bytes(b""), "model-00003-of-00003.safetensors"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer.json: is not a tokenizer"),
    ],
    ids=["folder", "config", "config-json", "index", "shard", "empty-shard", "tokenizer"],
)
def test_a_directory_that_is_no_checkpoint_is_a_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spoil: object, message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    spoil(model)  # type: ignore[operator]
    assert message in failure(capsys, [*GENERATE, "--model", str(model)])


def test_a_file_is_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json" in failure(capsys, [*GENERATE, "--model", str(TINY / "config.json")])


def test_without_a_tokenizer_ids_run_and_a_text_is_refused_before_it_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("tokenizer*"))
    assert main(["generate", "--model", str(model), "--max-tokens", "3", "--ids", "0,301"]) == 0
    shown = capsys.readouterr().out.split("\n\n")[1].splitlines()[0].split()
    assert len(shown) == 3
    assert all(token.isdigit() for token in shown)
    assert main(["generate", "--model", str(model), "some text"]) == 1
    out, err = capsys.readouterr()
    assert "has no tokenizer.json; give token ids instead" in err
    assert "some text" not in out


@pytest.mark.parametrize("text", ["", " ", "naïve 中文 🎉", "-1 or --json", "a\nb\tc\0d"])
def test_any_text_can_be_continued(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["generate", "--json", "--max-tokens", "1", "--", text]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 1


def test_text_that_is_not_unicode_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not Unicode" in failure(capsys, ["generate", "caf\udce9"])


@pytest.mark.parametrize("arguments", [["generate", "--max-tokens", "300"], ["ops", "list"]])
def test_a_reader_that_leaves_is_no_traceback(arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "minideepinfer", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 1


def test_a_terminal_without_the_characters_still_gets_the_rest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minideepinfer", "generate", "--max-tokens", "1", "naïve 中文"],
        env={"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "na\\xefve \\u4e2d\\u6587" in done.stdout
    assert "decode: no tokens" in done.stdout


def test_every_package_says_that_it_is_typed() -> None:
    packages = [path for root in (ROOT / "engine", *(ROOT / "plugins").iterdir()) for path in root.glob("minideep*")]
    assert len(packages) >= 5
    assert [path.name for path in packages if not (path / "py.typed").is_file()] == []
