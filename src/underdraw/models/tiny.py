"""The embedded family: a small text-to-image model of our own, with its image tokenizer and its drafter.

A folder of this family holds config.json, `tokenizer/` (the image tokenizer), `decoder/` (weights and, as text.json,
the text tokenizer) and, if it has them, `drafter/` and words.json, the words of its training captions.
"""

from __future__ import annotations

from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import Family, ImageSize, LoadedModel, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.vocabulary import load_vocabulary
from underdraw.nn.rope import Rope
from underdraw.nn.row_invariant import pack_weights
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.nn.weights import load_weights
from underdraw.protocols import Prompt
from underdraw.tokenizers.fsq import load_tokenizer
from underdraw.tokenizers.text import TextTokenizer

KIND = "underdraw-tiny"


def tiny_arch(text_size: int, codes: int, *, dim: int = 512, layers: int = 8) -> Arch:
    """The decoder of the tiny family: text tokens first in the vocabulary, image codes after them."""
    heads = dim // 64
    return Arch(
        dim, layers, heads, int(dim * 2.75), text_size + codes, Rope((8, 12, 12)),
        kv_heads=max(1, heads // 2), qk_norm="rms", outputs=range(text_size, text_size + codes),
    )  # fmt: skip


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == KIND


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    folder = checkpoint.folder
    images, _ = load_tokenizer(folder / "tokenizer", placement.device)
    text = TextTokenizer.load(folder / "decoder" / "text.json")
    weights, about = load_weights(folder / "decoder")
    if about.get("kind") != KIND:
        raise CheckpointError(f"{folder / 'decoder'} holds no decoder of this family but {about.get('kind')!r}.")
    size, (height, width) = about["arch"], about["grid"]
    net = Transformer(tiny_arch(size["text"], size["codes"], dim=size["dim"], layers=size["layers"]))
    net.load_state_dict(weights)
    net = net.to(placement.device, placement.dtype).eval().requires_grad_(False)
    pack_weights(net)
    codes = range(size["text"], size["text"] + size["codes"])

    def check(words: str) -> None:
        count = len(text.spell_all(words))
        if count > text.max_length - 1:
            raise ConfigError(
                f"the prompt {words[:40]!r}... has {count} tokens and {checkpoint.name} reads {text.max_length - 1}; "
                "shorten it."
            )

    def prompt(words: str, negative: str | None, _: ImageSize) -> Prompt:
        check(words)
        check(negative or "")
        condition, unconditional = text.encode_batch([words, negative or ""])
        return Prompt(tuple(condition), tuple(unconditional))

    return LoadedModel(
        family=FAMILY.name,
        name=checkpoint.name,
        target=DecoderTarget(net, image_offset=text.max_length),
        image_tokenizer=images.eval().requires_grad_(False),
        defaults=SamplingDefaults(guidance=2.0, temperature=0.5),
        sizes=(ImageSize(height * images.downsample, width * images.downsample),),
        make_layout=lambda _: Layout(height, width, codes),
        make_prompt=prompt,
        check_prompt=check,
        drafter_folders=tuple(path.parent for path in sorted(folder.glob("drafter*/model-0.safetensors"))),
        path=folder,
        vocabulary=load_vocabulary(folder),
    )


FAMILY = Family(
    name="tiny",
    summary="the embedded model: 192 px, 24x24 codes, emoji, portraits and landscapes",
    published=(PublishedCheckpoint("tiny", "CC-BY-4.0 AND CC0-1.0 AND MIT", "comes with the package"),),
    matches=matches,
    load=load,
)
