"""`custom_generate` for transformers: `model.generate(**inputs, custom_generate=custom_generate)`, only faster.

Works with Janus, Emu3, Chameleon (Anole) and GLM-Image. The weights of the model are copied once into underdraw's
decoder and kept with the model, so memory for a second copy of its decoder is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from underdraw.errors import ConfigError, UnsupportedError
from underdraw.extras import require_package
from underdraw.history import History
from underdraw.integrations.generate_inputs import (
    Grid,
    check_arguments,
    check_codes_allowed,
    check_condition_images,
    check_generation_config,
    check_processors,
    check_rows,
    read_glm_grid,
    read_grid,
    read_negative_rows,
    repeat_rows,
    strip_padding,
)
from underdraw.layout import Layout
from underdraw.models import anole, chameleon, emu3, glm_image, janus
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, SamplingDefaults
from underdraw.models.family import LoadedModel, ModelSpec
from underdraw.nn.target import DecoderTarget
from underdraw.pipeline import Pipeline
from underdraw.protocols import Prompt


@dataclass(frozen=True, slots=True)
class ModelWeights(Checkpoint):
    """The weights of a model in memory, read as if they were files."""

    state: Mapping[str, Tensor] = field(default_factory=dict)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.state.items()}

    def read_json(self, name: str) -> dict[str, Any]:
        """Nothing: there are no files, and those of the working directory are not the model's."""
        return {}

    def tensors(self, wanted: Any = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.state.items() if wanted is None or name in wanted)


class NoPixels:
    """The image tokenizer of a model that is asked for tokens only."""

    downsample = 1
    codebook = torch.zeros(0, 0)

    def encode(self, pixels: Tensor) -> Tensor:
        raise UnsupportedError("custom_generate returns tokens; use the model's own image tokenizer for pixels.")

    decode = encode


@dataclass(frozen=True, slots=True)
class Adapter:
    """How one model class of transformers generates an image."""

    read_spec: Callable[[Checkpoint], ModelSpec]
    load_decoder: Callable[[Checkpoint, ModelSpec, Placement], DecoderTarget]
    image_size: Callable[[ModelSpec, Grid | None, Mapping[str, Any]], ImageSize]
    unconditional: Callable[[tuple[int, ...], Any], tuple[int, ...]]  # (prompt row, generation config)
    image_start: Callable[[Mapping[str, Any], Any], int | None]  # (configuration, generation config): a token id
    guidance: float | None = None  # where the generation config has none; None: off
    has_guidance: bool = True
    returns_codes: bool = False  # codes of the image alone, instead of the prompt and token ids


def _default_size(spec: ModelSpec, grid: Grid | None, _: Mapping[str, Any]) -> ImageSize:
    if grid is not None:
        raise ConfigError(f"image_size {grid} was given, but this model has one size; leave it out.")
    return spec.sizes[0]


def _emu3_size(spec: ModelSpec, grid: Grid | None, _: Mapping[str, Any]) -> ImageSize:
    if grid is None:
        raise ConfigError("pass image_size=(rows, columns), as the processor's `image_sizes` has them.")
    return ImageSize(grid[0] * emu3.DOWNSAMPLE, grid[1] * emu3.DOWNSAMPLE)


def _glm_size(_: ModelSpec, grid: Grid | None, kwargs: Mapping[str, Any]) -> ImageSize:
    grid = grid or read_glm_grid(kwargs)
    if grid is None:
        raise ConfigError("pass image_grid_thw, which the processor returns, or image_size=(rows, columns).")
    return ImageSize(grid[0] * glm_image.DOWNSAMPLE, grid[1] * glm_image.DOWNSAMPLE)


def _janus_unconditional(row: tuple[int, ...], config: Any) -> tuple[int, ...]:
    """Padding instead of all tokens but the start and the image start."""
    keep = (config.bos_token_id, (config.generation_kwargs or {}).get("boi_token_id"))
    return tuple(token if token in keep else int(config.pad_token_id) for token in row)


def _janus_start(_: Mapping[str, Any], generation_config: Any) -> int | None:
    return (getattr(generation_config, "generation_kwargs", None) or {}).get("boi_token_id")


def _emu3_start(config: Mapping[str, Any], _: Any) -> int | None:
    return (config.get("vocabulary_map") or {}).get(emu3.SPECIAL_TOKENS["image"][0])


