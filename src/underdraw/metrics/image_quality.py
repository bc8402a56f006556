"""Image metrics: FID and Inception Score (torchmetrics), precision and recall, CLIP score, HPSv2, aesthetic score.

The first half are formulas on features; `evaluate` reads folders, runs the networks and applies the formulas.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from underdraw.errors import ConfigError, unknown
from underdraw.extras import require_package
from underdraw.metrics import networks
from underdraw.metrics.exact_match import (
    GeneratedImage,
    exact_match,
    find_images,
    pair_images,
    read_images,
    stack_codes,
)
from underdraw.metrics.networks import Advance, find_weights
from underdraw.metrics.two_sample import MIN_IMAGES, two_sample

METRICS = ("exact", "test", "fid", "is", "pr", "clip", "hps", "aesthetic")
DEFAULT_METRICS = ("exact", "test")
COMPARING = ("exact", "test", "fid", "pr")  # need a second folder
NEIGHBOURS = 3  # the radius of a point is the distance to its 3rd neighbour, for precision and recall
WEIGHTS_OF = {
    "fid": ("inception",),
    "is": ("inception",),
    "pr": ("inception",),
    "clip": ("clip",),
    "hps": ("hps",),
    "aesthetic": ("clip", "aesthetic"),
}


class _Identity(nn.Module):
    """The "network" of a torchmetrics metric whose inputs are features already."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, features: Tensor) -> Tensor:
        return features


def fid(real: Tensor, generated: Tensor) -> float:
    """Frechet distance between Gaussians fitted to features (N, D) and (M, D)."""
    for name, features in (("reference", real), ("generated", generated)):
        if len(features) < 2:
            raise ConfigError(f"fid needs at least 2 {name} images, not {len(features)}.")
    metrics = require_package("torchmetrics.image.fid", "evaluate", "fid")
    metric = metrics.FrechetInceptionDistance(feature=_Identity(real.shape[1])).set_dtype(torch.float64)
    metric.update(real.double(), real=True)
    metric.update(generated.double(), real=False)
    return float(metric.compute())


