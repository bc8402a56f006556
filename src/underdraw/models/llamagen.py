"""LlamaGen: text-to-image and class-conditional, as its authors' .pt files and as LANTERN's conversion.

Positions are those of the grid alone. The prompt has none: its queries and keys are zero, so tokens of the prompt that
are masked as padding can simply be left out. A class is a token of its own behind the codes; a text is up to 120
features of a T5 encoder, and what stands for "no text" are as many rows of a table in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint, tensor_shapes
from underdraw.models.family import (
    Family,
    ImageSize,
    LoadedModel,
    MakePrompt,
    ModelSpec,
    Placement,
    PublishedCheckpoint,
    PublishedDrafter,
    SamplingDefaults,
)
from underdraw.models.imagenet_classes import check_class, class_of
from underdraw.models.t5_text import TextFeatures
from underdraw.models.transformers_layout import decoder_arch, square
from underdraw.models.vqgan_checkpoint import LLAMAGEN, load_vqgan
from underdraw.models.weight_map import (
    HF_DECODER,
    WeightDestination,
    WeightRule,
    allocate,
    copy_weights,
    decoder_destinations,
    refuse_drafter,
)
from underdraw.nn.rope import Rope
from underdraw.nn.row_invariant import Linear
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import Prompt
from underdraw.tokenizers.vqgan import VQGAN

CELL = 16  # pixels of a code
SIDES = (256, 384, 512)  # of published checkpoints, in pixels
TEXT = 120  # features of a prompt
ORIGINAL = (
    WeightRule("tok_embeddings.weight", "embedding.weight", part="codes"),
    WeightRule("output.weight", "head.weight"),
    WeightRule("norm.weight", "norm.weight"),
    WeightRule("layers.{i}.attention_norm.weight", "blocks.{i}.attention_norm.weight"),
    WeightRule("layers.{i}.ffn_norm.weight", "blocks.{i}.ffn_norm.weight"),
    WeightRule("layers.{i}.attention.wqkv.weight", "blocks.{i}.qkv.weight"),
    WeightRule("layers.{i}.attention.wo.weight", "blocks.{i}.out.weight"),
    WeightRule("layers.{i}.feed_forward.w1.weight", "blocks.{i}.gate_up.weight", part="gate"),
    WeightRule("layers.{i}.feed_forward.w3.weight", "blocks.{i}.gate_up.weight", part="up"),
    WeightRule("layers.{i}.feed_forward.w2.weight", "blocks.{i}.down.weight"),
)
CONVERTED = (
    WeightRule("model.embed_tokens.weight", "embedding.weight", part="codes"),
    WeightRule("lm_head.weight", "head.weight"),
    *(replace(rule, name=f"model.{rule.name}") for rule in HF_DECODER[1:]),
)
CLASSES = WeightRule("cls_embedding.embedding_table.weight", "embedding.weight", part="classes")
_TABLE = "cls_embedding.embedding_table.weight"
_CAPTIONS = {
    "cls_embedding.cap_proj.fc1.weight": "0.weight",
    "cls_embedding.cap_proj.fc2.weight": "2.weight",
}
_UNCONDITIONAL = "cls_embedding.uncond_embedding"
_STALE = [r"(model\.)?freqs_cis$"]


@dataclass(frozen=True, slots=True)
class Weights:
    """The file of a checkpoint that holds the decoder, its tensors, and in which of the two formats."""

    checkpoint: Checkpoint
    shapes: dict[str, torch.Size]

    @property
    def converted(self) -> bool:
        return "model.embed_tokens.weight" in self.shapes

    @property
    def prefix(self) -> str:
        return "model." if self.converted else ""

    @property
    def embedding(self) -> torch.Size:
        return self.shapes["model.embed_tokens.weight" if self.converted else "tok_embeddings.weight"]

    @property
    def classes(self) -> int:
        """How many classes it knows besides "none"; 0 if it is told texts."""
        table = self.shapes.get(self.prefix + _TABLE)
        return table[0] - 1 if table is not None else 0


def _files(checkpoint: Checkpoint) -> list[Path]:
    """Files that may hold a decoder: the authors publish image tokenizers in the same folders."""
    if checkpoint.path.is_file():
        return [checkpoint.path]
    return [path for path in sorted(checkpoint.path.glob("*.pt")) if not path.name.startswith("vq_")]


def matches(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    if config:
        return config.get("model_type") == "llama" and ("caption_dim" in config or "cls_token_num" in config)
    return any("tok_embeddings.weight" in tensor_shapes(path) for path in _files(checkpoint))


def weights(checkpoint: Checkpoint) -> Weights:
    if checkpoint.config:
        shapes = checkpoint.shapes()
        refuse_drafter(checkpoint.name, shapes)
        if "model.embed_tokens.weight" not in shapes:
            raise CheckpointError(f"{checkpoint.name} lacks model.embed_tokens.weight; it is incomplete.")
        return Weights(checkpoint, shapes)
    files = _files(checkpoint)
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ConfigError(f"{checkpoint.name} holds several models ({names}); give one of these files.")
    return Weights(replace(checkpoint, path=files[0]), tensor_shapes(files[0]))


def _arch(own: Weights) -> Arch:
    config, name = own.checkpoint.config, own.checkpoint.name
    vocab, dim = own.embedding
    if own.converted:
        defaults = {"rms_norm_eps": 1e-5, "rope_theta": config.get("rope_base", 10000.0)}
        arch = decoder_arch(config, defaults, name)
    else:
        layers = sum(bool(re.fullmatch(r"layers\.\d+\.attention\.wo\.weight", key)) for key in own.shapes)
        heads = 32 if dim in (3200, 4096) else dim // 64  # the file does not say; all others have heads of 64
        ffn = own.shapes["layers.0.feed_forward.w1.weight"][0]
        arch = Arch(dim, layers, heads, ffn, vocab, Rope.one_axis(dim // heads))
    half = arch.width // 4
    return replace(
        arch,
        vocab=vocab + own.classes + (own.classes > 0),
        outputs=range(vocab),
        rope=Rope((0, half, half), arch.rope.theta, pairing="interleaved", prefix="zero"),
    )


def _sides(own: Weights) -> Sequence[int]:
    """Sides of its pictures in pixels; where neither configuration nor name tells, every published one."""
    config, table = own.checkpoint.config, own.shapes.get(f"{own.prefix}freqs_cis")
    cells = config.get("block_size")
    if cells is None and table is not None:
        cells = table[0] - (1 if own.classes else TEXT)
    if cells is not None:
        return [square(int(cells), own.checkpoint.name) * CELL]
    told = [int(number) for number in re.findall(r"_(\d{2,4})(?=_|$)", own.checkpoint.path.stem)]
    return told[-1:] if told and told[-1] % CELL == 0 else SIDES


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    own = weights(checkpoint)
    arch = _arch(own)
    codes = arch.outputs or range(0)
    return ModelSpec(
        arch=arch,
        defaults=SamplingDefaults(guidance=4.0, top_k=2000)
        if own.classes
        else SamplingDefaults(guidance=7.5, top_k=1000),
        sizes=tuple(ImageSize(side, side) for side in _sides(own)),
        make_layout=lambda size: Layout(size.height // CELL, size.width // CELL, codes),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, own = read_spec(checkpoint), weights(checkpoint)
    net = allocate(lambda: Transformer(spec.arch), placement)
    vocab = own.embedding[0]
    rows = {"codes": slice(0, vocab), "classes": slice(vocab, spec.arch.vocab)}
    slots = decoder_destinations(net, CONVERTED if own.converted else ORIGINAL, rows=rows)
    projection, make = None, _class_prompt(own, vocab)
    if own.classes:
        slots |= decoder_destinations(net, [CLASSES], own.prefix, rows)
    else:
        projection, unconditional = _captions(own, placement)
        parameters = projection.state_dict()
        slots |= {own.prefix + name: WeightDestination(parameters[into]) for name, into in _CAPTIONS.items()}
        slots[own.prefix + _UNCONDITIONAL] = WeightDestination(unconditional)
        make = _text_prompt(checkpoint, placement, unconditional)
    copy_weights(own.checkpoint, slots, _STALE)
    images = _images(checkpoint, "c2i" if own.classes else "t2i", placement)
    model = spec.build(FAMILY.name, checkpoint, DecoderTarget(net, projection), images, make)
    return replace(model, check_prompt=partial(check_class, count=own.classes)) if own.classes else model


def _captions(own: Weights, placement: Placement) -> tuple[nn.Module, Tensor]:
    """The network from text features to embeddings, and the features of "no text", both still empty."""
    first, table = (own.shapes.get(own.prefix + name) for name in (next(iter(_CAPTIONS)), _UNCONDITIONAL))
    if first is None or table is None:
        raise CheckpointError(
            f"{own.checkpoint.name} has neither {own.prefix}{_TABLE} nor {own.prefix}{_UNCONDITIONAL}; "
            "it is incomplete."
        )
    dim, inputs = first
    projection = allocate(
        lambda: nn.Sequential(
            Linear(inputs, dim, bias=False), nn.GELU(approximate="tanh"), Linear(dim, dim, bias=False)
        ),
        placement,
    )
    return projection, torch.empty(table, device=placement.device, dtype=placement.dtype)


def _images(checkpoint: Checkpoint, kind: str, placement: Placement) -> VQGAN:
    name = f"vq_ds16_{kind}.pt"
    published = f"peizesun/llamagen_t2i/{name}" if kind == "t2i" else f"FoundationVision/LlamaGen/{name}"
    path = checkpoint.fetched([name, f"pretrained_models/{name}"], published)
    return load_vqgan(path, LLAMAGEN, placement, ignored=[r"quantize\.codebook_used$"])


def _class_prompt(own: Weights, first: int) -> MakePrompt:
    def token(text: str) -> int:
        return first + class_of(text, own.classes)

    def prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        none = first + own.classes
        return Prompt((token(text),), (none if negative is None else token(negative),))

    return prompt


def _text_prompt(checkpoint: Checkpoint, placement: Placement, unconditional: Tensor) -> MakePrompt:
    encoder = TextFeatures(checkpoint, placement, TEXT)

    @lru_cache(maxsize=64)
    def features(text: str) -> Tensor:
        return encoder(text)

    def prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        condition = features(text)
        # The authors pad on the left, so what is left of the table are its last rows.
        none = unconditional[unconditional.shape[0] - condition.shape[0] :]
        return Prompt(condition, none if negative is None else features(negative))

    return prompt


FAMILY = Family(
    name="llamagen",
    summary="LlamaGen, text-to-image (256 and 512 px) and class-conditional (256 and 384 px), B to 3B",
    published=(
        PublishedCheckpoint(
            "jadohu/LlamaGen-T2I", "mit", "text-to-image, 256 px; with vq_ds16_t2i.pt and google/flan-t5-xl"
        ),
        PublishedCheckpoint("jadohu/LlamaGen-T2I-2", "mit", "text-to-image, 512 px; with the same"),
        PublishedCheckpoint("peizesun/llamagen_t2i/t2i_XL_stage1_256.pt", "mit", "text-to-image, 256 px"),
        PublishedCheckpoint("peizesun/llamagen_t2i/t2i_XL_stage2_512.pt", "mit", "text-to-image, 512 px"),
        *(
            PublishedCheckpoint(f"FoundationVision/LlamaGen/{name}.pt", "mit", "class-conditional; with vq_ds16_c2i.pt")
            for name in ("c2i_B_256", "c2i_L_256", "c2i_B_384", "c2i_L_384", "c2i_XL_384", "c2i_XXL_384", "c2i_3B_384")
        ),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    drafters=(
        PublishedDrafter("jadohu/llamagen_drafter", 1280, 256),
        PublishedDrafter("jadohu/llamagen2_drafter", 1280, 512),
    ),
)
