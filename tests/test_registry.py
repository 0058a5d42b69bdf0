"""The plugin loader: what it loads, what it refuses, and whom it names."""

from __future__ import annotations

import pytest
from fake_plugins import FakeDistribution, Plugins, declaration
from minideepinfer.errors import OperatorError, PluginError
from minideepinfer.operators import (
    FAMILIES,
    OperatorDeclaration,
    OwnTolerance,
    Phase,
    Support,
    hookimpl,
    load_registry,
)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return Plugins(monkeypatch)


def test_own_operators_come_through_entry_points() -> None:
    registry = load_registry()
    found = {f"{family}:{operator.name}" for family in FAMILIES for operator in registry.operators(family)}
    assert {"attention:naive", "indexer:naive", "moe:naive", "comm:single", "residual:naive", "epilogue:naive"} <= found
    naive = registry.get("attention", "naive")
    assert (naive.distribution, naive.entry_point) == ("mini-deepinfer", "attention")


def test_two_distributions_may_use_the_same_entry_point_name(plugins: Plugins) -> None:
    points = [*plugins.points([declaration("a")], "acme"), *plugins.points([declaration("b")], "bolt", version="2.5")]
    registry = load_registry(points=points)
    assert [(o.name, o.distribution, o.version, o.entry_point) for o in registry.operators("attention")] == [
        ("a", "acme", "1.0", "ops"),
        ("b", "bolt", "2.5", "ops"),
    ]


def test_distribution_names_are_normalised(plugins: Plugins) -> None:
    points = plugins.points([declaration("a")], "Acme_Fast.Ops")
    assert load_registry(points=points).get("attention", "a").distribution == "acme-fast-ops"
    assert load_registry(["acme.fast_ops"], points).operators("attention") == ()


def test_unknown_operator_and_family_say_what_there_is(plugins: Plugins) -> None:
    registry = load_registry(points=plugins.points([declaration("a"), declaration("b")]))
    with pytest.raises(OperatorError, match=r"'c'.*a \(acme\), b \(acme\)"):
        registry.get("attention", "c")
    with pytest.raises(OperatorError, match=r"'engram'.*attention, indexer, moe, comm, residual, epilogue"):
        registry.operators("engram")


@pytest.mark.parametrize("item", ["acme", "acme:ops", "ACME:ops"])
def test_ignored_plugins_are_not_imported(plugins: Plugins, item: str) -> None:
    broken = FakeDistribution("acme", {"ops": "module_that_does_not_exist"}).points
    registry = load_registry([item], [*broken, *plugins.points([declaration("b")], "bolt")])
    assert [operator.name for operator in registry.operators("attention")] == ["b"]


def test_one_entry_point_of_a_distribution_can_be_ignored(plugins: Plugins) -> None:
    modules = {name: plugins.hook(lambda name=name: [declaration(name)]) for name in ("first", "second")}
    registry = load_registry(["acme:first"], FakeDistribution("acme", modules).points)
    assert [operator.name for operator in registry.operators("attention")] == ["second"]


@pytest.mark.parametrize("item", ["bolt", "acme:other", "ops", ""])
def test_ignoring_what_is_not_installed_is_an_error(plugins: Plugins, item: str) -> None:
    with pytest.raises(PluginError, match=r"plugins\.ignore: .*not installed.*acme:ops"):
        load_registry([item], plugins.points([declaration()]))


def test_import_errors_name_the_distribution() -> None:
    with pytest.raises(PluginError, match=r"acme:ops.*cannot be imported: ModuleNotFoundError.*plugins\.ignore"):
        load_registry(points=FakeDistribution("acme", {"ops": "module_that_does_not_exist"}).points)


def test_an_error_in_the_hook_names_the_distribution(plugins: Plugins) -> None:
    def fail() -> list[OperatorDeclaration]:
        raise RuntimeError("no luck")

    with pytest.raises(PluginError, match=r"acme:ops.*RuntimeError: no luck"):
        load_registry(points=FakeDistribution("acme", {"ops": plugins.hook(fail)}).points)


def test_misspelled_hooks_are_errors(plugins: Plugins) -> None:
    @hookimpl
    def minideepinfer_operator() -> list[OperatorDeclaration]:
        return []

    module = plugins.module(minideepinfer_operator=minideepinfer_operator)
    with pytest.raises(PluginError, match=r"acme:ops.*unknown hook 'minideepinfer_operator'"):
        load_registry(points=FakeDistribution("acme", {"ops": module}).points)


def test_hooks_with_arguments_are_errors(plugins: Plugins) -> None:
    @hookimpl
    def minideepinfer_operators(device: str) -> list[OperatorDeclaration]:
        return []

    module = plugins.module(minideepinfer_operators=minideepinfer_operators)
    with pytest.raises(PluginError, match=r"acme:ops.*device"):
        load_registry(points=FakeDistribution("acme", {"ops": module}).points)


def test_a_forgotten_marker_is_an_error(plugins: Plugins) -> None:
    module = plugins.module(minideepinfer_operators=lambda: [declaration()])
    with pytest.raises(PluginError, match=r"acme:ops.*implements no hook.*@hookimpl"):
        load_registry(points=FakeDistribution("acme", {"ops": module}).points)