ADAPTERS = {
    "janus": Adapter(
        janus.read_spec,
        janus.load_decoder,
        _default_size,
        _janus_unconditional,
        _janus_start,
        guidance=5.0,
        returns_codes=True,
    ),
    # Without negative_prompt_ids, transformers' guidance starts at the last token of the prompt.
    "emu3": Adapter(emu3.read_spec, emu3.load_decoder, _emu3_size, lambda row, _: row[-1:], _emu3_start),
    "chameleon": Adapter(
        anole.read_spec,
        chameleon.load_decoder,
        _default_size,
        lambda row, _: (chameleon.START, chameleon.IMAGE_START),
        lambda *_: chameleon.IMAGE_START,
    ),
    "glm_image": Adapter(
        glm_image.read_spec,
        glm_image.load_decoder,
        _glm_size,
        lambda row, _: row,
        lambda config, _: config.get("image_start_token_id"),
        has_guidance=False,
    ),
}


class WrappedModel:
    """A pipeline over the weights of a transformers model, whose prompts are rows of token ids."""

    def __init__(self, model: Any) -> None:
        self.adapter = _find_adapter(model)
        _check_weights(model)
        self.rows: dict[str, Prompt] = {}
        self.config: dict[str, Any] = model.config.to_dict()
        checkpoint = ModelWeights(
            Path("weights in memory"),
            type(model).__name__,
            config=self.config,
            state=dict(model.state_dict()),
        )
        self.version = _weights_version(model)
        placement = Placement(model.device, model.dtype)
        self.spec = self.adapter.read_spec(checkpoint)
        target = self.adapter.load_decoder(checkpoint, self.spec, placement)
        self.loaded = LoadedModel(
            family=model.config.model_type,
            name=checkpoint.name,
            target=target,
            image_tokenizer=NoPixels(),
            defaults=SamplingDefaults(guidance=1.0),
            sizes=self.spec.sizes,
            make_layout=self.spec.make_layout,
            make_prompt=lambda text, *_: self._prompt(text),
        )
        self._pipelines: dict[tuple[str, str], Pipeline] = {}

    def _prompt(self, text: str) -> Prompt:
        """The row of this number; any row for the text by which the `auto` tree measures costs."""
        return self.rows[text] if text in self.rows else next(iter(self.rows.values()))

    def pipeline(self, drafter: str, tree: str, size: ImageSize) -> Pipeline:
        """The pipeline for a drafter and a tree; kept, because it holds the captured passes."""
        key = drafter, tree
        if key not in self._pipelines:
            self._pipelines[key] = Pipeline(self.loaded, drafter=drafter, tree=tree)
            self._pipelines[key].set_progress_bar_config(disable=True)
        pipe = self._pipelines[key]
        pipe.model = replace(pipe.model, sizes=(size, *(other for other in self.spec.sizes if other != size)))
        return pipe


_WRAPPED: WeakKeyDictionary[Any, WrappedModel] = WeakKeyDictionary()


def _wrap(model: Any) -> WrappedModel:
    """The copy of a model's weights; a new one after the model was moved, cast or trained."""
    wrapped = _WRAPPED.get(model)
    if wrapped is None or wrapped.version != _weights_version(model):
        wrapped = _WRAPPED[model] = WrappedModel(model)
    return wrapped


def _weights_version(model: Any) -> tuple[tuple[int, int], ...]:
    """Changes when a parameter is replaced or changed in place, other than through `.data`."""
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in model.parameters()
    )


