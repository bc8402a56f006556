"""Read what transformers' `generate` hands to `custom_generate`, and refuse what would be ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from underdraw.errors import ConfigError, UnsupportedError
from underdraw.models import glm_image

Grid = tuple[int, int]  # rows and columns of codes
MAX_SIDE = 512  # codes; no published model draws half of it
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Logits processors whose effect is known: sampling parameters, guidance and the tokens that an image's layout allows.
_KNOWN_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "PrefixConstrainedLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}


def read_grid(grid: Any) -> Any:
    """`image_size` with numbers in place of tensors, as processors return sizes; still to be checked."""
    sides = grid.tolist() if isinstance(grid, Tensor) else grid
    if not isinstance(sides, list | tuple):
        return sides
    return tuple(side.tolist() if isinstance(side, Tensor) else side for side in sides)


def check_arguments(input_ids: Any, mask: Any, names: Mapping[str, Any], grid: Any, numbers: tuple[Any, Any]) -> None:
    """Raise a ConfigError for arguments of wrong types, which transformers hands over as they are."""
    if (
        not isinstance(input_ids, Tensor)
        or input_ids.ndim != 2
        or input_ids.is_floating_point()
        or not input_ids.numel()
    ):
        raise ConfigError("input_ids must be a tensor of token ids (images, tokens); embeddings are not supported.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        raise ConfigError("attention_mask must have the shape of input_ids.")
    for name, value in names.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"{name} must be a name, not {type(value).__name__}; see `underdraw generate --help` for those allowed."
            )
    is_grid = (
        isinstance(grid, Sequence)
        and len(grid) == 2
        and all(type(side) is int and 0 < side <= MAX_SIDE for side in grid)
    )
    if grid is not None and not is_grid:
        raise ConfigError(f"image_size must be (rows, columns) in codes, at most {MAX_SIDE} each.")
    guidance, seed = numbers
    if guidance is not None and (isinstance(guidance, bool) or not isinstance(guidance, int | float)):
        raise ConfigError(f"guidance must be a number, not {type(guidance).__name__}.")
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"seed must be a whole number, not {type(seed).__name__}.")


def check_generation_config(config: Any) -> None:
    """Raise an error if there is none, or one for beam search or for outputs that are not recorded."""
    if config is None:
        raise ConfigError("there is no generation_config; call model.generate(..., custom_generate=custom_generate).")
    if (config.num_beams or 1) > 1:
        raise UnsupportedError(f"num_beams {config.num_beams} was given, but images are drawn without beams.")
    recorded = [name for name in _RECORDS if getattr(config, name, None)]
    if config.return_dict_in_generate and recorded:
        raise UnsupportedError(f"custom_generate does not record what {recorded[0]} asks for; leave it out.")


def check_raw_arguments(model_type: str, arguments: Mapping[str, Any]) -> None:
    """Raise an UnsupportedError for arguments of `generate` that transformers would not hand over to custom_generate.

    Only a folder of the hub sees them: Janus' `generate` drops logits processors and negative prompts, and no model's
    hands over a streamer.
    """
    dropped = ("logits_processor", "negative_prompt_ids") if model_type == "janus" else ()
    for name in ("streamer", *dropped):
        value = arguments.get(name)
        if value is not None and (not isinstance(value, list) or value):
            raise UnsupportedError(f"custom_generate cannot apply {name} to this model; leave it out.")


def check_condition_images(kwargs: Mapping[str, Any]) -> None:
    """Raise an UnsupportedError for images as inputs, raw or encoded: prompts are token ids here."""
    encoded = kwargs.get("mm_encoder_outputs")
    raw = any(value is not None for name, value in kwargs.items() if name.startswith("pixel_values"))
    if raw or (isinstance(encoded, Mapping) and any(value is not None for value in encoded.values())):
        raise UnsupportedError(
            "custom_generate draws from text and cannot see images; leave pixel_values out, or generate without "
            "custom_generate."
        )


def check_processors(processors: Sequence[Any]) -> None:
    """Raise an UnsupportedError for logits processors that would be ignored."""
    unknown = [type(item).__name__ for item in processors if type(item).__name__ not in _KNOWN_PROCESSORS]
    if unknown:
        raise UnsupportedError(
            f"custom_generate cannot apply the logits processor {unknown[0]}; leave it out, or generate without "
            "custom_generate."
        )


def check_codes_allowed(processors: Sequence[Any], codes: range, input_ids: Tensor) -> None:
    """Raise an UnsupportedError for logits processors that forbid some of the tokens of the image's first cell."""
    for item in processors:
        suppressed, allow = (getattr(item, name, None) for name in ("suppress_tokens", "_prefix_allowed_tokens_fn"))
        hidden = set() if suppressed is None else set(codes) & _as_set(suppressed)
        if allow is not None:
            hidden |= set(codes) - _as_set(allow(0, input_ids[0]))
        if hidden:
            raise UnsupportedError(
                f"{type(item).__name__} forbids {len(hidden)} of {len(codes)} codes, which custom_generate cannot "
                "apply; leave it out, or generate without custom_generate."
            )


