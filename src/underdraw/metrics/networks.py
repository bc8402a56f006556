"""Networks of image metrics (InceptionV3, CLIP, HPSv2) and their weight files: images and prompts in, features out.

Weights are loaded from files that the user has downloaded; a missing file is named with its source. Networks run on a
few images at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.extras import require_package
from underdraw.metrics.exact_match import read_pixels
from underdraw.models.checkpoint import read_tensors
from underdraw.models.pretrained import load_module, reading_folder
from underdraw.nn.weights import check_finite
from underdraw.shards import ImageSource

BATCH = 16
LOAD_ERRORS = (RuntimeError, OSError, ValueError, EOFError, LookupError, TypeError, AttributeError)
Advance = Callable[[int], object]
ImageNetwork = Callable[[Tensor], tuple[Tensor, Tensor]]
"""uint8 (B, 3, H, W) -> features (B, D) and logits (B, classes)."""
WEIGHTS_VARIABLE = "UNDERDRAW_WEIGHTS"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A published file, or a folder of files."""

    name: str
    source: str
    about: str


WEIGHTS = {
    "inception": WeightFile(
        "pt_inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/pt_inception-2015-12-05-6726825d.pth",
        "InceptionV3 of the original FID",
    ),
    "clip": WeightFile(
        "clip-vit-large-patch14",
        "https://huggingface.co/openai/clip-vit-large-patch14",
        "a folder with config.json, model.safetensors, preprocessor_config.json and the tokenizer's files",
    ),
    "hps": WeightFile("HPS_v2.1_compressed.pt", "https://huggingface.co/xswu/HPSv2", "HPSv2.1, a CLIP ViT-H-14"),
    "aesthetic": WeightFile(
        "sac+logos+ava1-l14-linearMSE.pth",
        "https://github.com/christophschuhmann/improved-aesthetic-predictor",
        "the LAION aesthetic predictor V2 on CLIP ViT-L/14",
    ),
}


def find_weights(key: str, folder: Path | None, metric: str) -> Path:
    """The path of a weight file, or an error that says how to get it."""
    weight = WEIGHTS[key]
    if folder is None:
        raise CheckpointError(
            f"{metric} needs {weight.name} ({weight.about}); download it from {weight.source} into a folder and name "
            f"that folder with --weights FOLDER or {WEIGHTS_VARIABLE}."
        )
    path = folder / weight.name
    if not path.exists():
        raise CheckpointError(
            f"{metric} needs {path} ({weight.about}), which is missing; download it from {weight.source} into that "
            "folder."
        )
    return path


@dataclass(frozen=True, slots=True)
class TextImageEncoder:
    """Embeds images and prompts into one space."""

    encode_images: Callable[[Sequence[ImageSource]], Tensor]
    encode_texts: Callable[[Sequence[str]], Tensor]


def read_tensor(path: ImageSource) -> Tensor:
    """An image as uint8 (3, H, W)."""
    return torch.from_numpy(read_pixels(path).copy()).permute(2, 0, 1)


@torch.inference_mode()
def extract_features(network: ImageNetwork, paths: Sequence[ImageSource], advance: Advance) -> tuple[Tensor, Tensor]:
    """Features and logits of images; batches with images of different sizes run one by one."""
    features, logits = [], []
    for start in range(0, len(paths), BATCH):
        batch = [read_tensor(path) for path in paths[start : start + BATCH]]
        has_one_size = len({image.shape for image in batch}) == 1
        for group in [torch.stack(batch)] if has_one_size else [image[None] for image in batch]:
            output = network(group)
            features.append(output[0])
            logits.append(output[1])
        advance(len(batch))
    return torch.cat(features), torch.cat(logits)


def embed(
    encoder: TextImageEncoder, paths: Sequence[ImageSource], texts: Sequence[str], advance: Advance
) -> tuple[Tensor, Tensor]:
    """Embeddings of images and of their prompts, in the same order."""
    image_parts, text_parts = [], []
    for start in range(0, len(paths), BATCH):
        image_parts.append(encoder.encode_images(paths[start : start + BATCH]))
        text_parts.append(encoder.encode_texts(texts[start : start + BATCH]))
        advance(len(image_parts[-1]))
    return torch.cat(image_parts), torch.cat(text_parts)


def load_state(path: Path) -> dict[str, Any]:
    """The tensors of a torch file, all of them finite; code in it is not executed."""
    state = dict(read_tensors(path))
    check_finite(state, str(path))
    return state


def damaged_file(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error).splitlines() or [""])[0]
    return CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {reason}); download it again.")


def inception(path: Path) -> ImageNetwork:
    """InceptionV3 as torch-fidelity ports it from the original FID."""
    module = require_package("torch_fidelity.feature_extractor_inceptionv3", "evaluate", "an Inception metric")
    load_state(path)  # the library would read whatever is in the file
    try:
        net = module.FeatureExtractorInceptionV3(
            "inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(path)
        )
    except LOAD_ERRORS as error:
        raise damaged_file(path, error) from None
    net.eval()
    return lambda images: net(images)


def clip(folder: Path) -> TextImageEncoder:
    """CLIP as transformers loads it from a folder."""
    transformers = require_package("transformers", "evaluate", "a CLIP metric")
    transformers.utils.logging.disable_progress_bar()  # the command has a progress bar
    model = load_module(transformers.CLIPModel, folder, "CLIP").eval()
    with reading_folder(folder, "CLIP"):
        processor = transformers.CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    max_length = model.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def encode_images(paths: Sequence[ImageSource]) -> Tensor:
        inputs = processor(images=[read_pixels(path) for path in paths], return_tensors="pt")
        return model.visual_projection(model.vision_model(pixel_values=inputs["pixel_values"]).pooler_output)

    @torch.inference_mode()
    def encode_texts(texts: Sequence[str]) -> Tensor:
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        return model.text_projection(model.text_model(**inputs).pooler_output)

    return TextImageEncoder(encode_images, encode_texts)


def hps(path: Path) -> TextImageEncoder:
    """HPSv2: open_clip's ViT-H-14 with the weights of HPSv2."""
    open_clip = require_package("open_clip", "evaluate", "hps")
    model, _, preprocess = open_clip.create_model_and_transforms("ViT-H-14")
    state = load_state(path)
    try:
        model.load_state_dict(state)
    except LOAD_ERRORS as error:
        raise damaged_file(path, error) from None
    model.eval()
    tokenizer = open_clip.get_tokenizer("ViT-H-14")

    @torch.inference_mode()
    def encode_images(paths: Sequence[ImageSource]) -> Tensor:
        from PIL import Image

        return model.encode_image(torch.stack([preprocess(Image.fromarray(read_pixels(path))) for path in paths]))

    @torch.inference_mode()
    def encode_texts(texts: Sequence[str]) -> Tensor:
        return model.encode_text(tokenizer(list(texts)))

    return TextImageEncoder(encode_images, encode_texts)