def clear_cache() -> None:
    """Free the copied weights of all models; needed after changes through `.data`, which go unnoticed."""
    _WRAPPED.clear()


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: str = "auto",
    tree: str = "auto",
    seed: int | None = None,
    image_size: Grid | None = None,
    guidance: float | None = None,
    **model_kwargs: Any,
) -> Any:
    """Generate one image per row of `input_ids`, which end where the image begins; returns what `generate` returns.

    Greedy tokens are those of transformers, up to rounding of the logits. Sampled ones follow the same distribution,
    and are those of underdraw's plain decoding of `seed`; None draws a seed from torch's generator. `image_size` is
    (rows, columns) in codes, for models with several sizes. `guidance` replaces the generation config's guidance_scale.
    The length of an image is fixed, so stopping criteria and the maximal number of tokens have no effect.
    """
    processors = list(logits_processor or ())
    check_processors(processors)
    check_condition_images(model_kwargs)
    check_generation_config(generation_config)
    mask, image_size = model_kwargs.get("attention_mask"), read_grid(image_size)
    check_arguments(input_ids, mask, {"drafter": drafter, "tree": tree}, image_size, (guidance, seed))
    wrapped = _wrap(model)
    adapter = wrapped.adapter
    size = adapter.image_size(wrapped.spec, image_size, model_kwargs)
    layout = wrapped.spec.make_layout(size)
    scale = _resolve_guidance(adapter, guidance, generation_config, processors, model)
    rows = strip_padding(input_ids, mask)
    check_rows(rows, wrapped.spec.arch.vocab, adapter.image_start(wrapped.config, generation_config))
    check_codes_allowed(processors, layout.codes, input_ids)
    negative = read_negative_rows(processors)
    others = [adapter.unconditional(row, generation_config) for row in rows] if negative is None else negative
    pairs = zip(rows, repeat_rows(others, rows), strict=True)
    prompts = [Prompt(row, other if scale != 1 else ()) for row, other in pairs]
    first = int(torch.randint(2**31, ())) if seed is None else seed
    wrapped.rows.clear()
    wrapped.rows.update({str(index): prompt for index, prompt in enumerate(prompts)})
    pipe = wrapped.pipeline(drafter, tree, size)
    request = pipe.request(
        list(wrapped.rows),
        height=size.height,
        width=size.width,
        guidance_scale=scale,
        seed=[first + index for index in range(len(rows))],
        **_sampling(generation_config, len(layout.codes)),
    )
    histories = pipe.generate(request, output_type="codes").histories
    return _pack_output(adapter, layout, input_ids, histories, generation_config)


def _find_adapter(model: Any) -> Adapter:
    adapter = ADAPTERS.get(model.config.model_type)
    if adapter is None:
        raise UnsupportedError(
            f"custom_generate does not support {type(model).__name__} ({model.config.model_type}); use one of "
            f"{', '.join(ADAPTERS)}."
        )
    return adapter


def _check_weights(model: Any) -> None:
    """Raise an UnsupportedError for models whose weights cannot simply be copied from their device."""
    hook = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or model.device.type == "meta" or (hook and torch.device(hook).type != model.device.type):
        raise UnsupportedError(
            f"the weights of {type(model).__name__} are offloaded or on several devices; load it on one device, or use "
            "underdraw's own pipeline, with weights='int8' or 'int4' if memory is short."
        )
    if getattr(model, "is_quantized", False):
        raise UnsupportedError(
            f"{type(model).__name__} is quantised by transformers; load it in full, or use underdraw's own pipeline "
            "with weights='int8', 'fp8' or 'int4'."
        )
    if any(name.endswith(".base_layer") for name, _ in model.named_modules()):
        raise UnsupportedError(f"{type(model).__name__} has adapters; merge them first (merge_and_unload).")


def _resolve_guidance(
    adapter: Adapter, guidance: float | None, config: Any, processors: Sequence[Any], model: Any
) -> float:
    """The first guidance scale that is set.

    Janus' `generate` drops the call's scale from `config`, so the model's own generation config is asked next.
    """
    sources = [*processors, config, *([] if adapter.guidance is None else [model.generation_config])]
    scales = (guidance, *(getattr(source, "guidance_scale", None) for source in sources), adapter.guidance)
    scale = float(next((scale for scale in scales if scale is not None), 1.0))
    if scale != 1 and not adapter.has_guidance:
        raise UnsupportedError(f"guidance {scale:g} was given, but this model has no guidance; leave it out.")
    return scale


def _sampling(config: Any, codes: int) -> dict[str, Any]:
    """Temperature, top-k and top-p of a generation config."""
    if not config.do_sample:
        return {"temperature": 0.0}
    top_k = int(config.top_k or 0)
    return {
        "temperature": float(1.0 if config.temperature is None else config.temperature),
        "top_k": top_k if top_k < codes else 0,
        "top_p": float(1.0 if config.top_p is None else config.top_p),
    }


def _pack_output(adapter: Adapter, layout: Layout, input_ids: Tensor, histories: Sequence[History], config: Any) -> Any:
    """The tensor or output object that `generate` of this model returns; an object also has the number of passes."""
    tokens = [history.tokens.tolist() for history in histories]
    images = torch.tensor(tokens, dtype=input_ids.dtype, device=input_ids.device)
    if adapter.returns_codes:
        sequences = images - layout.codes.start
    else:
        sequences = torch.cat([input_ids, images], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    library = require_package("transformers.generation", "families", "custom_generate")
    output = library.GenerateDecoderOnlyOutput(sequences=sequences)
    output.passes = [history.passes for history in histories]
    return output
