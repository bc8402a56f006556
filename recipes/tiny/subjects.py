"""Grades whether images show the subjects of their prompts, in the feature space of an ImageNet network.

Some subjects are candidates; their true images in all styles, on white, are the gallery. An image is generated for each
prompt, and candidates are ranked by their nearest image in the gallery. The rank of the requested subject is compared
with chance and with true images composed for the same prompts, before and after the image tokenizer. A second ranking
leaves the requested style out of the gallery, so that only the subject can match. Pairs are cut into halves, and each
half is ranked. The colour of a plain background is measured at the border.
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

from recipes.tiny.compose import Scenes, SpriteSizes
from recipes.tiny.data import Pack, caption, is_held_out, pair_caption
from recipes.tiny.imagenet_features import NAME, ImageNetFeatures
from recipes.tiny.paint import Painter
from recipes.tiny.palette import COLOURS, PALETTE, plain_phrase
from underdraw.bench.environment import describe_machine
from underdraw.bench.sections import portable_settings
from underdraw.errors import ConfigError
from underdraw.pipeline import Pipeline

PromptSet = Literal["training", "held-out", "new style", "new pair"]
PROMPT_SETS: tuple[PromptSet, ...] = get_args(PromptSet)
MIN_CANDIDATES = 8  # below that a rank means little
T = TypeVar("T")
GenerateFn = Callable[[Sequence[str], Sequence[int]], Tensor]
"""Prompts and seeds -> images (N, 3, H, W) in [0, 1]."""


@dataclass(frozen=True, slots=True)
class GradedPrompt:
    """A prompt, and the rows of the pack that show its subjects, possibly in another style."""

    set: PromptSet
    text: str
    rows: tuple[int, ...]
    style: str
    colour: str


@dataclass(frozen=True, slots=True)
class Gallery:
    """Features of true images of the candidates."""

    features: Tensor  # (G, D)
    subjects: NDArray[np.int64]  # (G,) index of the candidate
    styles: NDArray[np.str_]  # (G,)
    names: list[str]  # of the candidates

    def rank(self, features: Tensor, subject: str, excluded_style: str | None) -> int:
        """The rank of a subject for the features (D,) of an image; 1 is the best."""
        mask = self.styles != excluded_style
        similarity = (self.features[torch.from_numpy(mask)] @ features).numpy()
        best = np.full(len(self.names), -np.inf)
        np.maximum.at(best, self.subjects[mask], similarity)
        return int((best > best[self.names.index(subject)]).sum()) + 1


def choose_candidates(pack: Pack, count: int, rng: np.random.Generator) -> list[str]:
    """Subjects with sprites in at least two styles; up to half of them held out."""
    styles: dict[str, set[str]] = {}
    for row in _sprite_rows(pack):
        styles.setdefault(pack.pictures[row].subject, set()).add(pack.pictures[row].style)
    subjects = sorted(subject for subject, its_styles in styles.items() if len(its_styles) > 1)
    held_out = [subject for subject in subjects if is_held_out(subject)][: count // 2]
    others = [subject for subject in subjects if not is_held_out(subject)]
    most = len(held_out) + len(others)
    if count < MIN_CANDIDATES or most < count:
        raise ConfigError(f"--candidates {count} is not possible with this pack; use {MIN_CANDIDATES} to {most}.")
    return held_out + rng.permutation(others)[: count - len(held_out)].tolist()


def _sprite_rows(pack: Pack) -> list[int]:
    """Rows of the images that may be in a gallery."""
    return [row for row, image in enumerate(pack.pictures) if image.kind == "sprite"]


def make_prompts(pack: Pack, names: Sequence[str], count: int, rng: np.random.Generator) -> list[GradedPrompt]:
    """`count` prompts of every set."""
    rows: dict[str, list[int]] = {name: [] for name in names}
    for row in _sprite_rows(pack):
        if pack.pictures[row].subject in rows:
            rows[pack.pictures[row].subject].append(row)
    training = [name for name in names if not is_held_out(name)]
    held_out = [name for name in names if is_held_out(name)]
    styles = {name: {pack.pictures[row].style for row in its_rows} for name, its_rows in rows.items()}
    all_styles = sorted(set().union(*styles.values()))
    missing = {name: [style for style in all_styles if style not in styles[name]] for name in training}
    without_style = [name for name in training if missing[name]]
    prompts: list[GradedPrompt] = []
    for _ in range(count):
        colour = _choose(COLOURS, rng)
        background = plain_phrase(colour)
        prompts.append(_single(pack, "training", _choose(rows[_choose(training, rng)], rng), colour))
        if held_out:
            prompts.append(_single(pack, "held-out", _choose(rows[_choose(held_out, rng)], rng), colour))
        if without_style:
            name = _choose(without_style, rng)
            style, row = _choose(missing[name], rng), rows[name][0]
            text = caption(replace(pack.pictures[row], style=style), background)
            prompts.append(GradedPrompt("new style", text, (row,), style, colour))
        first = _choose(rows[_choose(training, rng)], rng)
        left = pack.pictures[first]
        partners = [row for name in training for row in rows[name] if name != left.subject]
        second = _choose([row for row in partners if pack.pictures[row].style == left.style], rng)
        text = pair_caption(left.phrase, pack.pictures[second].phrase, left.style, background)
        prompts.append(GradedPrompt("new pair", text, (first, second), left.style, colour))
    return prompts


def _choose(choices: Sequence[T], rng: np.random.Generator) -> T:
    return choices[int(rng.integers(len(choices)))]


def _single(pack: Pack, prompt_set: PromptSet, row: int, colour: str) -> GradedPrompt:
    image = pack.pictures[row]
    return GradedPrompt(prompt_set, caption(image, plain_phrase(colour)), (row,), image.style, colour)


def compose_scenes(pack: Pack, sprites: Sequence[Sequence[int]], colours: Sequence[str]) -> Scenes:
    """One centred sprite, or two side by side, on plain colours, placed as in training."""
    s, count = SpriteSizes.for_canvas(pack.px), len(sprites)
    rows = np.array([(*its_rows, -1)[:2] for its_rows in sprites])
    is_pair = (rows[:, 1] >= 0)[:, None]
    left, right, pair_y = s.pair_corners()
    middle = s.snap((s.canvas - s.main) / 2)
    colour = np.array([COLOURS.index(name) for name in colours])
    no = np.zeros(count, dtype=bool)
    return Scenes(
        top=colour, bottom=colour, backdrop=np.full(count, -1), backdrop_flip=no,
        backdrop_view=np.tile([1.0, 0.0, 0.0], (count, 1)), backdrop_soft=no, rows=rows,
        sizes=np.where(is_pair, s.small, [s.main, s.small]),
        x=np.where(is_pair, (left, right), middle),
        y=np.where(is_pair, pair_y, [middle, middle]),
        flips=np.zeros((count, 2), dtype=bool), turns=np.zeros((count, 2)), colours=np.full((count, 2), -1),
        says_size=no, says_position=no, says_facing=no, style_unnamed=no, background_unnamed=no,
    )  # fmt: skip


def crop_subjects(image: Tensor, count: int, sizes: SpriteSizes) -> Tensor:
    """The parts of an image (3, H, W) to rank: all of it, or both sprites of a pair at the size of a single one."""
    if count == 1:
        return image[None]
    side = image.shape[-1]
    left, right, y = sizes.pair_corners()
    half = round(sizes.small / sizes.main * side / 2)
    padded = F.pad(image[None], (half, half, half, half), mode="replicate")[0]
    row, *columns = (round((corner + sizes.small / 2) * side / sizes.canvas) for corner in (y, left, right))
    crops = [padded[:, row : row + 2 * half, column : column + 2 * half] for column in columns]
    return F.interpolate(torch.stack(crops), size=(side, side), mode="bilinear")


def border_colour(image: Tensor) -> tuple[str, dict[str, float]]:
    """The named colour nearest to the border of an image (3, H, W), and the distances to all names in CIELAB."""
    edge = max(1, image.shape[-1] // 48)
    is_border = torch.ones(image.shape[1:], dtype=torch.bool)
    is_border[edge:-edge, edge:-edge] = False
    border = _to_lab(image[:, is_border].median(1).values.numpy())
    distances = {name: float(np.linalg.norm(border - _to_lab(np.array(rgb) / 255))) for name, rgb in PALETTE.items()}
    return min(distances, key=lambda name: distances[name]), distances


def _to_lab(rgb: NDArray[Any]) -> NDArray[np.float64]:
    """sRGB (3,) in [0, 1] -> CIELAB under D65."""
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    t = matrix @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


class SubjectGrader:
    """Grades images with a gallery of candidates."""

    def __init__(self, pack: Pack, names: list[str], network: ImageNetFeatures) -> None:
        self.pack, self.network = pack, network
        rows = [row for row in _sprite_rows(pack) if pack.pictures[row].subject in set(names)]
        self.painter = Painter(pack, "cpu", np.array(rows))
        images = self.paint([(row,) for row in rows], ["white"] * len(rows))
        self.gallery = Gallery(
            network.features(images),
            np.array([names.index(pack.pictures[row].subject) for row in rows]),
            np.array([pack.pictures[row].style for row in rows]),
            names,
        )

    def paint(self, rows: Sequence[Sequence[int]], colours: Sequence[str]) -> Tensor:
        """True images (N, 3, px, px) in [0, 1]."""
        return self.painter.paint(compose_scenes(self.pack, rows, colours)) * 0.5 + 0.5

    def grade(self, prompts: Sequence[GradedPrompt], images: Tensor) -> dict[str, Any]:
        """Ranks and background colours of the images of one set."""
        ranks: list[int] = []
        ranks_in_other_styles: list[int] = []
        is_right_colour, distances = [], []
        pairs = list(zip(prompts, images, strict=True))
        crops = [crop_subjects(image, len(prompt.rows), self.painter.sizes) for prompt, image in pairs]
        features = iter(self.network.features(torch.cat(crops)))
        for prompt, image in pairs:
            for row in prompt.rows:
                subject, feature = self.pack.pictures[row].subject, next(features)
                ranks.append(self.gallery.rank(feature, subject, None))
                ranks_in_other_styles.append(self.gallery.rank(feature, subject, prompt.style))
            colour, distance = border_colour(image)
            is_right_colour.append(colour == prompt.colour)
            distances.append(distance[prompt.colour])
        return {
            "pictures": len(prompts), "ranked": len(ranks), **_rank_record(ranks, ""),
            **_rank_record(ranks_in_other_styles, "other_"), "colour": round(float(np.mean(is_right_colour)), 4),
            "colour_distance": round(float(np.median(distances)), 2),
        }  # fmt: skip


def _rank_record(ranks: Sequence[int], prefix: str) -> dict[str, float]:
    values = np.array(ranks)
    return {
        f"{prefix}top1": round(float((values == 1).mean()), 4),
        f"{prefix}top5": round(float((values <= 5).mean()), 4),
        f"{prefix}median_rank": float(np.median(values)),
    }


def measure(
    pipe: Pipeline,
    pack: Pack,
    network: ImageNetFeatures,
    generate: GenerateFn,
    *,
    count: int,
    candidate_count: int,
    seed: int,
) -> dict[str, Any]:
    """Generate and grade images of all sets; returns the record of the result."""
    rng = np.random.default_rng(seed)
    names = choose_candidates(pack, candidate_count, rng)
    prompts = make_prompts(pack, names, count, rng)
    for prompt in prompts:
        pipe.model.check_prompt(prompt.text)
    grader = SubjectGrader(pack, names, network)
    images = generate([prompt.text for prompt in prompts], range(seed, seed + len(prompts)))
    entries = []
    for prompt_set in PROMPT_SETS:
        indices = [index for index, prompt in enumerate(prompts) if prompt.set == prompt_set]
        members = [prompts[index] for index in indices]
        if not members:
            continue
        entry: dict[str, Any] = {"set": prompt_set, "drawn": grader.grade(members, images[indices])}
        if prompt_set != "new style":  # which has no true images
            true = grader.paint([prompt.rows for prompt in members], [prompt.colour for prompt in members])
            entry["true"] = grader.grade(members, true)
            entry["coded"] = grader.grade(members, encode_and_decode(pipe, true))
        entry["texts"] = [prompt.text for prompt in members]
        entries.append(entry)
    request = pipe.request(prompts[0].text, seed=seed)
    return {
        "kind": "subjects", "model": pipe.model.name, "settings": portable_settings(pipe.settings(request)),
        "seed": seed,
        "network": NAME, "candidates": len(names), "gallery": len(grader.gallery.styles),
        "held_out_candidates": sum(map(is_held_out, names)), "chance": chance_record(len(names)), "sets": entries,
        "machine": describe_machine(pipe.device),
    }  # fmt: skip


@torch.inference_mode()
def encode_and_decode(pipe: Pipeline, images: Tensor) -> Tensor:
    """Images in [0, 1] as the image tokenizer reconstructs them."""
    tokenizer, device = pipe.model.image_tokenizer, pipe.device
    parts = [tokenizer.decode(tokenizer.encode((part * 2 - 1).to(device))).float().cpu() for part in images.split(8)]
    return (torch.cat(parts) * 0.5 + 0.5).clamp(0, 1)


def chance_record(count: int) -> dict[str, float]:
    """The scores of guessing among so many candidates, and among the named colours."""
    return {
        "top1": round(1 / count, 4), "top5": round(5 / count, 4), "median_rank": (count + 1) / 2,
        "colour": round(1 / len(COLOURS), 4),
    }  # fmt: skip
