"""The trained networks that image metrics look through: pictures and prompts in, features out. Formulas are elsewhere.

Each is loaded from a file that `weights` names; nothing is downloaded. Networks run a few pictures at a time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.extras import require_package
from underdraw.metrics.exact_match import pixels

BATCH = 16
BROKEN = (RuntimeError, OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, pickle.UnpicklingError)
Pictures = Callable[[Tensor], tuple[Tensor, Tensor]]
"""uint8 (B, 3, H, W) -> features (B, D) and logits (B, classes)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Embeds pictures and prompts into one space."""

    images: Callable[[Sequence[Path]], Tensor]
    texts: Callable[[Sequence[str]], Tensor]


def tensor(path: Path) -> Tensor:
    """A picture as uint8 (3, H, W)."""
    return torch.from_numpy(pixels(path).copy()).permute(2, 0, 1)


@torch.inference_mode()
def look(network: Pictures, paths: Sequence[Path], advance: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """Features and logits of pictures, one by one in batches of equal sizes."""
    features, logits = [], []
    for start in range(0, len(paths), BATCH):
        batch = [tensor(path) for path in paths[start : start + BATCH]]
        alike = len({one.shape for one in batch}) == 1
        for group in [torch.stack(batch)] if alike else [one[None] for one in batch]:
            found = network(group)
            features.append(found[0])
            logits.append(found[1])
        advance(len(batch))
    return torch.cat(features), torch.cat(logits)


def load_state(path: Path) -> dict[str, Any]:
    """The tensors of a file of torch; nothing in it is executed."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except BROKEN as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error).splitlines() or [""])[0]
    return CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {reason}); fetch it again.")


def inception(path: Path) -> Pictures:
    """InceptionV3 as torch-fidelity ports it from the original FID."""
    module = require_package("torch_fidelity.feature_extractor_inceptionv3", "evaluate", "an Inception metric")
    try:
        net = module.FeatureExtractorInceptionV3(
            "inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(path)
        )
    except BROKEN as error:
        raise damaged(path, error) from None
    net.eval()
    return lambda pictures: net(pictures)


def clip(folder: Path) -> Pair:
    """CLIP as transformers loads it from a folder."""
    transformers = require_package("transformers", "evaluate", "a CLIP metric")
    transformers.utils.logging.disable_progress_bar()  # the command has a bar of its own
    try:
        model = transformers.CLIPModel.from_pretrained(folder, local_files_only=True).eval()
        images = transformers.CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
        words = transformers.CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except BROKEN as error:
        raise damaged(folder, error) from None
    longest = model.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def see(paths: Sequence[Path]) -> Tensor:
        given = images(images=[pixels(path) for path in paths], return_tensors="pt")
        pooled = model.vision_model(pixel_values=given["pixel_values"]).pooler_output
        return model.visual_projection(pooled)

    @torch.inference_mode()
    def read(texts: Sequence[str]) -> Tensor:
        given = words(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        return model.text_projection(model.text_model(**given).pooler_output)

    return Pair(see, read)


def hps(path: Path) -> Pair:
    """HPSv2: a CLIP ViT-H-14 of open_clip with weights of its own."""
    open_clip = require_package("open_clip", "evaluate", "hps")
    model, _, prepare = open_clip.create_model_and_transforms("ViT-H-14")
    state = load_state(path)
    try:
        model.load_state_dict(state.get("state_dict", state))
    except BROKEN as error:
        raise damaged(path, error) from None
    model.eval()
    words = open_clip.get_tokenizer("ViT-H-14")

    @torch.inference_mode()
    def see(paths: Sequence[Path]) -> Tensor:
        from PIL import Image

        return model.encode_image(torch.stack([prepare(Image.fromarray(pixels(path))) for path in paths]))

    @torch.inference_mode()
    def read(texts: Sequence[str]) -> Tensor:
        return model.encode_text(words(list(texts)))

    return Pair(see, read)


def embed(
    pair: Pair, paths: Sequence[Path], texts: Sequence[str], advance: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Embeddings of pictures and of their prompts, in the same order."""
    images, words = [], []
    for start in range(0, len(paths), BATCH):
        images.append(pair.images(paths[start : start + BATCH]))
        words.append(pair.texts(texts[start : start + BATCH]))
        advance(len(images[-1]))
    return torch.cat(images), torch.cat(words)
