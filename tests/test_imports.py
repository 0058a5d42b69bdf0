"""Who may import whom: the core knows no plugin, and what lists operators needs no torch. Also run by `make check`."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest
from measured import within_budget
from minideepinfer.operators import FAMILIES

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = [ROOT / "engine", *sorted(path for path in (ROOT / "plugins").iterdir() if path.is_dir())]
PLUGIN_PACKAGES = {child.name for root in SOURCE_ROOTS[1:] for child in root.iterdir() if child.name != "__pycache__"}
CORE_FILES = sorted((ROOT / "engine").rglob("*.py"))


def mentioned_modules(source: str) -> set[str]:
    """Top-level names that a file imports, or spells in a string that could be imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(node.value.replace(":", ".").split(".")[:1])
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import minideepinfer_moe",
        "import minideepinfer_moe.naive as naive",
        "def f():\n    from minideepinfer_moe.naive import build",
        "import importlib\nimportlib.import_module('minideepinfer_moe.naive')",
        "path = 'minideepinfer_moe.naive:build'",
    ],
)
def test_the_check_sees_every_way_to_import(source: str) -> None:
    assert mentioned_modules(source) & PLUGIN_PACKAGES == {"minideepinfer_moe"}


def test_the_core_imports_no_plugin() -> None:
    assert {f"minideepinfer_{family}" for family in FAMILIES} <= PLUGIN_PACKAGES
    assert len(CORE_FILES) > 20
    offenders = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in CORE_FILES
        if (found := mentioned_modules(file.read_text(encoding="utf-8")) & PLUGIN_PACKAGES)
    }
    assert offenders == {}


def imports(source: str, name: str) -> bool:
    """Whether a file imports a module, or something from it."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(module == name or module.startswith(f"{name}.") for module in found)


def test_only_comm_operators_the_world_and_the_launcher_touch_torch_distributed() -> None:
    files = [file for root in SOURCE_ROOTS for file in root.rglob("*.py")]
    users = {str(f.relative_to(ROOT)) for f in files if imports(f.read_text(encoding="utf-8"), "torch.distributed")}
    core = {name for name in users if name.startswith("engine")}
    assert core == {f"engine/minideepinfer/runtime/{name}.py" for name in ("world", "launch")}
    assert {name for name in users - core if not name.startswith("plugins/comm/")} == set()


def test_every_source_root_holds_one_package() -> None:
    for root in SOURCE_ROOTS:
        assert len([child for child in root.iterdir() if child.name != "__pycache__"]) == 1, root


def heavy_modules_after(statement: str) -> tuple[str, float]:
    """Which of torch and triton a fresh process holds after a statement, and how long the whole process took."""
    code = f"import sys\n{statement}\nprint(sorted({{'torch', 'triton'}} & set(sys.modules)), file=sys.stderr)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.strip(), time.perf_counter() - start


@pytest.mark.parametrize("module", ["minideepinfer.operators", "minideepinfer.config", "minideepinfer.cli.main"])
def test_light_modules_import_neither_torch_nor_triton(module: str) -> None:
    assert heavy_modules_after(f"import {module}")[0] == "[]"


@pytest.mark.parametrize("arguments", [["ops", "list"], ["ops", "list", "--json"], ["config", "show"]])
def test_listing_operators_is_light(arguments: list[str]) -> None:
    statement = f"from minideepinfer.cli.main import main\nassert main({arguments}) == 0"
    heavy, seconds = heavy_modules_after(statement)
    assert heavy == "[]"
    within_budget(f"mini-deepinfer {' '.join(arguments)}", seconds)
