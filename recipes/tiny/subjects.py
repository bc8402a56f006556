"""Is a picture of a fox a fox? Drawn pictures among true ones, in the feature space of an ImageNet network.

Some subjects are candidates; their true pictures in every style, on white, are the gallery. A picture is drawn for a
caption, and candidates are ranked by their nearest picture in the gallery. Where the asked subject stands is compared
with chance and with true pictures composed for the very same captions, as they are and after the image tokenizer. A
second ranking leaves the asked style out of the gallery: only what makes the subject itself is left to match then.
Pairs are cut into halves, and each half is ranked. The colour of plain backgrounds is read off the border's pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny.compose import COLOURS, PALETTE, Painter, Scenes, Sizes, plain_phrase
from recipes.tiny.data import Pack, caption, is_held_out, pair_caption
from recipes.tiny.imagenet_features import NAME, Network
from underdraw.bench.environment import about
from underdraw.bench.records import told
from underdraw.errors import ConfigError
from underdraw.pipeline import Pipeline

Set = Literal["training", "held-out", "new style", "new pair"]
SETS: tuple[Set, ...] = get_args(Set)
ANIMATED = "fluent-3d-anim"  # looks as the 3D renders do: it would give them away where they are left out
LEAST = 8  # candidates below which a rank says nothing
T = TypeVar("T")
Draw = Callable[[Sequence[str], Sequence[int]], Tensor]
"""Texts and seeds -> pictures (N, 3, H, W) in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One picture that is asked for. Rows are pictures of the pack: what it should show, or show in another style."""

    set: Set
    text: str
    rows: tuple[int, ...]
    style: str
    colour: str


@dataclass(frozen=True, slots=True)
class Gallery:
    """True pictures of the candidates."""

    features: Tensor  # (G, D)
    subjects: NDArray[np.int64]  # (G,) number of the candidate
    styles: NDArray[np.str_]  # (G,)
    names: list[str]  # of the candidates

    def rank(self, features: Tensor, subject: str, style: str | None) -> int:
        """Where a subject stands for features (D,), 1 is first; `style` is left out of the gallery."""
        kept = self.styles != style
        likeness = (self.features[torch.from_numpy(kept)] @ features).numpy()
        best = np.full(len(self.names), -np.inf)
        np.maximum.at(best, self.subjects[kept], likeness)
        return int((best > best[self.names.index(subject)]).sum()) + 1


def candidates(pack: Pack, count: int, rng: np.random.Generator) -> list[str]:
    """Held-out subjects, half of all at most, and others; each has sprites in two styles or more."""
    styles: dict[str, set[str]] = {}
    for picture in pack.pictures:
        if picture.kind == "sprite" and picture.style != ANIMATED:
            styles.setdefault(picture.subject, set()).add(picture.style)
    known = sorted(subject for subject, own in styles.items() if len(own) > 1)
    held = [subject for subject in known if is_held_out(subject)][: count // 2]
    others = [subject for subject in known if not is_held_out(subject)]
    if count < LEAST or len(held) + len(others) < count:
        raise ConfigError(f"{count} candidates cannot be had; use {LEAST} to {len(held) + len(others)}.")
    return held + rng.permutation(others)[: count - len(held)].tolist()


def questions(pack: Pack, names: Sequence[str], count: int, rng: np.random.Generator) -> list[Asked]:
    """`count` captions of every set."""
    rows: dict[str, list[int]] = {name: [] for name in names}
    for row, picture in enumerate(pack.pictures):
        if picture.kind == "sprite" and picture.subject in rows and picture.style != ANIMATED:
            rows[picture.subject].append(row)
    seen = [name for name in names if not is_held_out(name)]
    held = [name for name in names if is_held_out(name)]
    styles = {name: {pack.pictures[row].style for row in own} for name, own in rows.items()}
    common = sorted(set().union(*styles.values()))
    missing = {name: [style for style in common if style not in styles[name]] for name in seen}
    lacking = [name for name in seen if missing[name]]
    asked: list[Asked] = []
    for _ in range(count):
        colour = COLOURS[int(rng.integers(len(COLOURS)))]
        asked.append(_single(pack, "training", _any(rows[_any(seen, rng)], rng), colour))
        if held:
            asked.append(_single(pack, "held-out", _any(rows[_any(held, rng)], rng), colour))
        if lacking:
            name = _any(lacking, rng)
            style = _any(missing[name], rng)
            picture = replace(pack.pictures[rows[name][0]], style=style)
            asked.append(Asked("new style", caption(picture, plain_phrase(colour)), (rows[name][0],), style, colour))
        first = _any(rows[_any(seen, rng)], rng)
        own = pack.pictures[first]
        partners = [row for name in seen for row in rows[name] if name != own.subject]
        second = _any([row for row in partners if pack.pictures[row].style == own.style], rng)
        text = pair_caption(own, pack.pictures[second], plain_phrase(colour))
        asked.append(Asked("new pair", text, (first, second), own.style, colour))
    return asked


def _any(choices: Sequence[T], rng: np.random.Generator) -> T:
    return choices[int(rng.integers(len(choices)))]


def _single(pack: Pack, kind: Set, row: int, colour: str) -> Asked:
    picture = pack.pictures[row]
    return Asked(kind, caption(picture, plain_phrase(colour)), (row,), picture.style, colour)


def scenes(pack: Pack, asked: Sequence[Sequence[int]], colours: Sequence[str]) -> Scenes:
    """Sprites, one in the middle or two side by side, on plain colours: as training composes most of them."""
    s, count = Sizes.of(pack.px), len(asked)
    rows = np.array([(*own, -1)[:2] for own in asked])
    pair = (rows[:, 1] >= 0)[:, None]
    (corners, low), middle = _corners(s), s.snap((s.canvas - s.main) / 2)
    colour = np.array([COLOURS.index(name) for name in colours])
    no = np.zeros(count, dtype=bool)
    return Scenes(
        top=colour, bottom=colour, backdrop=np.full(count, -1), backdrop_flip=no,
        backdrop_view=np.tile([1.0, 0.0, 0.0], (count, 1)), backdrop_soft=no, rows=rows,
        sizes=np.where(pair, s.pair, [s.main, s.pair]),
        x=np.where(pair, corners, middle),
        y=np.where(pair, low, [middle, middle]),
        flips=np.zeros((count, 2), dtype=bool), style_implied=no, white_implied=no,
    )  # fmt: skip


def parts(picture: Tensor, count: int, sizes: Sizes) -> Tensor:
    """What is ranked of a picture (3, H, W): all of it, or the two places of a pair, as large as a sprite alone is."""
    if count == 1:
        return picture[None]
    side = picture.shape[-1]
    corners, y = _corners(sizes)
    half = round(sizes.pair / sizes.main * side / 2)
    wide = F.pad(picture[None], (half, half, half, half), mode="replicate")[0]
    row, *columns = (round((corner + sizes.pair / 2) * side / sizes.canvas) for corner in (y, *corners))
    cut = [wide[:, row : row + 2 * half, column : column + 2 * half] for column in columns]
    return F.interpolate(torch.stack(cut), size=(side, side), mode="bilinear")


def _corners(sizes: Sizes) -> tuple[tuple[int, int], int]:
    """Where the sprites of a pair stand: both x, and y."""
    left = sizes.snap((sizes.canvas / 2 - sizes.pair) / 2)
    return (left, sizes.canvas - sizes.pair - left), sizes.snap((sizes.canvas - sizes.pair) / 2 + sizes.cell / 2)


def border_colour(picture: Tensor) -> tuple[str, dict[str, float]]:
    """The name of the colour that the border of a picture (3, H, W) has, and its distance in CIELAB to every name."""
    edge = max(1, picture.shape[-1] // 48)
    ring = torch.ones(picture.shape[1:], dtype=torch.bool)
    ring[edge:-edge, edge:-edge] = False
    own = _lab(picture[:, ring].median(1).values.numpy())
    far = {name: float(np.linalg.norm(own - _lab(np.array(rgb) / 255))) for name, rgb in PALETTE.items()}
    return min(far, key=lambda name: far[name]), far


def _lab(rgb: NDArray[Any]) -> NDArray[np.float64]:
    """sRGB (3,) in [0, 1] -> CIELAB under D65."""
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = matrix @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


class Judge:
    """A gallery, and what it says of pictures."""

    def __init__(self, pack: Pack, names: list[str], network: Network) -> None:
        self.pack, self.network = pack, network
        known = set(names)
        own = [
            row
            for row, picture in enumerate(pack.pictures)
            if picture.kind == "sprite" and picture.subject in known and picture.style != ANIMATED
        ]
        self.painter = Painter(pack, "cpu", np.array(own))
        pictures = self.paint([(row,) for row in own], ["white"] * len(own))
        self.gallery = Gallery(
            network.features(pictures),
            np.array([names.index(pack.pictures[row].subject) for row in own]),
            np.array([pack.pictures[row].style for row in own]),
            names,
        )

    def paint(self, rows: Sequence[Sequence[int]], colours: Sequence[str]) -> Tensor:
        """True pictures (N, 3, px, px) in [0, 1]."""
        return self.painter.paint(scenes(self.pack, rows, colours)) * 0.5 + 0.5

    def accepted_path(self, asked: Sequence[Asked], pictures: Tensor) -> dict[str, Any]:
        """Ranks and colours of pictures of one set, summed up."""
        ranks: dict[str, list[int]] = {"all": [], "other": []}
        right, far = [], []
        shown = [
            parts(picture, len(one.rows), self.painter.sizes) for one, picture in zip(asked, pictures, strict=True)
        ]
        features = iter(self.network.features(torch.cat(shown)))
        for one, picture in zip(asked, pictures, strict=True):
            for row in one.rows:
                subject, own = self.pack.pictures[row].subject, next(features)
                ranks["all"].append(self.gallery.rank(own, subject, None))
                ranks["other"].append(self.gallery.rank(own, subject, one.style))
            named, distances = border_colour(picture)
            right.append(named == one.colour)
            far.append(distances[one.colour])
        return {
            "pictures": len(asked), "ranked": len(ranks["all"]), **_summed(ranks["all"], ""),
            **_summed(ranks["other"], "other_"), "colour": round(float(np.mean(right)), 4),
            "colour_distance": round(float(np.median(far)), 2),
        }  # fmt: skip


def _summed(ranks: Sequence[int], prefix: str) -> dict[str, float]:
    values = np.array(ranks)
    return {
        f"{prefix}top1": round(float((values == 1).mean()), 4),
        f"{prefix}top5": round(float((values <= 5).mean()), 4),
        f"{prefix}median_rank": float(np.median(values)),
    }


def measure(
    pipe: Pipeline, pack: Pack, network: Network, draw: Draw, *, count: int, candidate_count: int, seed: int
) -> dict[str, Any]:
    """Everything, as a record. `draw` is asked once for all pictures."""
    rng = np.random.default_rng(seed)
    names = candidates(pack, candidate_count, rng)
    asked = questions(pack, names, count, rng)
    for one in asked:
        pipe.model.check_prompt(one.text)
    judge = Judge(pack, names, network)
    drawn = draw([one.text for one in asked], range(seed, seed + len(asked)))
    found = []
    for kind in SETS:
        places = [place for place, one in enumerate(asked) if one.set == kind]
        own = [asked[place] for place in places]
        if not own:
            continue
        entry: dict[str, Any] = {"set": kind, "drawn": judge.accepted_path(own, drawn[places])}
        if kind != "new style":  # which has no true pictures
            true = judge.paint([one.rows for one in own], [one.colour for one in own])
            entry["true"] = judge.accepted_path(own, true)
            entry["coded"] = judge.accepted_path(own, coded(pipe, true))
        entry["texts"] = [one.text for one in own]
        found.append(entry)
    job = pipe.request(asked[0].text, seed=seed)
    return {
        "kind": "subjects", "model": pipe.model.name, "settings": told(pipe.settings(job)), "seed": seed,
        "network": NAME, "candidates": len(names), "gallery": len(judge.gallery.styles),
        "held_out_candidates": sum(map(is_held_out, names)), "chance": chance(len(names)), "sets": found,
        "machine": about(pipe.device),
    }  # fmt: skip


@torch.inference_mode()
def coded(pipe: Pipeline, pictures: Tensor) -> Tensor:
    """Pictures in [0, 1] after the image tokenizer has encoded and decoded them."""
    images, device = pipe.model.image_tokenizer, pipe.device
    made = [images.decode(images.encode((part * 2 - 1).to(device))).float().cpu() for part in pictures.split(8)]
    return (torch.cat(made) * 0.5 + 0.5).clamp(0, 1)


def chance(count: int) -> dict[str, float]:
    """What guessing among so many candidates, and among the named colours, gives."""
    return {
        "top1": round(1 / count, 4), "top5": round(5 / count, 4), "median_rank": (count + 1) / 2,
        "colour": round(1 / len(COLOURS), 4),
    }  # fmt: skip
