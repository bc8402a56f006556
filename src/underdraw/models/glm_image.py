"""GLM-Image: a 9B decoder draws a small grid of codes, then the large one; a diffusion transformer paints the pixels.

This module covers the autoregressive part; `glm_image_pixels` calls diffusers for the rest. There is no guidance and no
row end. Tokens have positions on three axes (M-RoPE). The model rotates only the first half of each head; here the rows
of the query and key matrices are reordered at load time, so that the usual pairing with zero angles does the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from underdraw.errors import CheckpointError, ConfigError, first_line
from underdraw.extras import require_package
from underdraw.io import read_text
from underdraw.layout import Layout
from underdraw.models import weight_map
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, SamplingDefaults, SizeRange
from underdraw.models.family import Family, LoadedModel, MakePrompt, ModelSpec
from underdraw.models.glm_image_pixels import DiffusionDecoder, check_diffusers
from underdraw.models.hub import COMPANIONS
from underdraw.models.text_tokenizers import load_text_tokenizer
from underdraw.models.transformers_layout import (
    decoder_arch,
    max_positions,
    refuse_other_quantizers,
    with_defaults,
)
from underdraw.models.weight_map import HF_DECODER, HF_HEAD, HF_QKV_BIAS, WeightRule
from underdraw.nn.linear import QuantizedLinear
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import Prompt

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "vocab_size": 168064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
ROPE_DEFAULTS: Mapping[str, Any] = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": (8, 12, 12),
}
SAMPLING = SamplingDefaults(guidance=1.0, temperature=0.9, top_p=0.75)  # of the authors' README
DOWNSAMPLE = 32  # pixels per code of the large grid
PREVIEW_SIDE = 16  # codes; the small grid has about the square of it, in the shape of the image
CODES = 16384
IMAGE_START, IMAGE_END = 16384, 16385
SIZES = tuple(
    ImageSize(height, width)
    for height, width in ((1024, 1024), (1152, 768), (768, 1152), (1280, 960), (960, 1280), (512, 512), (2048, 2048))
)
MAX_SIDE = 2048  # pixels
DECODER_RULES = (
    *(rule for rule in HF_DECODER if "mlp.gate_proj" not in rule.tensor and "mlp.up_proj" not in rule.tensor),
    *HF_QKV_BIAS,
    WeightRule("layers.{i}.mlp.gate_up_proj.weight", "blocks.{i}.gate_up.weight"),
    WeightRule("layers.{i}.post_self_attn_layernorm.weight", "blocks.{i}.attention_out_norm.weight"),
    WeightRule("layers.{i}.post_mlp_layernorm.weight", "blocks.{i}.ffn_out_norm.weight"),
)
IGNORED = [r"model\.visual\.", r"model\.vqmodel\."]  # for editing images, which is not supported
PIPELINE_CLASS = "GlmImagePipeline"
_TEMPLATES = "transformers.utils.chat_template_utils"
DECODER_FOLDER, TEXT_FOLDER = "vision_language_encoder", "processor"


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "glm_image" or _is_pipeline(checkpoint)


def _is_pipeline(checkpoint: Checkpoint) -> bool:
    """Whether the folder is a whole diffusers pipeline, with the decoder in a subfolder."""
    name = checkpoint.read_json("model_index.json").get("_class_name")
    name = name[-1] if isinstance(name, list) and name else name  # of a custom pipeline: its file and its class
    return isinstance(name, str) and name.endswith(PIPELINE_CLASS)  # integrations/diffusers has a longer name


def _decoder_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The files of the autoregressive part."""
    if not _is_pipeline(checkpoint):
        return checkpoint
    folder = checkpoint.folder / DECODER_FOLDER
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{checkpoint.name} has no {DECODER_FOLDER}/config.json; download that folder too.")
    decoder = Checkpoint.from_path(folder, checkpoint.name, checkpoint.hub)
    refuse_other_quantizers(decoder)
    return decoder