def _as_set(tokens: Any) -> set[int]:
    """Token ids in a tensor, or in a sequence of numbers and tensors."""
    return set(torch.as_tensor(tokens).flatten().tolist())


def check_rows(rows: Sequence[tuple[int, ...]], vocab: int, image_start: int | None) -> None:
    """Raise a ConfigError for prompts of unknown tokens, or without the token that starts an image at their end."""
    if not all(rows) or not all(0 <= token < vocab for row in rows for token in row):
        raise ConfigError(f"input_ids need rows of token ids from 0 to {vocab - 1}, none of them empty.")
    if image_start is not None and any(row[-1] != image_start for row in rows):
        raise ConfigError(
            f"input_ids must end with token {image_start}, which starts an image; append it, or ask the processor for "
            "the prompt of an image."
        )


def read_glm_grid(kwargs: Mapping[str, Any]) -> Grid | None:
    """Rows and columns of the large grid in GLM-Image's `image_grid_thw`, None if it is not given."""
    grids = kwargs.get("image_grid_thw")
    if grids is None:
        return None
    if (
        not isinstance(grids, Tensor)
        or grids.ndim != 2
        or grids.shape[1] != 3
        or not bool(((grids > 0) & (grids <= MAX_SIDE)).all())
    ):
        raise ConfigError("image_grid_thw must be a tensor (images, 3) of sizes, as the processor returns it.")
    sizes = [tuple(size) for size in grids[:, 1:].tolist()]
    rows, cols = sizes[0]
    if set(sizes[::2]) != {(rows, cols)} or set(sizes[1::2]) != {glm_image.preview_grid(rows, cols)}:
        raise UnsupportedError(
            "image_grid_thw must have a large and a small grid for every prompt, of one size for all, as the "
            "processor returns it for texts."
        )
    return rows, cols


def read_negative_rows(processors: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """The rows of `negative_prompt_ids`, which transformers hands to its guidance processor."""
    for item in processors:
        context = getattr(item, "unconditional_context", None)
        if context is not None and context.get("input_ids") is not None:
            return strip_padding(context["input_ids"], context.get("attention_mask"))
    return None


def repeat_rows(rows: Sequence[tuple[int, ...]], like: Sequence[Any]) -> list[tuple[int, ...]]:
    """One negative row may serve a whole batch."""
    if len(rows) == 1:
        return [rows[0]] * len(like)
    if len(rows) != len(like):
        raise ConfigError(f"{len(rows)} negative prompts came with {len(like)} prompts; pass one, or one per prompt.")
    return list(rows)


def strip_padding(ids: Tensor, mask: Tensor | None) -> list[tuple[int, ...]]:
    """The token ids of each row (B, N) without those that the attention mask hides."""
    masks = torch.ones_like(ids) if mask is None else mask
    return [tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, masks, strict=True)]
