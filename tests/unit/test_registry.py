"""Specifications: `name:key=value` means the same everywhere, wrong names get a hint, other packages add parts."""

from __future__ import annotations

import dataclasses
import sys
import types
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underdraw import registry
from underdraw.errors import ConfigError, unknown
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.fixed import Chain, Static
from underdraw.registry import Registry, convert, drafters, parse, policies, verifiers
from underdraw.verifiers.lantern import Lantern

FAST = settings(max_examples=150, deadline=None, derandomize=True)
WORD = st.text("abcdefghijklmnopqrstuvwxyz_0123456789-.", min_size=1, max_size=12)
VALUE = st.text("abcdefghijklmnopqrstuvwxyz_0123456789-./=:+", min_size=1, max_size=12)
SPACE = st.text(" \t", max_size=2)


@FAST
@given(WORD, st.dictionaries(WORD, VALUE, max_size=5), SPACE)
def test_parse_reads_what_was_written(name: str, options: dict[str, str], space: str) -> None:
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
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


@FAST
@given(st.data())
def test_build_round_trip(data: Any) -> None:
    """Any set of options, written down, builds the same part as the constructor."""
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
    assert policies.build(text) == Adjacency(**options)


def test_build_returns_parts_as_they_are() -> None:
    part = Chain(depth=3)
    assert policies.build(part) is part


@pytest.mark.parametrize(
    ("kind", "duties"), [(policies, ["plan"]), (verifiers, ["verify", "proposals"]), (drafters, ["open"])]
)
def test_every_registered_name_builds(kind: Registry[Any], duties: list[str]) -> None:
    """A part is a frozen dataclass that can be built from its name alone."""
    assert kind.names()
    for name in kind.names():
        part = kind.build(name)
        assert dataclasses.is_dataclass(part)
        assert part.__dataclass_params__.frozen, name  # type: ignore[union-attr]
        assert all(getattr(part, duty, None) is not None for duty in duties), name
        assert kind.get(name) is type(part)


@pytest.mark.parametrize("spec", ["none", "chain", "static", "confidence", "adjacency"])
def test_policies_named_in_the_design_are_there(spec: str) -> None:
    assert spec in policies.names()


@pytest.mark.parametrize("table", ["mc_sim_7b_63", "naive_extend_57"])
def test_static_tables_by_name(table: str) -> None:
    assert policies.build(f"static:shape={table}") == Static(table)


@pytest.mark.parametrize(
    ("kind", "spec", "given_name", "hint"),
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
def test_did_you_mean(kind: Registry[Any], spec: str, given_name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.build(spec)
    assert f"{given_name!r}" in str(caught.value)
    assert f"Did you mean {hint!r}?" in str(caught.value)


def test_a_name_like_no_other_gets_the_list_alone() -> None:
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
    ],
)
def test_option_conversion(text: str, kind: Any, value: Any) -> None:
    found = convert(text, kind, "part:option")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("x", int), ("2.5", int), ("", int), ("x", float), ("c", Literal["a", "b"]), ("x", int | None), ("x", list)],
)
def test_options_that_cannot_be_converted(text: str, kind: Any) -> None:
    with pytest.raises(ConfigError, match="part:option"):
        convert(text, kind, "part:option")


def test_optional_options_of_a_real_part() -> None:
    assert verifiers.build("lantern:ratio=none") == Lantern()
    assert verifiers.build("lantern:ratio=5,delta=1") == Lantern(delta=1.0, ratio=5.0)


# ----------------------------------------------------------------------------------------------------- entry points


@dataclass(frozen=True)
class Foreign:
    """A part of another package."""

    size: int = 2


@dataclass(frozen=True)
class Entry:
    name: str

    def load(self) -> type[Foreign]:
        return Foreign


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str, name: str | None = None) -> list[Entry]:
        assert group == "underdraw.policy"
        return [entry for entry in (Entry("foreign"), Entry("none")) if name in (None, entry.name)]

    monkeypatch.setattr(registry, "entry_points", entry_points)


@pytest.mark.usefixtures("foreign")
def test_entry_points_add_parts() -> None:
    assert policies.build("foreign:size=5") == Foreign(5)
    assert policies.get("foreign") is Foreign
    assert "foreign" in policies.names()
    with pytest.raises(ConfigError, match="Did you mean 'foreign'"):
        policies.build("foriegn")
    with pytest.raises(ConfigError, match=r"unknown option of policy foreign 'sise'\. Did you mean 'size'"):
        policies.build("foreign:sise=5")


@pytest.mark.usefixtures("foreign")
def test_entry_points_do_not_replace_our_own_parts() -> None:
    assert type(policies.build("none")).__name__ == "NoTree"
    assert policies.names().count("none") == 1


def test_parts_are_imported_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_part")
    module.Foreign = Foreign  # type: ignore[attr-defined]
    lazy: Registry[Foreign] = Registry("thing", {"late": "some_part:Foreign"})
    assert "late" in lazy.names()
    monkeypatch.setitem(sys.modules, "some_part", module)
    assert lazy.build("late:size=9") == Foreign(9)