def glm_arch(text_config: Mapping[str, Any] | None, codes: int, name: str) -> Arch:
    """The decoder that GLM-Image's `text_config` describes."""
    values = with_defaults(text_config, DEFAULTS)
    rope = with_defaults(values.get("rope_parameters"), ROPE_DEFAULTS)
    has_bias = bool(values.pop("attention_bias"))
    arch = decoder_arch({**values, "rope_parameters": rope}, {}, name)
    sections = tuple(int(count) for count in rope["mrope_section"])
    rotated = int(arch.head_width * float(rope["partial_rotary_factor"]))
    if len(sections) != 3 or 2 * sum(sections) != rotated:
        raise CheckpointError(
            f"mrope_section {list(sections)} of {name} must be three numbers with the sum {rotated // 2}, half of the "
            f"{rotated} dimensions that are rotated; the configuration is damaged."
        )
    return replace(
        arch,
        rope=Rope(sections, float(rope["rope_theta"]), mrope=True, unrotated=(arch.head_width - rotated) // 2),
        qkv_bias=has_bias,
        norm="sandwich",
        outputs=range(codes),
    )


def preview_grid(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of the small grid of an image of rows x cols codes."""
    ratio = rows / cols
    return int(math.sqrt(ratio) * PREVIEW_SIDE), int(math.sqrt(1 / ratio) * PREVIEW_SIDE)


def make_layout(size: ImageSize, codes: int = CODES, image_end: int = IMAGE_END) -> Layout:
    rows, cols = size.height // DOWNSAMPLE, size.width // DOWNSAMPLE
    return Layout(rows, cols, range(codes), preview=preview_grid(rows, cols), epilogue=(image_end,))


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    decoder = _decoder_checkpoint(checkpoint)
    config = decoder.config
    codes = int((config.get("vq_config") or {}).get("num_embeddings", CODES))
    image_end = int(config.get("image_end_token_id", IMAGE_END))
    return ModelSpec(
        arch=glm_arch(config.get("text_config"), codes, checkpoint.name),
        defaults=_sampling_defaults(decoder, codes),
        sizes=SIZES,
        make_layout=lambda size: make_layout(size, codes, image_end),
        size_range=SizeRange(multiple=DOWNSAMPLE, largest=MAX_SIDE),
        max_positions=max_positions(config.get("text_config"), DEFAULTS),
    )


def _sampling_defaults(decoder: Checkpoint, codes: int) -> SamplingDefaults:
    """Those of generation_config.json; a top-k of all codes or more is none."""
    saved = decoder.read_json("generation_config.json")
    top_k = int(saved.get("top_k") or 0)
    return replace(
        SAMPLING,
        temperature=float(saved.get("temperature") or SAMPLING.temperature),
        top_p=float(saved.get("top_p") or SAMPLING.top_p),
        top_k=top_k if top_k < codes else 0,
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, decoder = read_spec(checkpoint), _decoder_checkpoint(checkpoint)
    make_prompt = _prompt_builder(checkpoint)
    pixels = DiffusionDecoder(checkpoint.folder if _is_pipeline(checkpoint) else None, decoder, placement)
    return spec.build(FAMILY.name, checkpoint, load_decoder(decoder, spec, placement), pixels, make_prompt)


def load_decoder(decoder: Checkpoint, spec: ModelSpec, placement: Placement) -> DecoderTarget:
    """Load the autoregressive part."""
    rules = {"model.language_model.": DECODER_RULES, "": [HF_HEAD]}
    target = weight_map.load_decoder(decoder, spec, placement, rules, ignored=IGNORED)
    pair_rotated_dimensions(target.net)
    return target


def pair_rotated_dimensions(net: Transformer) -> None:
    """Reorder each head of queries and keys from [rotated halves, rest] to [half, rest / 2, half, rest / 2].

    The model rotates dimensions (j, j + r / 2) of the first r; our RoPE rotates (j, j + D / 2). Scores are sums over a
    head's dimensions, so the same order for queries and keys leaves them unchanged.
    """
    arch = net.arch
    rotated, width = 2 * sum(arch.rope.axes), arch.head_width
    first, second = torch.arange(rotated).chunk(2)
    rest_first, rest_second = torch.arange(rotated, width).chunk(2)
    order = torch.cat([first, rest_first, second, rest_second])
    heads = torch.arange(arch.heads + arch.num_kv_heads)[:, None] * width
    rows = (heads + order).flatten().to(net.head.weight.device)
    for name, parameter in net.named_parameters():
        if name.endswith((".qkv.weight", ".qkv_bias")):
            parameter.data[: len(rows)] = parameter.data[rows]
    for layer in net.blocks:
        if isinstance(layer.qkv, QuantizedLinear):
            values = torch.arange(len(rows), layer.qkv.outputs, device=rows.device)
            layer.qkv.reorder(torch.cat([rows, values]))


def _prompt_builder(checkpoint: Checkpoint) -> MakePrompt:
    """The chat template's text, the sizes of both grids and the image start token."""
    image_start = int(_decoder_checkpoint(checkpoint).config.get("image_start_token_id", IMAGE_START))
    folder = checkpoint.folder
    sibling = folder.parent / TEXT_FOLDER  # of the decoder's folder in a whole pipeline
    folders = (folder / TEXT_FOLDER, folder, folder / COMPANIONS / TEXT_FOLDER, sibling)
    path = next((parent / "tokenizer.json" for parent in folders if (parent / "tokenizer.json").exists()), None)
    if path is None:
        raise CheckpointError(f"{checkpoint.name} has no text tokenizer; put tokenizer.json into {folders[0]}.")
    if path.parent == sibling:
        checkpoint.declare_companion([TEXT_FOLDER], None)
    encode = load_text_tokenizer(path, add_special_tokens=True).encode
    settings = Checkpoint(path.parent, checkpoint.name).read_json("tokenizer_config.json")
    begin, end = settings.get("grid_bos_token", "<sop>"), settings.get("grid_eos_token", "<eop>")
    template = path.parent / "chat_template.jinja"
    template_text = read_text(template, "a chat template", CheckpointError) if template.exists() else None
    if template_text is not None:
        require_package(_TEMPLATES, "families", "a chat template")

    def make_prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        if negative is not None:
            raise ConfigError("GLM-Image has no guidance and takes no negative prompt; leave it out.")
        grid = size.height // DOWNSAMPLE, size.width // DOWNSAMPLE
        sizes = "".join(f"{begin}{rows} {cols}{end}" for rows, cols in (grid, preview_grid(*grid)))
        return Prompt((*encode(_render(template_text, text) + sizes), image_start))

    return make_prompt


def _render(template: str | None, text: str) -> str:
    """The text of one user message under a chat template of transformers."""
    if template is None:
        return text
    utilities = require_package(_TEMPLATES, "families", "a chat template")
    message = {"role": "user", "content": [{"type": "text", "text": text}]}
    try:
        rendered, _ = utilities.render_jinja_template(conversations=[[message]], chat_template=template)
    except Exception as error:  # a template is a program, and fails like one
        raise CheckpointError(f"the chat template cannot be used ({first_line(error)}); download it again.") from None
    return str(rendered[0])


FAMILY = Family(
    name="glm_image",
    summary="GLM-Image 9B: sides of any multiple of 32 up to 2048 px; pixels by diffusers",
    published=(
        PublishedCheckpoint(
            "zai-org/GLM-Image", "mit", "codes come from the 9B decoder; pixels need diffusers and its other folders"
        ),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=_prompt_builder,
    folders=(DECODER_FOLDER,),
    pixel_folders=("text_encoder", "transformer", "vae"),
    check_pixels=check_diffusers,
    extra="glm-image",
)
