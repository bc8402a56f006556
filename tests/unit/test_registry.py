"""Specifications `name:key=value`: parsing, building, describing, hints for typing errors, and entry points."""

from __future__ import annotations

import dataclasses
import sys
import types
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underdraw import registry
from underdraw.drafters.jacobi import Jacobi
from underdraw.errors import ConfigError, unknown
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.fixed import Chain, NoTree, Static
from underdraw.registry import Registry, convert, drafters, parse, policies, verifiers
from underdraw.verifiers.lantern import Lantern

FAST = settings(max_examples=150, deadline=None, derandomize=True)
WORD = st.text("abcdefghijklmnopqrstuvwxyz_0123456789-.", min_size=1, max_size=12)
VALUE = st.text("abcdefghijklmnopqrstuvwxyz_0123456789-./=:+", min_size=1, max_size=12)
SPACE = st.text(" \t", max_size=2)


@FAST
@given(WORD, st.dictionaries(WORD, VALUE, max_size=5), SPACE)
def test_parse_round_trip(name: str, options: dict[str, str], space: str) -> None:
    text = (
        name
        + (":" if options else "")
        + ",".join(f"{space}{key}{space}={space}{value}" for key, value in options.items())
    )
    spec = parse(f"{space}{text}{space}")
    assert spec.name == name
    assert dict(spec.options) == options


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("exact", "exact", {}),
        ("exact:", "exact", {}),
        ("chain:depth=4", "chain", {"depth": "4"}),
        ("chain:depth=4,", "chain", {"depth": "4"}),
        ("static:shape=trees/a=b.json", "static", {"shape": "trees/a=b.json"}),
        ("static:shape=C:/trees/x.json", "static", {"shape": "C:/trees/x.json"}),
        (" chain : depth = 4 ", "chain", {"depth": "4"}),
    ],
)
def test_parse_examples(text: str, name: str, options: dict[str, str]) -> None:
    spec = parse(text)
    assert (spec.name, dict(spec.options)) == (name, options)


