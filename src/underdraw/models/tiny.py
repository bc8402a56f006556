"""The embedded family: a small text-to-image model trained for this package, with its image tokenizer and drafters.

A checkpoint is a folder with config.json, `tokenizer/` (image tokenizer), `decoder/` (weights, and text.json with the
text tokenizer), and optionally `drafter*/` and words.json with the words of its training captions.
"""

from __future__ import annotations

from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import TRAINED_BY_UNDERDRAW, Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.family import Family, LoadedModel
from underdraw.models.tiny_prompts import complete_prompt
from underdraw.models.vocabulary import load_vocabulary, split_words
from underdraw.nn.quantization import quantize_decoder
from underdraw.nn.quantized_weight import is_quantized
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.nn.weights import load_stored_weights
from underdraw.protocols import Prompt
from underdraw.tokenizers.fsq import load_tokenizer
from underdraw.tokenizers.text import TextTokenizer

MODEL_TYPE = "underdraw-tiny"


def tiny_arch(text_size: int, codes: int, *, dim: int = 512, layers: int = 8) -> Arch:
    """The decoder of the tiny family; its vocabulary is `text_size` text tokens, then the image codes."""
    heads = dim // 64
    return Arch(
        dim=dim,
        layers=layers,
        heads=heads,
        ffn=int(dim * 2.75),
        vocab=text_size + codes,
        rope=Rope((8, 12, 12)),
        kv_heads=max(1, heads // 2),
        qk_norm="rms",
        outputs=range(text_size, text_size + codes),
    )


def default_negative(text: str) -> str:
    """The prompt of the unconditional row: an empty one, or a portrait's own caption, which switches guidance off.

    Captions of portraits leave eyes and mouth free. Guidance exaggerates what tells the faces apart that a caption
    allows, and mixes their features; sprites need it, because without it some pictures stay empty.
    """
    return text if "portrait" in split_words(text) else ""


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == MODEL_TYPE


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    folder = checkpoint.folder
    image_tokenizer, _ = load_tokenizer(folder / "tokenizer", placement.device)
    text_tokenizer = TextTokenizer.load(folder / "decoder" / "text.json")
    weights, quantized, metadata = load_stored_weights(folder / "decoder")
    if metadata.get("kind") != MODEL_TYPE:
        raise CheckpointError(f"{folder / 'decoder'} holds a {metadata.get('kind')!r}, not a decoder of this family.")
    sizes, (height, width) = metadata["arch"], metadata["grid"]
    net = Transformer(tiny_arch(sizes["text"], sizes["codes"], dim=sizes["dim"], layers=sizes["layers"]))
    net.load_state_dict({**weights, **{name: weight.dequantize() for name, weight in quantized.items()}})
    if is_quantized(placement.weights):
        quantize_decoder(net, placement.weights, quantized)
    net = net.to(placement.device, placement.dtype).eval().requires_grad_(False)
    codes = range(sizes["text"], sizes["text"] + sizes["codes"])
    max_tokens, vocabulary = text_tokenizer.max_length - 1, load_vocabulary(folder)

    def check_length(text: str) -> None:
        count = len(text_tokenizer.encode_text(text))
        if count > max_tokens:
            raise ConfigError(
                f"the prompt {text[:40]!r}... has {count} tokens, but {checkpoint.name} reads at most {max_tokens}; "
                "shorten it."
            )

    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        text = complete_prompt(text, vocabulary)
        negative = default_negative(text) if negative is None else negative
        check_length(text)
        check_length(negative)
        condition, unconditional = text_tokenizer.encode_batch([text, negative])
        return Prompt(tuple(condition), tuple(unconditional))

    return LoadedModel(
        family=FAMILY.name,
        name=checkpoint.name,
        target=DecoderTarget(net, image_offset=text_tokenizer.max_length),
        image_tokenizer=image_tokenizer.eval().requires_grad_(False),
        defaults=SamplingDefaults(guidance=2.0, temperature=0.7, top_p=0.9),
        sizes=(ImageSize(height * image_tokenizer.downsample, width * image_tokenizer.downsample),),
        make_layout=lambda _: Layout(height, width, codes),
        make_prompt=make_prompt,
        check_prompt=lambda text: check_length(complete_prompt(text, vocabulary)),
        drafter_folders=tuple(path.parent for path in sorted(folder.glob(f"drafter*/{TRAINED_BY_UNDERDRAW}"))),
        path=folder,
        vocabulary=vocabulary,
    )


FAMILY = Family(
    name="tiny",
    summary="the embedded model: 192 px, 24x24 codes, emoji, portraits and landscapes",
    published=(PublishedCheckpoint("tiny", "CC-BY-4.0 AND CC0-1.0 AND MIT", "included in the package"),),
    matches=matches,
    load=load,
    folders=("decoder", "tokenizer"),
)
