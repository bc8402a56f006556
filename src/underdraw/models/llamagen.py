"""LlamaGen: text-to-image and class-conditional models, as the authors' .pt files and in LANTERN's conversion.

RoPE covers the grid alone: its tables are zero for prompt tokens, so their queries and keys are zero, and masked
padding can be left out. A class is one token, placed after the codes in our vocabulary. A text is up to 120 features
of a T5 encoder, and "no text" is a table of as many rows in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint, tensor_shapes
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, PublishedDrafter, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, MakePrompt, ModelSpec
from underdraw.models.hub import IMAGE_TOKENIZER_FILES
from underdraw.models.imagenet_classes import class_index
from underdraw.models.t5_text import T5Features
from underdraw.models.transformers_layout import decoder_arch, square_side
from underdraw.models.vqgan_checkpoint import LLAMAGEN, load_vqgan
from underdraw.models.weight_map import (
    HF_DECODER,
    WeightDestination,
    WeightRule,
    allocate,
    load_decoder,
    module_destinations,
    refuse_drafter,
)
from underdraw.nn.linear import Linear
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch
from underdraw.protocols import Prompt
from underdraw.tokenizers.vqgan import VQGAN

DOWNSAMPLE = 16  # pixels per code
PUBLISHED_SIDES = (256, 384, 512)  # pixels
MAX_TEXT_FEATURES = 120
ORIGINAL_RULES = (
    WeightRule("tok_embeddings.weight", "embedding.weight", rows="codes"),
    WeightRule("output.weight", "head.weight"),
    WeightRule("norm.weight", "norm.weight"),
    WeightRule("layers.{i}.attention_norm.weight", "blocks.{i}.attention_norm.weight"),
    WeightRule("layers.{i}.ffn_norm.weight", "blocks.{i}.ffn_norm.weight"),
    WeightRule("layers.{i}.attention.wqkv.weight", "blocks.{i}.qkv.weight"),
    WeightRule("layers.{i}.attention.wo.weight", "blocks.{i}.out.weight"),
    WeightRule("layers.{i}.feed_forward.w1.weight", "blocks.{i}.gate_up.weight", rows="gate"),
    WeightRule("layers.{i}.feed_forward.w3.weight", "blocks.{i}.gate_up.weight", rows="up"),
    WeightRule("layers.{i}.feed_forward.w2.weight", "blocks.{i}.down.weight"),
)
CONVERTED_RULES = (
    WeightRule("model.embed_tokens.weight", "embedding.weight", rows="codes"),
    WeightRule("lm_head.weight", "head.weight"),
    *(replace(rule, tensor=f"model.{rule.tensor}") for rule in HF_DECODER[1:]),
)
_CLASS_TABLE = "cls_embedding.embedding_table.weight"
_CLASS_RULE = WeightRule(_CLASS_TABLE, "embedding.weight", rows="classes")
_CAPTION_LAYERS = {"0.weight": "cls_embedding.cap_proj.fc1.weight", "2.weight": "cls_embedding.cap_proj.fc2.weight"}
_UNCONDITIONAL = "cls_embedding.uncond_embedding"
_ROPE_TABLE = "freqs_cis"  # saved by some versions; we compute it


@dataclass(frozen=True, slots=True)
class DecoderFiles:
    """The weights of the decoder, in one of the two formats."""

    checkpoint: Checkpoint
    shapes: dict[str, torch.Size]

    @property
    def is_converted(self) -> bool:
        return "model.embed_tokens.weight" in self.shapes

    @property
    def prefix(self) -> str:
        return "model." if self.is_converted else ""

    @property
    def embedding(self) -> torch.Size:  # (codes, hidden size)
        return self.shapes["model.embed_tokens.weight" if self.is_converted else "tok_embeddings.weight"]

    @property
    def classes(self) -> int:
        """Number of classes, without the "no class" row of the table; 0 for a text-to-image model."""
        table = self.shapes.get(self.prefix + _CLASS_TABLE)
        return table[0] - 1 if table is not None else 0


def _candidate_files(checkpoint: Checkpoint) -> list[Path]:
    """Files that may hold a decoder; the authors publish image tokenizers in the same folders."""
    if checkpoint.path.is_file():
        return [checkpoint.path]
    return [path for path in sorted(checkpoint.path.glob("*.pt")) if not path.match(IMAGE_TOKENIZER_FILES)]


def matches(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    if config:
        return config.get("model_type") == "llama" and ("caption_dim" in config or "cls_token_num" in config)
    return any("tok_embeddings.weight" in tensor_shapes(path) for path in _candidate_files(checkpoint))


def find_decoder(checkpoint: Checkpoint) -> DecoderFiles:
    if checkpoint.config:
        shapes = checkpoint.shapes()
        refuse_drafter(checkpoint.name, shapes)
        if "model.embed_tokens.weight" not in shapes:
            raise CheckpointError(f"{checkpoint.name} lacks model.embed_tokens.weight; it is incomplete.")
        return DecoderFiles(checkpoint, shapes)
    paths = _candidate_files(checkpoint)
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise ConfigError(f"{checkpoint.name} holds several models ({names}); give one of these files.")
    return DecoderFiles(replace(checkpoint, path=paths[0]), tensor_shapes(paths[0]))


def _read_arch(decoder: DecoderFiles) -> Arch:
    config, name = decoder.checkpoint.config, decoder.checkpoint.name
    codes, dim = decoder.embedding
    if decoder.is_converted:
        defaults = {"rms_norm_eps": 1e-5, "rope_theta": config.get("rope_base", 10000.0)}
        arch = decoder_arch(config, defaults, name)
    else:
        layers = sum(bool(re.fullmatch(r"layers\.\d+\.attention\.wo\.weight", key)) for key in decoder.shapes)
        # The file does not store the number of heads: 3B and 7B have 32, all smaller models have heads of 64.
        heads = 32 if dim in (3200, 4096) else dim // 64
        ffn = decoder.shapes["layers.0.feed_forward.w1.weight"][0]
        arch = Arch(dim, layers, heads, ffn, codes, Rope.one_axis(dim // heads))
    pairs = arch.head_width // 4  # rotated pairs per axis: half for rows, half for columns
    return replace(
        arch,
        vocab=codes + (decoder.classes + 1 if decoder.classes else 0),
        outputs=range(codes),
        rope=Rope((0, pairs, pairs), arch.rope.theta, pairing="interleaved", rotate_prompt=False),
    )


def _read_sides(decoder: DecoderFiles) -> Sequence[int]:
    """Image sides in pixels, from configuration, RoPE table, file name or saved record; else all published ones."""
    rope_table = decoder.shapes.get(decoder.prefix + _ROPE_TABLE)
    cells = decoder.checkpoint.config.get("block_size")
    if cells is None and rope_table is not None:
        cells = rope_table[0] - (1 if decoder.classes else MAX_TEXT_FEATURES)
    if cells is not None:
        return [square_side(int(cells), decoder.checkpoint.name) * DOWNSAMPLE]
    numbers = [int(number) for number in re.findall(r"_(\d{2,4})(?=_|$)", decoder.checkpoint.path.stem)]
    if numbers and numbers[-1] % DOWNSAMPLE == 0:
        return numbers[-1:]
    saved = decoder.checkpoint.recorded_side(DOWNSAMPLE)
    return PUBLISHED_SIDES if saved is None else [saved]


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    decoder = find_decoder(checkpoint)
    arch, sides = _read_arch(decoder), _read_sides(decoder)
    for_classes, for_text = SamplingDefaults(guidance=4.0, top_k=2000), SamplingDefaults(guidance=7.5, top_k=1000)
    return ModelSpec(
        arch=arch,
        defaults=for_classes if decoder.classes else for_text,
        sizes=tuple(ImageSize(side, side) for side in sides),
        requires_size=len(sides) > 1,  # not that of a renamed file
        make_layout=lambda size: Layout(size.height // DOWNSAMPLE, size.width // DOWNSAMPLE, arch.outputs or range(0)),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, decoder = read_spec(checkpoint), find_decoder(checkpoint)
    codes, projection, others = decoder.embedding[0], None, {}
    rules = CONVERTED_RULES if decoder.is_converted else ORIGINAL_RULES
    if decoder.classes:
        rules = (*rules, replace(_CLASS_RULE, tensor=decoder.prefix + _CLASS_TABLE))
        make_prompt = _make_class_prompts(decoder.classes, first_token=codes)
    else:
        projection, unconditional = _allocate_captions(decoder, placement)
        others = module_destinations(projection, decoder.prefix, _CAPTION_LAYERS.__getitem__)
        others[decoder.prefix + _UNCONDITIONAL] = WeightDestination(unconditional)
        make_prompt = _make_text_prompts(checkpoint, placement, unconditional)
    images = _load_image_tokenizer(checkpoint, "c2i" if decoder.classes else "t2i", placement)
    rows = {"codes": slice(0, codes), "classes": slice(codes, spec.arch.vocab)}
    ignored = [rf"(model\.)?{_ROPE_TABLE}$"]
    target = load_decoder(decoder.checkpoint, spec, placement, {"": rules}, rows=rows, others=others, ignored=ignored)
    model = spec.build(FAMILY.name, checkpoint, replace(target, projection=projection), images, make_prompt)
    if not decoder.classes:
        return model

    def check_prompt(text: str) -> None:
        class_index(text, decoder.classes)

    return replace(model, check_prompt=check_prompt)


def _allocate_captions(decoder: DecoderFiles, placement: Placement) -> tuple[nn.Module, Tensor]:
    """The network from T5 features to embeddings and the features of "no text", both uninitialised."""
    first_layer = decoder.shapes.get(decoder.prefix + _CAPTION_LAYERS["0.weight"])
    table = decoder.shapes.get(decoder.prefix + _UNCONDITIONAL)
    if first_layer is None or table is None:
        raise CheckpointError(
            f"{decoder.checkpoint.name} has neither {decoder.prefix}{_CLASS_TABLE} nor "
            f"{decoder.prefix}{_UNCONDITIONAL}; it is incomplete."
        )
    dim, features = first_layer
    projection = allocate(
        lambda: nn.Sequential(
            Linear(features, dim, bias=False), nn.GELU(approximate="tanh"), Linear(dim, dim, bias=False)
        ),
        placement,
    )
    return projection, torch.empty(table, device=placement.device, dtype=placement.dtype)


def _load_image_tokenizer(checkpoint: Checkpoint, kind: str, placement: Placement) -> VQGAN:
    name = f"vq_ds16_{kind}.pt"
    hub_id = f"peizesun/llamagen_t2i/{name}" if kind == "t2i" else f"FoundationVision/LlamaGen/{name}"
    path = checkpoint.find_or_download([name, f"pretrained_models/{name}"], hub_id)
    return load_vqgan(path, LLAMAGEN, placement, ignored=[r"quantize\.codebook_used$"])


def _make_class_prompts(classes: int, first_token: int) -> MakePrompt:
    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        other = classes if negative is None else class_index(negative, classes)  # the last row means "no class"
        return Prompt((first_token + class_index(text, classes),), (first_token + other,))

    return make_prompt


def _make_text_prompts(checkpoint: Checkpoint, placement: Placement, unconditional: Tensor) -> MakePrompt:
    encode = lru_cache(maxsize=64)(T5Features(checkpoint, placement, MAX_TEXT_FEATURES))

    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        condition = encode(text)
        # The authors pad on the left and mask the padding in both rows, so the last rows of the table remain.
        no_text = unconditional[unconditional.shape[0] - condition.shape[0] :]
        return Prompt(condition, no_text if negative is None else encode(negative))

    return make_prompt


_CLASS_MODELS = ("c2i_B_256", "c2i_L_256", "c2i_B_384", "c2i_L_384", "c2i_XL_384", "c2i_XXL_384", "c2i_3B_384")
FAMILY = Family(
    name="llamagen",
    summary="LlamaGen, text-to-image (256 and 512 px) and class-conditional (256 and 384 px), B to 3B",
    published=(
        PublishedCheckpoint(
            "jadohu/LlamaGen-T2I", "mit", "text-to-image, 256 px; needs vq_ds16_t2i.pt and google/flan-t5-xl"
        ),
        PublishedCheckpoint("jadohu/LlamaGen-T2I-2", "mit", "text-to-image, 512 px; needs the same"),
        PublishedCheckpoint("peizesun/llamagen_t2i/t2i_XL_stage1_256.pt", "mit", "text-to-image, 256 px"),
        PublishedCheckpoint("peizesun/llamagen_t2i/t2i_XL_stage2_512.pt", "mit", "text-to-image, 512 px"),
        *(
            PublishedCheckpoint(
                f"FoundationVision/LlamaGen/{name}.pt", "mit", "class-conditional; needs vq_ds16_c2i.pt"
            )
            for name in _CLASS_MODELS
        ),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    drafters=(
        PublishedDrafter("jadohu/llamagen_drafter", hidden_size=1280, image_side=256),
        PublishedDrafter("jadohu/llamagen2_drafter", hidden_size=1280, image_side=512),
    ),
)
