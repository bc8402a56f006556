"""Image metrics against values by hand or other implementations, with small random networks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import call
from scipy import linalg

from underdraw.errors import ConfigError
from underdraw.metrics import networks
from underdraw.metrics.exact_match import read_images, read_pixels
from underdraw.metrics.image_quality import (
    aesthetic_scores,
    clip_score,
    cosine_similarity,
    fid,
    inception_score,
    precision_recall,
)
from underdraw.metrics.networks import WEIGHTS

RANDOM = torch.Generator().manual_seed(0)


def features(count: int, size: int, shift: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, size, generator=RANDOM, dtype=torch.float64) * scale + shift


def test_fid_by_hand() -> None:
    """Two clouds of two points on a line: means 0 and 3, deviations sqrt(2) and 3 sqrt(2)."""
    real, generated = torch.tensor([[-1.0], [1.0]]), torch.tensor([[0.0], [6.0]])
    assert fid(real, generated) == pytest.approx(9 + 2 + 18 - 2 * math.sqrt(2 * 18), rel=1e-6)


def test_fid_against_scipy() -> None:
    real, generated = features(60, 5), features(50, 5, 0.4, 1.7) @ features(5, 5)
    means, covariances = zip(*((x.mean(0).numpy(), np.cov(x.numpy().T)) for x in (real, generated)), strict=True)
    root = linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert fid(real, generated) == pytest.approx(expected, rel=1e-6)
    assert fid(real, real) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ConfigError, match="at least 2 generated"):
        fid(real, generated[:1])


def test_inception_score_by_hand() -> None:
    """Pictures that are all sure of different classes score the number of classes, unsure ones 1."""
    sure = torch.eye(4) * 200
    assert inception_score(sure, splits=1) == (pytest.approx(4.0), 0.0)
    assert inception_score(torch.zeros(8, 4), splits=2)[0] == pytest.approx(1.0)
    p = np.array([[0.7, 0.3], [0.2, 0.8]])
    kl = [sum(x * math.log(x / m) for x, m in zip(row, p.mean(0), strict=True)) for row in p]
    assert inception_score(torch.tensor(p).log(), splits=1)[0] == pytest.approx(math.exp(sum(kl) / 2))
    mixed = torch.randn(40, 6, generator=RANDOM)
    assert inception_score(mixed) == inception_score(mixed)  # the shuffle has a seed of its own


def brute_force(real: torch.Tensor, generated: torch.Tensor, nearest: int) -> tuple[float, float]:
    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return math.dist(a.tolist(), b.tolist())

    def share(points: torch.Tensor, cover: torch.Tensor) -> float:
        reach = [sorted(distance(c, d) for d in cover)[nearest] for c in cover]
        hit = [any(distance(p, c) <= r for c, r in zip(cover, reach, strict=True)) for p in points]
        return sum(hit) / len(hit)

    return share(generated, real), share(real, generated)


def test_precision_and_recall_against_brute_force() -> None:
    real, generated = features(20, 3), features(15, 3, 0.8)
    result = precision_recall(real, generated)
    assert result == brute_force(real, generated, 3) and 0 < result[0] < 1
    assert precision_recall(real, real) == (1, 1) and precision_recall(real, real + 100) == (0, 0)
    with pytest.raises(ConfigError, match="more than 3 images"):
        precision_recall(real[:3], generated)


def test_cosine_similarity_by_hand() -> None:
    images, texts = (
        torch.tensor([[3.0, 0.0], [1.0, 1.0], [1.0, 0.0]]),
        torch.tensor([[5.0, 0.0], [1.0, 0.0], [-2.0, 0.0]]),
    )
    assert cosine_similarity(images, texts).tolist() == pytest.approx([1, math.sqrt(0.5), -1])
    assert clip_score(images, texts) == pytest.approx(100 * (1 + math.sqrt(0.5) + 0) / 3)


def test_aesthetic_layers_run_in_numerical_order() -> None:
    """Layer 10 comes after layer 2."""
    layers = {2: torch.nn.Linear(4, 3), 10: torch.nn.Linear(3, 1), 0: torch.nn.Linear(5, 4)}
    state = {f"layers.{i}.{k}": v.detach() for i, layer in layers.items() for k, v in layer.state_dict().items()}
    x = torch.randn(6, 5, generator=RANDOM)
    assert torch.allclose(aesthetic_scores(state, x), layers[10](layers[2](layers[0](x)))[:, 0])


# ---------------------------------------------------------------- through folders, with small random networks


class TinyInception(torch.nn.Module):
    """What torch-fidelity's network looks like from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 6)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert images.dtype == torch.uint8
        means = self.first(images.float().mean((2, 3)) / 255)
        return means, means * 3


@pytest.fixture
def tiny_inception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TinyInception:
    """In the place of the published one; its file is there, and empty."""
    torch.manual_seed(0)
    network = TinyInception()
    monkeypatch.setattr(networks, "inception", lambda path: network)
    (tmp_path / WEIGHTS["inception"].name).touch()
    return network


