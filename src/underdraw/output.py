"""What a call of the pipeline returns: images, their prompts and seeds, statistics, and the record of every pass."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from underdraw import __version__
from underdraw.errors import CheckpointError, ConfigError
from underdraw.history import History, check_history_list
from underdraw.io import IMAGE_SUFFIXES, as_path, make_folder
from underdraw.protocols import ImageTokenizer, PromptedImageTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

OutputType = Literal["pil", "np", "pt", "codes"]
"""list[PIL.Image], array (B, H, W, 3) in [0, 1], tensor (B, 3, H, W) in [0, 1], or codes (B, rows, cols)."""
GREY = 128 / 255  # of cells that are not drawn yet
ImagesT = TypeVar("ImagesT")  # what `output_type` says


@dataclass(frozen=True, slots=True)
class Stats:
    """Speed of one call. Times cover the decoding loop, without loading and without decoding codes to pixels."""

    seconds: float
    passes: int
    tokens: int
    tokens_per_pass: float
    mean_depth: float
    mean_nodes: float

    @classmethod
    def of(cls, histories: Sequence[History], seconds: float) -> Stats:
        """Statistics of a batch. Its images share their passes, so `passes` is that of the slowest image."""
        tokens = sum(int((history.pass_index >= 0).sum()) for history in histories)
        image_passes = sum(history.passes for history in histories)

        def mean(name: str) -> float:
            return sum(getattr(h, name) * h.passes for h in histories if h.passes) / max(1, image_passes)

        return cls(
            seconds=seconds,
            passes=max(history.passes for history in histories),
            tokens=tokens,
            tokens_per_pass=tokens / max(1, image_passes),
            mean_depth=mean("mean_depth"),
            mean_nodes=mean("mean_nodes"),
        )

    def to_record(self) -> dict[str, Any]:
        """The statistics for result files, floats with four decimals."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class PipelineOutput(Generic[ImagesT]):
    """B images in the order of prompts, then of images per prompt.

    As with diffusers' outputs, `out[0]` and `out["images"]` are `out.images`, and `(images,) = out` unpacks it.
    """

    images: ImagesT
    prompts: list[str]
    seeds: list[int]
    stats: Stats
    histories: list[History]
    complete: bool  # False if a callback has interrupted the call
    model: str
    settings: dict[str, Any]  # `Pipeline.settings` of the request

    @property
    def history(self) -> History:
        """The record of the first image."""
        return self.histories[0]

    def to_tuple(self) -> tuple[ImagesT]:
        return (self.images,)

    def __iter__(self) -> Iterator[ImagesT]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.to_tuple())

    def __getitem__(self, key: int | slice | str) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self.__dataclass_fields__:
            raise KeyError(f"an output has no {key!r}; it has {', '.join(self.__dataclass_fields__)}")
        return getattr(self, key)

    def metadata(self, index: int = 0) -> dict[str, str]:
        """The text chunks of an image's PNG: everything that is needed to draw it again."""
        self._check_index(index)
        negative = self.settings["negative_prompt"]
        settings = {**self.settings, "negative_prompt": negative[index] if isinstance(negative, list) else negative}
        return image_metadata(self.prompts[index], self.seeds[index], self.model, settings)

    def save(self, path: str | Path) -> list[Path]:
        """Write the images as PNG files with their metadata, and return the files.

        A `path` with the suffix of an image format is the file of a single image; formats other than PNG hold its
        pixels alone, without metadata. Anything else is a folder, created if it does not exist, for 00000.png,
        00001.png, ...
        """
        from underdraw.images import image_format, save_image

        images, path = self._pil_images("save()"), as_path(path, "the file or folder")
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            files = [path / f"{index:05d}.png" for index in range(len(images))]
        elif len(images) > 1:
            raise ConfigError(f"{path} is one file and the call drew {len(images)} images; pass a folder.")
        else:
            image_format(path)  # raises before a folder is created
            files = [path]
        make_folder(files[0].parent)
        for index, (image, file) in enumerate(zip(images, files, strict=True)):
            save_image(image, file, self.metadata(index))
        return files

    def heatmap(self, index: int = 0) -> Image:
        """Accepted length, tree depth, entropy and top-1 probability of every cell of an image, drawn over it."""
        images = self._pil_images("heatmap()")
        self._check_index(index)
        return self.histories[index].heatmap(images[index])

    def _check_index(self, index: object) -> None:
        count = len(self.prompts)
        if not isinstance(index, Integral) or not -count <= int(index) < count:
            raise ConfigError(f"there is no image {index!r}; the call drew {count}, from 0 on.")

    def _pil_images(self, caller: str) -> list[Image]:
        if not isinstance(self.images, list):
            raise ConfigError(f"{caller} needs PIL images; call the pipeline with output_type='pil'.")
        return self.images


