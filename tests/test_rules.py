"""The operator rules of an engine config: which one wins, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from fake_plans import DECODE, PREFILL, TileOptions, names, plan_of, registered
from fake_plugins import declaration
from hypothesis import given
from hypothesis import strategies as st
from minideepinfer.errors import ConfigError, OperatorError
from minideepinfer.operators import Phase


def test_the_most_specific_rule_wins() -> None:
    rule = {
        "default": "a",
        "decode": "b",
        "layers": {"0-2": "c", "4": {"name": "d", "options": {}}, "6-7": {"decode": "e"}},
    }
    plan = plan_of({"attention": rule}, *[registered(declaration(name)) for name in "abcde"])
    assert names(plan, "attention", PREFILL) == list("cccadaaaaa")
    assert names(plan, "attention", DECODE) == list("cccbdbeebb")
    reasons = {key: item.reason for key, item in plan.operators.items()}
    assert reasons["attention", 3, PREFILL] == "explicit: ops.attention.default"
    assert reasons["attention", 3, DECODE] == "explicit: ops.attention.decode"
    assert reasons["attention", 0, DECODE] == 'explicit: ops.attention.layers["0-2"]'
    assert reasons["attention", 6, DECODE] == 'explicit: ops.attention.layers["6-7"].decode'


LETTERS = st.sampled_from("abc")
PHASED = st.fixed_dictionaries({}, optional={"prefill": LETTERS, "decode": LETTERS})
CHUNKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=4)


@given(LETTERS, PHASED, CHUNKS, st.lists(LETTERS | PHASED, min_size=4, max_size=4))
def test_rules_against_a_table(default: str, phased: dict[str, str], spans: list[list[int]], values: list[Any]) -> None:
    layers: dict[str, Any] = {}
    table = {(layer, phase): phased.get(phase.value, default) for layer in range(10) for phase in Phase}
    taken: set[int] = set()
    for (first, last), value in zip(spans, values, strict=False):
        if taken & set(range(first, last + 1)):
            continue
        taken |= set(range(first, last + 1))
        layers[f"{first}-{last}" if first < last else str(first)] = value
        for layer in range(first, last + 1):
            for phase in Phase:
                specific = value if isinstance(value, str) else value.get(phase.value)
                table[layer, phase] = specific or table[layer, phase]
    rule = {"default": default, **phased, "layers": layers}
    plan = plan_of({"attention": rule}, *[registered(declaration(name)) for name in "abc"])
    assert {
        (layer, phase): plan.operators["attention", layer, phase].registered.name for layer, phase in table
    } == table


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"a": "plain"}, r'\["a"\]: is not a layer'),
        ({"": "plain"}, r'\[""\]: is not a layer'),
        ({"-1": "plain"}, "is not a layer"),
        ({"1-": "plain"}, "is not a layer"),
        ({"1,2": "plain"}, "is not a layer"),
        ({"2-0": "plain"}, r'runs backwards; write "0-2"'),
        ({"10": "plain"}, r"names layer 10, but the model has layers 0-9"),
        ({"8-10": "plain"}, "names layer 10"),
        ({"0-2": "plain", "2": "plain"}, r': "0-2" and "2" both name layer 2'),
        ({"3": "plain", "03": "plain"}, "both name layer 3"),
        ({"0-5": {"decode": "plain"}, "1-2": {"prefill": "plain"}}, "both name layer 1"),
    ],
)
def test_wrong_layer_keys_are_refused(layers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ops\.attention\.layers.*{message}"):
        plan_of({"attention": {"layers": layers}})


def test_a_rule_that_reaches_no_operator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'ops\.indexer\.layers\["3"\].*layers that do: 2, 4, 5, 7'):
        plan_of({"indexer": {"layers": {"3": "plain"}}})
    with pytest.raises(ConfigError, match=r'ops\.comm\.layers\["0-9"\].*layers that do: none'):
        plan_of({"comm": {"layers": {"0-9": "plain"}}})
    assert names(plan_of({"indexer": {"layers": {"0-9": "plain"}}}), "indexer") == ["plain"] * 4


def test_unknown_family_operator_and_option_are_refused_with_their_path() -> None:
    tiled = registered(declaration("tiled", options=TileOptions), "acme")
    with pytest.raises(ConfigError, match=r"^ops\.engram: .*attention, indexer, moe, comm"):
        plan_of({"engram": "plain"})
    with pytest.raises(OperatorError, match=r'^ops\.attention\.layers\["1"\]\.decode: .*\'fast\'.*plain'):
        plan_of({"attention": {"layers": {"1": {"decode": "fast"}}}})
    with pytest.raises(OperatorError, match=r"^ops\.attention\.default: .*'typo'"):
        plan_of({"attention": {"default": "typo", "prefill": "plain", "decode": "plain"}})
    with pytest.raises(ConfigError, match=r"^ops\.attention\.options: tiles: unknown key.*acme 9\.9.*options: tile$"):
        plan_of({"attention": {"name": "tiled", "options": {"tiles": 3}}}, tiled)
    with pytest.raises(ConfigError, match=r"^ops\.attention\.decode\.options: tile: .*found 0"):
        plan_of({"attention": {"decode": {"name": "tiled", "options": {"tile": 0}}}}, tiled)
    with pytest.raises(ConfigError, match=r"^ops\.attention\.options: .*these options: none"):
        plan_of({"attention": {"name": "plain", "options": {"tile": 1}}})


def test_auto_takes_no_options() -> None:
    with pytest.raises(ConfigError, match=r"^ops\.attention: gives options \['tile'\] to auto"):
        plan_of({"attention": {"name": "auto", "options": {"tile": 1}}})


def test_options_are_validated_and_kept() -> None:
    tiled = registered(declaration("tiled", options=TileOptions))
    ops = {"attention": {"default": "tiled", "layers": {"1": {"name": "tiled", "options": {"tile": 9}}}}}
    plan = plan_of(ops, tiled)
    assert plan.operators["attention", 0, PREFILL].options == TileOptions(tile=4)
    assert plan.operators["attention", 1, PREFILL].options == TileOptions(tile=9)