def test_one_module_announced_twice_is_an_error(plugins: Plugins) -> None:
    module = plugins.hook(lambda: [declaration()])
    with pytest.raises(PluginError, match=r"acme:second.*already registered"):
        load_registry(points=FakeDistribution("acme", {"first": module, "second": module}).points)


def test_duplicate_operators_name_both_distributions(plugins: Plugins) -> None:
    points = [*plugins.points([declaration("same")], "acme"), *plugins.points([declaration("same")], "bolt")]
    with pytest.raises(PluginError, match=r"attention:same.*acme:ops.*bolt:ops.*plugins\.ignore"):
        load_registry(points=points)
    assert load_registry(["bolt"], points).get("attention", "same").distribution == "acme"


def test_equal_names_in_different_families_are_fine(plugins: Plugins) -> None:
    registry = load_registry(points=plugins.points([declaration("same"), declaration("same", "moe")]))
    assert registry.get("moe", "same") is not registry.get("attention", "same")


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_contract_version_is_refused(plugins: Plugins, version: int | None) -> None:
    points = plugins.points([declaration(contract_version=version, family="later")])
    with pytest.raises(PluginError, match=rf"acme:ops.*written for operator contract {version}.*has contract 1"):
        load_registry(points=points)


@pytest.mark.parametrize("returned", [None, "naive", {"attention": 1}, declaration()])
def test_a_hook_must_return_a_list(plugins: Plugins, returned: object) -> None:
    with pytest.raises(PluginError, match=r"acme:ops.*a list of declarations is needed"):
        load_registry(points=FakeDistribution("acme", {"ops": plugins.hook(lambda: returned)}).points)


def test_a_value_that_is_no_declaration_is_refused(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match=r"acme:ops.*declares a dict; an OperatorDeclaration is needed"):
        load_registry(points=plugins.points([declaration(), {"family": "attention"}]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "engram"}, "has family 'engram'; families are"),
        ({"name": "Fast"}, "has name 'Fast'"),
        ({"name": "fast one"}, "has name"),
        ({"name": "fast\n"}, "has name"),
        ({"name": "-fast"}, "has name"),
        ({"name": ""}, "has name"),
        ({"name": "auto"}, "not 'auto'"),
        ({"name": 3}, "has name 3"),
        ({"build": "acme.fast"}, "has build 'acme.fast'"),
        ({"build": "acme.fast:"}, "has build"),
        ({"build": "acme/fast:build"}, "has build"),
        ({"build": "acme..fast:build"}, "has build"),
        ({"build": print}, "has build"),
        ({"options": dict}, "a subclass of OperatorOptions is needed"),
        ({"options": {"tile": 1}}, "a subclass of OperatorOptions is needed"),
        ({"tier": "optimized"}, "Tier is needed"),
        ({"priority": "high"}, "int is needed"),
        ({"refuses": ["never"]}, "a function of the problem"),
        ({"accepts": {"cache": "bf16"}}, "a tuple of layout names"),
        ({"emits": ("selection",)}, "a dict from role"),
        ({"support": Support(devices="cuda")}, "support.devices 'cuda'"),
        ({"support": Support(phases=("decode",))}, "a tuple of Phase"),
        ({"support": Support(min_capability=9)}, "support.min_capability 9"),
        ({"support": Support(requires=("triton.language",))}, "only top-level modules"),
        ({"tolerances": [OwnTolerance("float32", 0.5)]}, "a tuple of OwnTolerance"),
        ({"tolerances": (2.0,)}, "a tuple of OwnTolerance"),
        ({"tolerances": (OwnTolerance("float16", 0.5),)}, "tolerances[0].dtype 'float16'; one of its support.dtypes"),
        ({"tolerances": (OwnTolerance("float32", 0.0),)}, "tolerances[0].factor 0.0; a finite number above 0"),
        ({"tolerances": (OwnTolerance("float32", float("inf"), "so"),)}, "tolerances[0].factor inf"),
        ({"tolerances": (OwnTolerance("float32", float("nan"), "so"),)}, "tolerances[0].factor nan"),
        ({"tolerances": (OwnTolerance("float32", "4"),)}, "tolerances[0].factor '4'"),
        ({"tolerances": (OwnTolerance("float32", 2.0, " "),)}, "tolerances[0].factor 2.0 without a reason"),
        ({"tolerances": (OwnTolerance("float32", 0.5, options={"tile": 1}),)}, "its own options (it has none)"),
        ({"tolerances": (OwnTolerance("float32", 0.5), OwnTolerance("float32", 0.7))}, "the special row comes first"),
        ({"family": "comm", "tolerances": (OwnTolerance("float32", 0.5),)}, "family comm are compared bit by bit"),
    ],
)
def test_malformed_declarations_are_refused(plugins: Plugins, changes: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError) as caught:
        load_registry(points=plugins.points([declaration(**changes)]))
    assert message in str(caught.value)
    assert "plugin acme:ops" in str(caught.value)


def test_every_fault_of_a_declaration_is_listed(plugins: Plugins) -> None:
    support = Support(dtypes=["float32"], phases=(Phase.DECODE,))
    with pytest.raises(PluginError, match=r"has name 'X'.*has build 'y'.*has support\.dtypes"):
        load_registry(points=plugins.points([declaration("X", build="y", support=support)]))