@pytest.mark.parametrize("text", ["", "  ", ":", ":depth=3", "chain:depth", "chain:=3", "chain:depth=", "a:b=1,b=2"])
def test_parse_rejects_malformed_text(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


@FAST
@given(st.data())
def test_build_round_trip(data: Any) -> None:
    """A specification builds the same component as the constructor, and `describe` is its inverse."""
    values = {
        "init": st.sampled_from(["horizontal", "vertical", "random", "both", "previous"]),
        "beta": st.floats(0, 1),
        "l_d": st.integers(0, 5),
        "l_k": st.integers(0, 5),
        "depth": st.integers(2, 10),
        "width": st.integers(2, 12),
        "d_min": st.integers(1, 2),
        "d_max": st.integers(10, 12),
        "k_max": st.integers(12, 14),
        "nodes": st.integers(13, 128),
    }
    chosen = data.draw(st.sets(st.sampled_from(sorted(values))))
    options = {key: data.draw(values[key]) for key in sorted(chosen)}
    text = "adjacency:" + ",".join(f"{key}={value}" for key, value in options.items())
    policy = policies.build(text)
    assert policy == Adjacency(**options)
    assert policies.build(policies.describe(policy)) == policy


def test_build_returns_components_unchanged() -> None:
    policy = Chain(depth=3)
    assert policies.build(policy) is policy


@pytest.mark.parametrize(
    ("kind", "component", "text"),
    [
        (policies, NoTree(), "none"),
        (policies, Chain(depth=3), "chain:depth=3"),
        (verifiers, Lantern().bind(torch.eye(4)), "lantern:delta=0.1,k=1000,rule=consistent"),
        (drafters, Jacobi(window=4), "jacobi:window=4,init=above"),
        (drafters, object(), "object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_describe_uses_the_registered_name(kind: Registry[Any], component: object, text: str) -> None:
    assert kind.describe(component) == text


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [(policies, ["plan"]), (verifiers, ["verify", "proposals"]), (drafters, ["open", "proposes"])],
)
def test_every_name_builds(kind: Registry[Any], attributes: list[str]) -> None:
    """A component is a frozen dataclass that can be built from its name alone."""
    assert kind.names()
    for name in kind.names():
        component = kind.build(name)
        assert dataclasses.is_dataclass(component)
        assert component.__dataclass_params__.frozen, name  # type: ignore[union-attr]
        assert all(getattr(component, attribute, None) is not None for attribute in attributes), name
        assert kind.get(name) is type(component)
        assert kind.describe(component).partition(":")[0] == name
        assert kind.build(kind.describe(component)) == component


@pytest.mark.parametrize("spec", ["none", "chain", "static", "confidence", "adjacency"])
def test_documented_policies_are_registered(spec: str) -> None:
    assert spec in policies.names()


@pytest.mark.parametrize("table", ["mc_sim_7b_63", "naive_extend_57"])
def test_static_tables_by_name(table: str) -> None:
    assert policies.build(f"static:shape={table}") == Static(table)


@pytest.mark.parametrize(
    ("kind", "spec", "typed", "hint"),
    [
        (policies, "adjacancy", "adjacancy", "adjacency"),
        (policies, "Adjacency", "Adjacency", "adjacency"),
        (policies, "confidance:depth=3", "confidance", "confidence"),
        (policies, "adjacency:dpeth=3", "dpeth", "depth"),
        (policies, "adjacency:init=horizontl", "horizontl", "horizontal"),
        (policies, "static:shape=medusa_2_7b", "medusa_2_7b", "medusa_2_7b_63"),
        (verifiers, "exakt", "exakt", "exact"),
        (verifiers, "lantern:detla=0.2", "detla", "delta"),
        (drafters, "jakobi", "jakobi", "jacobi"),
        (drafters, "neighbor", "neighbor", "neighbour"),
        (drafters, "jacobi:init=abov", "abov", "above"),
    ],
)
def test_typing_errors_get_a_suggestion(kind: Registry[Any], spec: str, typed: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.build(spec)
    assert f"{typed!r}" in str(caught.value)
    assert f"Did you mean {hint!r}?" in str(caught.value)


def test_no_suggestion_without_a_similar_name() -> None:
    with pytest.raises(ConfigError) as caught:
        verifiers.build("zzz")
    assert "Did you mean" not in str(caught.value)
    assert "Allowed: exact, lantern, rejection." in str(caught.value)
    assert str(unknown("thing", "x", [])) == "unknown thing 'x'. Allowed: none."


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("7", int, 7),
        ("-7", int, -7),
        ("0.25", float, 0.25),
        ("3", float, 3.0),
        ("1e-3", float, 1e-3),
        ("word", str, "word"),
        ("b", Literal["a", "b"], "b"),
        ("none", float | None, None),
        ("None", int | None, None),
        ("2.5", float | None, 2.5),
        ("4", int | None, 4),
        ("none", str, "none"),
        ("true", bool, True),
        ("False", bool, False),  # as `describe` writes it
    ],
)
def test_option_conversion(text: str, kind: Any, value: Any) -> None:
    converted = convert(text, kind, "part:option")
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x", int),
        ("2.5", int),
        ("", int),
        ("x", float),
        ("c", Literal["a", "b"]),
        ("x", int | None),
        ("1", bool),
        ("x", list),
    ],
)
def test_option_conversion_rejects(text: str, kind: Any) -> None:
    with pytest.raises(ConfigError, match="part:option"):
        convert(text, kind, "part:option")


def test_options_that_may_be_none() -> None:
    assert verifiers.build("lantern:ratio=none") == Lantern()
    assert verifiers.build("lantern:ratio=5,delta=1") == Lantern(delta=1.0, ratio=5.0)


# ----------------------------------------------------------------------------------------------------- entry points


@dataclass(frozen=True)
class Foreign:
    """A component of another package."""

    size: int = 2


@dataclass(frozen=True)
class Entry:
    name: str
    value: str = f"{__name__}:Foreign"

    def load(self) -> type[Foreign]:
        return Foreign


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str | None = None) -> list[Entry]:
        assert group == "underdraw.policy"
        return [entry for entry in (Entry("foreign"), Entry("none")) if name in (None, entry.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)


@pytest.mark.usefixtures("foreign")
def test_entry_points_add_components() -> None:
    assert policies.build("foreign:size=5") == Foreign(5)
    assert policies.get("foreign") is Foreign
    assert policies.describe(Foreign(5)) == "foreign:size=5"
    assert "foreign" in policies.names()
    with pytest.raises(ConfigError, match="Did you mean 'foreign'"):
        policies.build("foriegn")
    with pytest.raises(ConfigError, match=r"unknown option of policy foreign 'sise'\. Did you mean 'size'"):
        policies.build("foreign:sise=5")


@pytest.mark.usefixtures("foreign")
def test_entry_points_do_not_replace_built_in_components() -> None:
    assert type(policies.build("none")).__name__ == "NoTree"
    assert policies.names().count("none") == 1


def test_entries_are_imported_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_module")
    module.Foreign = Foreign  # type: ignore[attr-defined]
    lazy: Registry[Foreign] = Registry("thing", {"late": "some_module:Foreign"})
    assert "late" in lazy.names()
    monkeypatch.setitem(sys.modules, "some_module", module)
    assert lazy.build("late:size=9") == Foreign(9)
