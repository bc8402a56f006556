"""Formulas of image metrics, from features on: FID and Inception Score by torchmetrics, precision, recall, similarity.

Features come from networks that others trained; which network they come from is not known here.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from underdraw.errors import ConfigError
from underdraw.extras import require_package

NEAREST = 3  # neighbours whose distance is a point's reach, for precision and recall


class _AsTheyAre(nn.Module):
    """Stands where torchmetrics wants a network: the features are there already."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, features: Tensor) -> Tensor:
        return features


def fid(real: Tensor, drawn: Tensor) -> float:
    """Frechet distance between Gaussians fitted to features (N, D) and (M, D)."""
    for name, features in (("reference", real), ("drawn", drawn)):
        if len(features) < 2:
            raise ConfigError(f"fid needs at least 2 {name} pictures, not {len(features)}.")
    metrics = require_package("torchmetrics.image.fid", "evaluate", "fid")
    metric = metrics.FrechetInceptionDistance(feature=_AsTheyAre(real.shape[1])).set_dtype(torch.float64)
    metric.update(real.double(), real=True)
    metric.update(drawn.double(), real=False)
    return float(metric.compute())


def inception_score(logits: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Mean and spread over splits of exp(mean KL(p(y|x) || p(y))): logits (N, classes)."""
    splits = min(splits, len(logits))
    metrics = require_package("torchmetrics.image.inception", "evaluate", "is")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that features are kept is known: they were given
        torch.manual_seed(seed)  # the metric shuffles
        metric = metrics.InceptionScore(feature=_AsTheyAre(logits.shape[1]), splits=splits)
        metric.update(logits)
        mean, spread = metric.compute()
    return float(mean), 0.0 if splits == 1 else float(spread)


def precision_recall(real: Tensor, drawn: Tensor, nearest: int = NEAREST) -> tuple[float, float]:
    """Share of drawn pictures within reach of a real one, and of real ones within reach of a drawn one.

    A point's reach is the distance to its `nearest`-th neighbour in its own set (improved precision and recall).
    """
    if min(len(real), len(drawn)) <= nearest:
        raise ConfigError(f"precision and recall need more than {nearest} pictures a side.")
    between = torch.cdist(drawn.double(), real.double())  # (M, N)
    covered = between <= _reach(real, nearest)[None]
    covering = between <= _reach(drawn, nearest)[:, None]
    return float(covered.any(1).double().mean()), float(covering.any(0).double().mean())


def _reach(features: Tensor, nearest: int) -> Tensor:
    distance = torch.cdist(features.double(), features.double())
    return distance.kthvalue(nearest + 1, dim=1).values  # the nearest of all is the point itself


def similarity(images: Tensor, texts: Tensor) -> Tensor:
    """Cosine of each image's and its own text's embedding: (N, D), (N, D) -> (N,)."""
    normal = (nn.functional.normalize(side.double(), dim=-1) for side in (images, texts))
    first, second = normal
    return (first * second).sum(-1)


def clip_score(images: Tensor, texts: Tensor) -> float:
    """100 times the mean similarity, negative ones counted as 0."""
    return float((100 * similarity(images, texts)).clamp(min=0).mean())


def linear_head(state: dict[str, Tensor], features: Tensor) -> Tensor:
    """Linear layers one after the other, in the order of their numbers: (N, D) -> (N,).

    The published aesthetic predictor has no activations between its layers, and its dropout rests.
    """
    places = sorted(int(key.split(".")[-2]) for key in state if key.endswith(".weight"))
    prefix = next(key for key in state if key.endswith(".weight")).rsplit(".", 2)[0]
    for place in places:
        weight, bias = (state[f"{prefix}.{place}.{part}"] for part in ("weight", "bias"))
        features = nn.functional.linear(features.to(weight.dtype), weight, bias)
    return features[:, 0]
