"""The pages tell the truth: generated ones are current, links lead somewhere, commands and code run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from minideepinfer.config.reference import config_reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of a page, those that CI runs by itself left out."""
    text = re.sub(r"<!-- ci: \w+ -->\n```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


COMMANDS = [
    pytest.param(line, id=f"{page.name}: {line}")
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("mini-deepinfer ")
]


def test_the_config_reference_is_current() -> None:
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == config_reference(), "run `make docs`"


def test_every_setting_has_a_description() -> None:
    assert "| None |" not in re.sub(r"`None` \|", "", config_reference())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_modules_that_the_token_meets_exist() -> None:
    text = (ROOT / "docs/token-flow.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:model|runtime|cache|operators|checkpoint)/\w+\.py)`", text))
    assert len(named) > 5
    assert [name for name in named if not (ROOT / "engine/minideepinfer" / name).exists()] == []


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line: str) -> None:
    words = shlex.split(line)
    result = subprocess.run(
        [sys.executable, "-m", "minideepinfer", *words[1:]], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_readme_example_runs() -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 20


def test_ci_finds_both_command_lines() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- ci: run -->\n```bash\npython3 -m venv .*generate.*\n```", text)
    assert re.search(r"<!-- ci: test -->\n```bash\npython3 -m venv .*pytest\n```", text)