def image_metadata(prompt: str, seed: int, model: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """The text chunks of an image's PNG."""
    return {
        "prompt": prompt,
        "seed": str(seed),
        "model": model,
        "settings": json.dumps(settings),
        "Software": f"underdraw {__version__}",
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread, then on as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_output_type(tokenizer: ImageTokenizer, output_type: OutputType) -> None:
    """Raise an error, before an image is drawn, for a misspelt type, or if codes cannot be decoded to pixels here."""
    if not isinstance(output_type, str) or output_type not in get_args(OutputType):
        raise ConfigError(f"unknown output_type {output_type!r}; use pil, np, pt or codes.")
    if output_type != "codes" and isinstance(tokenizer, PromptedImageTokenizer):
        tokenizer.check_available()


@torch.no_grad()
def decode_images(
    tokenizer: ImageTokenizer, histories: Sequence[History], device: torch.device, output_type: OutputType
) -> Any:
    """Images of the recorded tokens, of unfinished images too; cells without a token are grey.

    As `codes` such cells repeat the one above them, as the image tokenizer sees them: then drawn cells at the border,
    whose pixels depend on their neighbours, look as they will in the end.
    """
    check_output_type(tokenizer, output_type)
    check_history_list(histories)
    if not histories:
        raise ConfigError("there are no histories to decode; pass at least one, such as out.histories.")
    missing = torch.from_numpy(np.stack([history.grid("tokens") < 0 for history in histories]))
    codes = torch.from_numpy(np.stack([_filled_codes(history) for history in histories]))
    if output_type == "codes":
        return codes
    # One by one, on one CPU thread: convolutions round by batch size and by the number of threads, and an image must
    # depend on neither.
    images = [image.to(device) for image in codes.split(1)]
    with one_thread():
        decoded = torch.cat([_decode(tokenizer, *pair).float().cpu() for pair in zip(images, histories, strict=True)])
    if not bool(decoded.isfinite().all()):
        raise CheckpointError(
            "the image tokenizer decoded pixels that are not finite; its weights are damaged, or too large for this "
            "dtype: load the model again, in float32."
        )
    pixels = (decoded * 0.5 + 0.5).clamp(0, 1)  # (B, 3, H, W)
    if missing.any():
        blank = missing[:, None].repeat_interleave(tokenizer.downsample, 2)
        pixels = pixels.masked_fill(blank.repeat_interleave(tokenizer.downsample, 3), GREY)
    if output_type == "pt":
        return pixels
    array = pixels.permute(0, 2, 3, 1).numpy()
    if output_type == "np":
        return array
    from PIL import Image

    return [Image.fromarray((image * 255).round().astype(np.uint8)) for image in array]


def _filled_codes(history: History) -> NDArray[np.int64]:
    """The codes (rows, cols) of an image; cells without a token repeat the one above, or the last one of row 0."""
    codes = history.layout.grid(history.tokens).copy()
    missing = history.grid("tokens") < 0
    drawn = int((~missing[0]).sum())  # cells are drawn in raster order
    codes[0, drawn:] = codes[0, drawn - 1] if drawn else 0
    for row in range(1, len(codes)):
        codes[row] = np.where(missing[row], codes[row - 1], codes[row])
    return codes


def _decode(tokenizer: ImageTokenizer, codes: torch.Tensor, history: History) -> torch.Tensor:
    """Pixels (1, 3, H, W) in [-1, 1] of an image's codes (1, rows, cols)."""
    if not isinstance(tokenizer, PromptedImageTokenizer):
        return tokenizer.decode(codes)
    if not history.done:  # too slow for an image that is not complete: grey
        return torch.zeros(1, 3, codes.shape[1] * tokenizer.downsample, codes.shape[2] * tokenizer.downsample)
    return tokenizer.decode_prompted(codes, history.prompt, history.seed)
