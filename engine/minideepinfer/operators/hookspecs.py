"""The hooks of the plugin system. They run once, at load time; numbers never pass through pluggy."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from minideepinfer.operators.declaration import OperatorDeclaration

PROJECT = "minideepinfer"
"""pluggy's project name."""

ENTRY_POINT_GROUP = "minideepinfer.plugins"
"""Entry-point group in which distributions, ours included, announce a plugin module."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def minideepinfer_operators() -> Sequence[OperatorDeclaration]:
    """Return the declarations of this plugin's operators."""
    raise NotImplementedError
