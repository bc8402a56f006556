"""ImageNet classes by index or by WordNet name, for class-conditional models."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files

from underdraw.errors import ConfigError


@cache
def class_names() -> tuple[tuple[str, ...], ...]:
    """The names of each of the 1000 classes, the most common one first."""
    text = (files("underdraw") / "assets" / "imagenet.txt").read_text(encoding="utf-8")
    return tuple(tuple(line.split(", ")) for line in text.splitlines())


def class_index(prompt: str, count: int) -> int:
    """The class that a prompt names, by its index or one of its names; `count` is the model's number of classes."""
    prompt = prompt.strip()
    if prompt.isdecimal():
        if int(prompt) >= count:
            raise ConfigError(f"there is no class {prompt}; this model has 0 to {count - 1}.")
        return int(prompt)
    indices: dict[str, list[int]] = {}
    for index, names in enumerate(class_names()[:count]):
        for name in names:
            indices.setdefault(name.lower(), []).append(index)
    matches = indices.get(prompt.lower(), [])
    if len(matches) > 1:
        raise ConfigError(f"{prompt!r} is the name of classes {', '.join(map(str, matches))}; give the number.")
    if not matches:
        near = difflib.get_close_matches(prompt.lower(), indices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no ImageNet class is called {prompt!r}.{hint} This model generates classes: give a name or 0 to "
            f"{count - 1}."
        )
    return matches[0]