def test_inception_metrics_of_folders(folders: Path, tmp_path: Path, tiny_inception: TinyInception) -> None:
    result = call(
        "evaluate",
        folders / "lantern",
        "--against",
        folders / "plain",
        "--metrics",
        "fid,is,pr",
        "--weights",
        tmp_path,
        "--json",
    )
    assert result.code == 0, result.err
    with torch.inference_mode():
        sides = []
        for name in ("plain", "lantern"):
            paths = [picture.source for picture in read_images(folders / name).values()]
            sides.append(torch.cat([tiny_inception(networks.read_tensor(path)[None])[0] for path in paths]))
    assert result.record["fid"] == pytest.approx(fid(*sides), abs=1e-3)
    assert tuple(result.record["pr"].values()) == tuple(round(v, 4) for v in precision_recall(*sides))
    assert result.record["is"]["mean"] == pytest.approx(inception_score(sides[1] * 3)[0], abs=1e-3)


def tiny_clip(folder: Path) -> Path:
    """A random CLIP with a vocabulary of letters, as a folder of transformers."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

    letters = [chr(c) for c in range(97, 123)] + list("0123456789")
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1}
    text: dict[str, Any] = {**small, **ends, "vocab_size": len(words), "max_position_embeddings": 40}
    torch.manual_seed(1)
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 8, "patch_size": 4}, projection_dim=6)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


def test_clip_and_aesthetic_of_a_folder(folders: Path, tmp_path: Path) -> None:
    """Against the model's own forward pass, one picture with its own prompt at a time."""
    from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

    path = tiny_clip(tmp_path / WEIGHTS["clip"].name)
    layer = torch.nn.Linear(6, 1)
    torch.save(
        {f"layers.0.{key}": value for key, value in layer.state_dict().items()}, tmp_path / WEIGHTS["aesthetic"].name
    )
    result = call("evaluate", folders / "plain", "--metrics", "clip,aesthetic", "--weights", tmp_path, "--json")
    assert result.code == 0, result.err
    model, images = CLIPModel.from_pretrained(path).eval(), CLIPImageProcessor.from_pretrained(path)
    words = CLIPTokenizer.from_pretrained(path)
    clip_scores, aesthetics = [], []
    for picture in read_images(folders / "plain").values():
        inputs = images(images=[read_pixels(picture.source)], return_tensors="pt")
        with torch.inference_mode():
            out = model(**inputs, **words([picture.prompt], return_tensors="pt"))
            clip_scores.append(max(0.0, 100 * float((out.image_embeds * out.text_embeds).sum())))
            aesthetics.append(float(layer(out.image_embeds)))
    assert result.record["clip"] == pytest.approx(np.mean(clip_scores), abs=1e-3)
    assert result.record["aesthetic"] == pytest.approx(np.mean(aesthetics), abs=1e-3)


def test_hps_pairs_every_image_with_its_prompt(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and prompts go through together, in one order."""

    def encode_images(paths: Any) -> torch.Tensor:
        return torch.stack([torch.tensor([float(path.stem), 1.0]) for path in paths])

    def encode_texts(texts: Any) -> torch.Tensor:
        return torch.stack([torch.tensor([float(text.split()[-1]), 1.0]) for text in texts])  # "a red fox 12"

    monkeypatch.setattr(networks, "hps", lambda path: networks.TextImageEncoder(encode_images, encode_texts))
    (tmp_path / WEIGHTS["hps"].name).touch()
    result = call("evaluate", folders / "plain", "--metrics", "hps", "--weights", tmp_path, "--json")
    assert result.record["hps"] == 1.0, "every picture was scored with its own prompt"


@pytest.mark.parametrize("metric", ["fid", "is", "pr", "clip", "hps", "aesthetic"])
def test_missing_weights_are_named(metric: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDERDRAW_WEIGHTS", raising=False)
    words = ["evaluate", folders / "plain", "--against", folders / "exact", "--metrics", metric]
    for where in ([], ["--weights", tmp_path]):
        result = call(*words, *where)
        assert result.code == 2 and result.err.count("\n") == 1 and f"{metric} needs" in result.err
        assert any(weight.name in result.err and weight.source in result.err for weight in WEIGHTS.values())


def test_damaged_weights_are_named(folders: Path, tmp_path: Path) -> None:
    """A folder that is no CLIP, a file that is cut off, and one with other tensors."""
    clip, aesthetic = tmp_path / WEIGHTS["clip"].name, tmp_path / WEIGHTS["aesthetic"].name
    clip.mkdir()
    aesthetic.write_bytes(b"half a file")

    def error() -> str:
        result = call("evaluate", folders / "plain", "--metrics", "aesthetic", "--weights", tmp_path)
        assert result.code == 2 and result.err.count("\n") == 1 and "download it again" in result.err
        return result.err

    assert str(clip) in error()
    clip.rmdir()
    tiny_clip(clip)
    assert str(aesthetic) in error()
    torch.save({"other": torch.zeros(3)}, aesthetic)
    assert str(aesthetic) in error()


def test_missing_packages_are_named(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch_fidelity", "torch_fidelity.feature_extractor_inceptionv3", "open_clip"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for metric, key in (("is", "inception"), ("hps", "hps")):
        (tmp_path / WEIGHTS[key].name).touch()
        result = call("evaluate", folders / "plain", "--metrics", metric, "--weights", tmp_path)
        assert result.code == 2 and "pip install 'underdraw[evaluate]'" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{plain}", "nothing to compare with"),
        ("{plain} --metrics exact", "with --against"),
        ("{plain} --metrics fjd", "Did you mean 'fid'?"),
        ("{here} --against {plain}", "has no metadata.jsonl"),
    ],
)
def test_bad_option_prints_one_line(words: str, message: str, folders: Path, tmp_path: Path) -> None:
    result = call("evaluate", *words.format(plain=folders / "plain", here=tmp_path).split())
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1
