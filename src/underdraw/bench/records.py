"""Results that are one JSON file each, as a sentence and a table of Markdown. Knows what figures mean, and no model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from underdraw.bench.results import read_json
from underdraw.bench.tables import markdown
from underdraw.errors import ConfigError

Found = dict[str, Any]


def block(path: Path) -> str:
    """What a page says of a result."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") not in TABLES:
        raise ConfigError(f"{path} is no result of one of {', '.join(TABLES)}; make it again.")
    return f"{head(found)}\n\n{table(found)}"


def head(found: Found) -> str:
    """On what it was measured."""
    machine, settings = found["machine"], found["settings"]
    on = machine["processor"] + f", {machine['threads']} threads" if machine["device"] == "cpu" else machine["device"]
    return HEADS[found["kind"]](found) + (
        f" Drafter {settings['drafter']}, {settings['dtype']}, guidance {settings['guidance']:g}, on {on}, torch "
        f"{machine['torch']}, commit {str(machine['commit'])[:12]}."
    )


def told(settings: Found) -> Found:
    """Settings for records: of a drafter's folder only the name, since the way to it says nothing to others."""
    drafter = str(settings["drafter"])
    return {**settings, "drafter": Path(drafter).name if Path(drafter).is_absolute() else drafter}


def table(found: Found) -> str:
    """The figures."""
    return TABLES[found["kind"]](found)


SUBJECTS = ("pictures", "count", "top-1", "top-5", "median rank", "top-1, other styles", "top-5, other styles",
            "border has the colour")  # fmt: skip
NAMES = {
    "training": "training subjects", "held-out": "held-out subjects", "new style": "known subject in a new style",
    "new pair": "new pairs, each half",
}  # fmt: skip
SOURCES = {"drawn": "drawn", "true": "true pictures", "coded": "true pictures after the tokenizer"}


def _subjects_head(found: Found) -> str:
    return (
        f"Rank of the asked subject among {found['candidates']} ({found['held_out_candidates']} of them held out) by "
        f"the nearest of {found['gallery']} true pictures in the features of {found['network']}; temperature "
        f"{found['settings']['temperature']:g}, seed {found['seed']}."
    )


def _subjects(found: Found) -> str:
    chance = found["chance"]
    rows = [["chance", "", _share(chance["top1"]), _share(chance["top5"]), f"{chance['median_rank']:g}",
             _share(chance["top1"]), _share(chance["top5"]), _share(chance["colour"])]]  # fmt: skip
    for entry in found["sets"]:
        for source, name in SOURCES.items():
            if source in entry:
                rows.append(_subject_row(f"{NAMES[entry['set']]}: {name}", entry[source]))
    return markdown(SUBJECTS, rows)


def _subject_row(name: str, one: Found) -> list[str]:
    return [
        name, str(one["ranked"]), _share(one["top1"]), _share(one["top5"]), f"{one['median_rank']:g}",
        _share(one["other_top1"]), _share(one["other_top5"]), _share(one["colour"]),
    ]  # fmt: skip


def _statistics_head(found: Found) -> str:
    return f"{found['prompts']} prompts, seeds from {found['seed']}, tree {found['settings']['tree']}."


def _statistics(found: Found) -> str:
    parts = []
    if found["loss"]:
        rows = [[name, str(one["pictures"]), f"{one['loss']:.3f}", f"{one['without_caption']:.3f}"]
                for name, one in found["loss"].items()]  # fmt: skip
        parts.append(markdown(("subjects", "pictures", "loss, nats a code", "without the caption"), rows))
    names = ("left", "above", "above-right")
    rows = []
    for one in found["entries"]:
        for what, key in (("accepted lengths of passes", "length_correlation"), ("first child", "first_child")):
            if key in one:
                shown = ["-" if one[key][name] is None else f"{one[key][name]:.2f}" for name in names]
                rows.append([f"{one['temperature']:g}", f"{one['entropy']:.2f}", _share(one["top1"]),
                             f"{one['tokens_per_pass']:.2f}", what, *shown])  # fmt: skip
    titles = ("T", "entropy, nats a code", "top-1 chance", "tokens a pass", "correlation of", *names)
    parts.append(markdown(titles, rows))
    deep = [one for one in found["entries"] if "accepted" in one]
    if deep:
        best = [f"T={one['temperature']:g}: {count}" for one in deep for count in (1, 2, 4, 8)]
        levels = min(len(one["accepted"]) for one in deep)
        rows = [
            [str(level + 1), *(f"{share:.2f}" for one in deep for share in one["accepted"][level])]
            for level in range(levels)
        ]
        parts.append("Chance that the target's token is among the best k children, all before it accepted:")
        parts.append(markdown(("depth", *best), rows))
    else:
        rows = [[f"{one['temperature']:g}", *_lengths(one["lengths"])] for one in found["entries"]]
        parts.append("Share of passes that accept so many guesses:")
        parts.append(markdown(("T", "0", "1", "2 to 3", "4 to 7", "8 to 15", "16 and more"), rows))
    return "\n\n".join(parts)


def _lengths(counts: list[int]) -> list[str]:
    bounds, total = (0, 1, 2, 4, 8, 16, len(counts) + 16), sum(counts)
    return [_share(sum(counts[low:high]) / total) for low, high in pairwise(bounds)]


TARGETS = ("T", "what", "wanted", "measured", "")


def _targets_head(found: Found) -> str:
    return f"{found['prompts']} prompts, {found['repeats']} turns, against plain AR in the same turn."


def _targets(found: Found) -> str:
    rows = [
        [one["temperature"], one["what"], one["wanted"], one["measured"], "reached" if one["reached"] else "missed"]
        for one in found["checks"]
    ]
    return markdown(TARGETS, rows)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


HEADS = {"subjects": _subjects_head, "statistics": _statistics_head, "targets": _targets_head}
TABLES = {"subjects": _subjects, "statistics": _statistics, "targets": _targets}
