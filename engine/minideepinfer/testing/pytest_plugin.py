"""The options of the conformance kit for pytest; imports nothing heavy.

Installed with the wheel; without it `-p minideepinfer.testing.pytest_plugin` loads it. It adds options and changes
nothing unless `minideepinfer.testing.conformance` is collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `minideepinfer.testing.conformance` reads."""
    group = parser.getgroup(
        "mini-deepinfer", "conformance of operators (pytest --pyargs minideepinfer.testing.conformance)"
    )
    group.addoption(
        "--operator",
        action="append",
        default=[],
        metavar="[DISTRIBUTION:]FAMILY/NAME",
        help="operator to check, e.g. acme_ops:attention/acme-tiled or attention:naive; default all that are installed",
    )
    group.addoption("--operator-device", default="cpu", choices=("cpu", "cuda"), help="where to check operators")
    group.addoption("--operator-profile", default="quick", choices=("quick", "thorough"), help="how hard to look")
    group.addoption("--operator-seed", default=0, type=int, help="seed of the examples drawn")
