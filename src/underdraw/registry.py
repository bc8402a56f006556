"""Registries: names of policies, verifiers, drafters and families, and `name:key=value` specifications of them.

Entries are imported on first use; installed packages add more through entry points. A component is a frozen dataclass
whose fields are its options, so that one text means the same on the command line, in Python and in a file.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from underdraw.errors import ConfigError, unknown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed `name:key=value,key=value`."""

    name: str
    options: Mapping[str, str]


def parse(text: str) -> Spec:
    """Split a specification; values stay text until `Registry.build` converts them to the fields' types."""
    name, _, rest = text.strip().partition(":")
    if not name:
        raise ConfigError(f"{text!r} has no name; write name or name:key=value,key=value.")
    options: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise ConfigError(f"{item!r} in {text!r} is not key=value.")
        if key in options:
            raise ConfigError(f"option {key!r} is set twice in {text!r}.")
        options[key] = value
    return Spec(name.strip(), options)


def convert(text: str, kind: Any, option: str) -> Any:
    """`text` as a value of the annotated type `kind`: int, float, bool, str, a Literal, or one of these or None."""
    origin = get_origin(kind)
    if origin is Literal:
        if text not in get_args(kind):
            raise unknown(f"value of {option}", text, get_args(kind))
        return text
    if origin in (Union, types.UnionType):
        if text.lower() == "none" and type(None) in get_args(kind):
            return None
        return convert(text, next(a for a in get_args(kind) if a is not type(None)), option)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{option} takes {expected}, not {text!r}.") from None
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{option} takes true or false, not {text!r}.")
        return text.lower() == "true"
    if kind is str:
        return text
    raise ConfigError(f"{option} cannot be set by text.")


class Registry(Generic[T]):
    """All components of one kind, by name."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        """`entries` maps names to `module:attribute`."""
        self.kind = kind
        self.group = f"underdraw.{kind}"
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Every name, those of installed packages included."""
        return sorted(self._paths())

    def get(self, name: str) -> type[T]:
        """The class registered under a name, imported now."""
        if name in self._entries:
            module, _, attribute = self._entries[name].partition(":")
            return cast("type[T]", getattr(importlib.import_module(module), attribute))
        for entry in entry_points(group=self.group, name=name):
            return cast("type[T]", entry.load())
        raise unknown(self.kind, name, self.names())

    def build(self, spec: str | T) -> T:
        """Build the component that a specification describes; a component is returned unchanged."""
        if not isinstance(spec, str):
            return spec
        parsed = parse(spec)
        cls = self.get(parsed.name)
        fields = {f.name for f in dataclasses.fields(cast(Any, cls)) if f.init}
        hints = get_type_hints(cls)
        values = {}
        for key, text in parsed.options.items():
            if key not in fields:
                raise unknown(f"option of {self.kind} {parsed.name}", key, fields)
            values[key] = convert(text, hints[key], f"{parsed.name}:{key}")
        return cls(**values)

    def describe(self, component: T) -> str:
        """The specification of a component, the inverse of `build`; options that are not numbers or text are left out.

        A component that is not registered is described by its class name.
        """
        cls = type(component)
        path = f"{cls.__module__}:{cls.__qualname__}"
        name = next((name for name, entry in self._paths().items() if entry == path), cls.__name__.lower())
        fields = dataclasses.fields(component) if dataclasses.is_dataclass(component) else ()
        values = {field.name: getattr(component, field.name) for field in fields}
        options = ",".join(f"{key}={value}" for key, value in values.items() if isinstance(value, int | float | str))
        return f"{name}:{options}" if options else name

    def _paths(self) -> dict[str, str]:
        """`module:attribute` of every name; the package's own entries win over those of other packages."""
        return {**{entry.name: entry.value for entry in entry_points(group=self.group)}, **self._entries}


policies: Registry[Any] = Registry(
    "policy",
    {
        "none": "underdraw.policies.fixed:NoTree",
        "chain": "underdraw.policies.fixed:Chain",
        "static": "underdraw.policies.fixed:Static",
        "confidence": "underdraw.policies.confidence:Confidence",
        "adjacency": "underdraw.policies.adjacency:Adjacency",
        "cost": "underdraw.policies.cost:Cost",
        "trunk": "underdraw.policies.trunk:Trunk",
        "budget": "underdraw.policies.budget:Budget",
    },
)
verifiers: Registry[Any] = Registry(
    "verifier",
    {
        "exact": "underdraw.verifiers.exact:Exact",
        "rejection": "underdraw.verifiers.rejection:Rejection",
        "lantern": "underdraw.verifiers.lantern:Lantern",
    },
)
drafters: Registry[Any] = Registry(
    "drafter",
    {
        "jacobi": "underdraw.drafters.jacobi:Jacobi",
        "jacobi-tree": "underdraw.drafters.jacobi_tree:JacobiTree",
        "neighbour": "underdraw.drafters.neighbour:Neighbour",
        "forced": "underdraw.drafters.forced:Forced",
    },
)
families: Registry[Any] = Registry(
    "family",
    {
        name: f"underdraw.models.{name}:FAMILY"
        for name in ("anole", "emu3", "glm_image", "janus", "llamagen", "lumina", "lumina2", "simplear", "tiny")
    },
)
