"""Which metric needs what, and what it says of a folder of pictures: readers, networks and formulas together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from underdraw.errors import ConfigError, unknown
from underdraw.metrics import networks, scores
from underdraw.metrics.exact_match import Picture, codes_of, exact_match, join, picture_files, read_folder
from underdraw.metrics.network_weights import find
from underdraw.metrics.two_sample import two_sample

METRICS = ("exact", "test", "fid", "is", "pr", "clip", "hps", "aesthetic")
COMPARING = ("exact", "test", "fid", "pr")  # need a second folder
JOINED = ("exact", "test")
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What is measured of which folder."""

    folder: Path
    against: Path | None
    metrics: Sequence[str]
    weights: Path | None

    def check(self) -> None:
        """Refuse what cannot be answered before anything is looked at."""
        for name in self.metrics:
            if name not in METRICS:
                raise unknown("metric", name, METRICS)
        missing = [name for name in self.metrics if name in COMPARING and self.against is None]
        if missing:
            raise ConfigError(f"{missing[0]} compares two folders; name the other one with --against FOLDER.")
        for name in self.metrics:
            for key in NEEDS.get(name, ()):
                find(key, self.weights, name)


NEEDS = {
    "fid": ("inception",), "is": ("inception",), "pr": ("inception",), "clip": ("clip",), "hps": ("hps",),
    "aesthetic": ("clip", "aesthetic"),
}  # fmt: skip


def evaluate(question: Question, advance: Advance) -> dict[str, Any]:
    """The value of every metric that was asked for. `advance` hears of pictures that a network has seen."""
    question.check()
    pictures = read_folder(question.folder)
    found: dict[str, Any] = {"folder": str(question.folder), "pictures": len(pictures)}
    asked = set(question.metrics)
    if asked & set(JOINED):
        found.update(_joined(question, pictures, asked))
    if asked & {"fid", "is", "pr"}:
        found.update(_inception(question, pictures, asked, advance))
    if asked & {"clip", "aesthetic"}:
        found.update(_clip(question, pictures, asked, advance))
    if "hps" in asked:
        pair = networks.hps(find("hps", question.weights, "hps"))
        images, texts = _embedded(pair, pictures, advance)
        found["hps"] = round(float(scores.similarity(images, texts).mean()), 5)
    return found


def looks(question: Question) -> int:
    """How many pictures networks will look at, for a bar."""
    count = len(read_folder(question.folder))
    asked = set(question.metrics)
    total = count * (bool(asked & {"fid", "is", "pr"}) + bool(asked & {"clip", "aesthetic"}) + ("hps" in asked))
    if asked & {"fid", "pr"} and question.against is not None:
        total += len(picture_files(question.against))
    return total


def _joined(question: Question, pictures: dict[int, Picture], asked: set[str]) -> dict[str, Any]:
    assert question.against is not None
    both = join(pictures, read_folder(question.against))
    found: dict[str, Any] = {
        "against": str(question.against), "joined": len(both.ids), "only_here": both.only_ours,
        "only_there": both.only_theirs,
    }  # fmt: skip
    if "exact" in asked:
        found["exact"] = exact_match(both)
    if "test" in asked:
        ours, theirs = codes_of(both.ours), codes_of(both.theirs)
        if ours is None or theirs is None:
            folder = question.folder if ours is None else question.against
            raise ConfigError(f"the manifest of {folder} holds no codes; draw it again with this version of underdraw.")
        result = two_sample(ours, theirs, paired=True)
        found["test"] = {"mmd": round(result.statistic, 6), "p": round(result.p_value, 5)}
    return found


def _inception(question: Question, pictures: dict[int, Picture], asked: set[str], advance: Advance) -> dict[str, Any]:
    network = networks.inception(find("inception", question.weights, "fid"))
    features, logits = networks.look(network, [picture.path for picture in pictures.values()], advance)
    found: dict[str, Any] = {}
    if "is" in asked:
        mean, spread = scores.inception_score(logits)
        found["is"] = {"mean": round(mean, 4), "spread": round(spread, 4)}
    if asked & {"fid", "pr"}:
        assert question.against is not None
        real, _ = networks.look(network, picture_files(question.against), advance)
        if "fid" in asked:
            found["fid"] = round(scores.fid(real, features), 4)
        if "pr" in asked:
            precision, recall = scores.precision_recall(real, features)
            found["pr"] = {"precision": round(precision, 4), "recall": round(recall, 4)}
    return found


def _clip(question: Question, pictures: dict[int, Picture], asked: set[str], advance: Advance) -> dict[str, Any]:
    images, texts = _embedded(networks.clip(find("clip", question.weights, "clip")), pictures, advance)
    found: dict[str, Any] = {}
    if "clip" in asked:
        found["clip"] = round(scores.clip_score(images, texts), 4)
    if "aesthetic" in asked:
        path = find("aesthetic", question.weights, "aesthetic")
        state = networks.load_state(path)
        try:
            values = scores.linear_head(state, torch.nn.functional.normalize(images, dim=-1))
        except (*networks.BROKEN, StopIteration) as error:
            raise networks.damaged(path, error) from None
        found["aesthetic"] = round(float(values.mean()), 4)
    return found


def _embedded(pair: networks.Pair, pictures: dict[int, Picture], advance: Advance) -> tuple[Any, Any]:
    """Embeddings of every picture and of its own prompt."""
    rows = list(pictures.values())
    return networks.embed(pair, [row.path for row in rows], [row.prompt for row in rows], advance)
