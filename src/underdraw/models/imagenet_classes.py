"""ImageNet's classes by number or name. The names are WordNet's."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files

from underdraw.errors import ConfigError


@cache
def labels() -> tuple[tuple[str, ...], ...]:
    """The names of every class, the usual one first."""
    text = (files("underdraw") / "assets" / "imagenet.txt").read_text(encoding="utf-8")
    return tuple(tuple(line.split(", ")) for line in text.splitlines())


def class_of(text: str, count: int) -> int:
    """The class that a prompt means: its number, or one of its names."""
    text = text.strip()
    if text.isdecimal():
        if int(text) >= count:
            raise ConfigError(f"there is no class {text}; this model knows 0 to {count - 1}.")
        return int(text)
    names: dict[str, list[int]] = {}
    for number, row in enumerate(labels()[:count]):
        for name in row:
            names.setdefault(name.lower(), []).append(number)
    found = names.get(text.lower(), [])
    if len(found) > 1:
        raise ConfigError(f"{text!r} is the name of classes {', '.join(map(str, found))}; give the number.")
    if not found:
        near = difflib.get_close_matches(text.lower(), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no ImageNet class is called {text!r}.{hint} This model draws classes: give a name or 0 to {count - 1}."
        )
    return found[0]


def check_class(text: str, count: int) -> None:
    """Refuse words that name no class."""
    class_of(text, count)
