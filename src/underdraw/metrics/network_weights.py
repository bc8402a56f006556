"""The weight files of image metrics: what each is called, where it comes from, and where it is looked for.

Nothing is downloaded. A file that is missing is named with its source and the folder that it belongs into.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from underdraw.errors import CheckpointError

VARIABLE = "UNDERDRAW_WEIGHTS"


@dataclass(frozen=True, slots=True)
class Weight:
    """A published file, or a folder of them."""

    name: str
    source: str
    what: str


WEIGHTS = {
    "inception": Weight(
        "pt_inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/pt_inception-2015-12-05-6726825d.pth",
        "InceptionV3 of the original FID",
    ),
    "clip": Weight(
        "clip-vit-large-patch14",
        "https://huggingface.co/openai/clip-vit-large-patch14",
        "a folder with config.json, model.safetensors, preprocessor_config.json and the files of the tokenizer",
    ),
    "hps": Weight("HPS_v2.1_compressed.pt", "https://huggingface.co/xswu/HPSv2", "HPSv2.1, a CLIP ViT-H-14"),
    "aesthetic": Weight(
        "sac+logos+ava1-l14-linearMSE.pth",
        "https://github.com/christophschuhmann/improved-aesthetic-predictor",
        "the LAION aesthetic predictor V2 on CLIP ViT-L/14",
    ),
}


def find(key: str, folder: Path | None, metric: str) -> Path:
    """Where a weight lies, or an error that says how to get it there."""
    weight = WEIGHTS[key]
    if folder is None:
        raise CheckpointError(
            f"{metric} needs {weight.name} ({weight.what}); fetch it from {weight.source} into a folder "
            f"and name that folder with --weights FOLDER or {VARIABLE}."
        )
    path = folder / weight.name
    if not path.exists():
        raise CheckpointError(
            f"{metric} needs {path} ({weight.what}), which is missing; fetch it from {weight.source} into that folder."
        )
    return path