def inception_score(logits: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Mean and standard deviation over splits of exp(mean KL(p(y|x) || p(y))): logits (N, classes)."""
    splits = min(splits, len(logits))
    metrics = require_package("torchmetrics.image.inception", "evaluate", "is")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # torchmetrics warns that it keeps all features in memory
        torch.manual_seed(seed)  # the metric shuffles
        metric = metrics.InceptionScore(feature=_Identity(logits.shape[1]), splits=splits)
        metric.update(logits)
        mean, deviation = metric.compute()
    return float(mean), 0.0 if splits == 1 else float(deviation)


def precision_recall(real: Tensor, generated: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Improved precision and recall: the share of generated points within the radius of a real one, and vice versa."""
    if min(len(real), len(generated)) <= neighbours:
        raise ConfigError(f"precision and recall need more than {neighbours} images per folder.")
    distance = torch.cdist(generated.double(), real.double())  # (M, N)
    is_realistic = distance <= _radius(real, neighbours)[None]
    is_covered = distance <= _radius(generated, neighbours)[:, None]
    return float(is_realistic.any(1).double().mean()), float(is_covered.any(0).double().mean())


def _radius(features: Tensor, neighbours: int) -> Tensor:
    distance = torch.cdist(features.double(), features.double())
    return distance.kthvalue(neighbours + 1, dim=1).values  # the nearest of all is the point itself


def cosine_similarity(images: Tensor, texts: Tensor) -> Tensor:
    """Similarity of each image with its prompt: (N, D), (N, D) -> (N,)."""
    return nn.functional.cosine_similarity(images.double(), texts.double(), dim=-1)


def clip_score(images: Tensor, texts: Tensor) -> float:
    """100 times the mean similarity, with negative ones counted as 0."""
    return float((100 * cosine_similarity(images, texts)).clamp(min=0).mean())


def aesthetic_scores(state: dict[str, Tensor], features: Tensor) -> Tensor:
    """Linear layers in the order of their numbers: (N, D) -> (N,).

    The published aesthetic predictor has no activations between its layers; its dropout is inactive.
    """
    numbers = sorted(int(key.split(".")[-2]) for key in state if key.endswith(".weight"))
    prefix = next(key for key in state if key.endswith(".weight")).rsplit(".", 2)[0]
    for number in numbers:
        weight, bias = (state[f"{prefix}.{number}.{part}"] for part in ("weight", "bias"))
        features = nn.functional.linear(features.to(weight.dtype), weight, bias)
    return features[:, 0]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Which metrics of which folder. Without `metrics`, those of DEFAULT_METRICS that the images allow."""

    folder: Path
    against: Path | None
    metrics: Sequence[str] | None = None
    weights: Path | None = None

    @property
    def requested(self) -> set[str]:
        return set(self.metrics or DEFAULT_METRICS)

    def check(self) -> None:
        """Raise before anything is measured if something is missing."""
        for name in self.requested:
            if name not in METRICS:
                raise unknown("metric", name, METRICS)
        for name in METRICS:
            if name in self.requested and name in COMPARING and self.against is None:
                raise ConfigError(f"{name} compares two folders; name the other one with --against.")
        for name in self.requested:
            for key in WEIGHTS_OF.get(name, ()):
                find_weights(key, self.weights, name)

    def network_images(self) -> int:
        """How many images the networks will see, for a progress bar."""
        requested = self.requested
        runs = [requested & {"fid", "is", "pr"}, requested & {"clip", "aesthetic"}, requested & {"hps"}]
        total = len(read_images(self.folder)) * sum(map(bool, runs))
        if requested & {"fid", "pr"} and self.against is not None:
            total += len(find_images(self.against))
        return total


def evaluate(evaluation: Evaluation, advance: Advance) -> dict[str, Any]:
    """All requested metrics; `advance` receives the number of images that a network has processed."""
    evaluation.check()
    images = read_images(evaluation.folder)
    requested = evaluation.requested
    record: dict[str, Any] = {"folder": str(evaluation.folder), "pictures": len(images)}
    if requested & {"exact", "test"}:
        record.update(_compare(evaluation, images))
    if requested & {"fid", "is", "pr"}:
        record.update(_inception_metrics(evaluation, images, advance))
    if requested & {"clip", "aesthetic"}:
        record.update(_clip_metrics(evaluation, images, advance))
    if "hps" in requested:
        encoder = networks.hps(find_weights("hps", evaluation.weights, "hps"))
        record["hps"] = round(float(cosine_similarity(*_embed(encoder, images, advance)).mean()), 5)
    return record


def _compare(evaluation: Evaluation, images: dict[int, GeneratedImage]) -> dict[str, Any]:
    """Exact match and the two-sample test of paired images."""
    assert evaluation.against is not None
    pairs = pair_images(images, read_images(evaluation.against))
    record: dict[str, Any] = {
        "against": str(evaluation.against),
        "joined": len(pairs.indices),
        "only_here": pairs.only_ours,
        "only_there": pairs.only_theirs,
    }
    if "exact" in evaluation.requested:
        record["exact"] = exact_match(pairs)
    ours, theirs = stack_codes(pairs.ours), stack_codes(pairs.theirs)
    can_test = ours is not None and theirs is not None and len(pairs.indices) >= MIN_IMAGES
    if "test" in evaluation.requested and not can_test and evaluation.metrics is None:
        record["test_skipped"] = f"it needs at least {MIN_IMAGES} pairs of images with codes"
    elif "test" in evaluation.requested:
        if ours is None or theirs is None:
            folder = evaluation.folder if ours is None else evaluation.against
            raise ConfigError(f"the rows of {folder} hold no codes; generate it again with this version.")
        result = two_sample(ours, theirs, paired=True)
        record["test"] = {"mmd": round(result.statistic, 6), "p": round(result.p_value, 5)}
    return record


def _inception_metrics(evaluation: Evaluation, images: dict[int, GeneratedImage], advance: Advance) -> dict[str, Any]:
    network = networks.inception(find_weights("inception", evaluation.weights, "fid"))
    features, logits = networks.extract_features(network, [image.source for image in images.values()], advance)
    record: dict[str, Any] = {}
    if "is" in evaluation.requested:
        mean, deviation = inception_score(logits)
        record["is"] = {"mean": round(mean, 4), "spread": round(deviation, 4)}
    if evaluation.requested & {"fid", "pr"}:
        assert evaluation.against is not None
        real, _ = networks.extract_features(network, find_images(evaluation.against), advance)
        if "fid" in evaluation.requested:
            record["fid"] = round(fid(real, features), 4)
        if "pr" in evaluation.requested:
            precision, recall = precision_recall(real, features)
            record["pr"] = {"precision": round(precision, 4), "recall": round(recall, 4)}
    return record


def _clip_metrics(evaluation: Evaluation, images: dict[int, GeneratedImage], advance: Advance) -> dict[str, Any]:
    encoder = networks.clip(find_weights("clip", evaluation.weights, "clip"))
    features, texts = _embed(encoder, images, advance)
    record: dict[str, Any] = {}
    if "clip" in evaluation.requested:
        record["clip"] = round(clip_score(features, texts), 4)
    if "aesthetic" in evaluation.requested:
        path = find_weights("aesthetic", evaluation.weights, "aesthetic")
        state = networks.load_state(path)
        try:
            scores = aesthetic_scores(state, nn.functional.normalize(features, dim=-1))
        except (*networks.LOAD_ERRORS, StopIteration) as error:
            raise networks.damaged_file(path, error) from None
        record["aesthetic"] = round(float(scores.mean()), 4)
    return record


def _embed(
    encoder: networks.TextImageEncoder, images: dict[int, GeneratedImage], advance: Advance
) -> tuple[Tensor, Tensor]:
    """Embeddings of every image and of its prompt."""
    rows = list(images.values())
    return networks.embed(encoder, [row.source for row in rows], [row.prompt for row in rows], advance)
