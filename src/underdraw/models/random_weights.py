"""Decoders of published shapes with random weights, made where they run: for timing without a checkpoint.

What they draw is noise. Shapes and picture sizes are those of the families' own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from underdraw.errors import unknown
from underdraw.layout import Layout
from underdraw.models import chameleon, emu3, janus, llamagen, lumina
from underdraw.models.family import ImageSize, Placement
from underdraw.models.transformers_layout import decoder_arch
from underdraw.models.weight_map import allocate
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import Prompt

_CHAMELEON = replace(
    decoder_arch({}, chameleon.DEFAULTS, "chameleon"), qk_norm="layer", qk_norm_heads="per_head",
    outputs=chameleon.CODES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder, its picture, how it is guided and filtered, and how long its prompts are."""

    arch: Arch
    layout: Layout
    guidance: float
    top_k: int = 0
    prompt: int = 32

    def prompts(self, count: int, more: int = 0) -> list[Prompt]:
        """Prompts of any tokens; the unconditional row is two tokens long, as for the families that have words.

        `more` tokens on both rows stand for a picture that is drawn in part.
        """
        codes = self.layout.codes
        text = [token for token in range(1, self.arch.vocab) if token not in codes][:1] or [codes.start]
        return [Prompt(tuple(text * (self.prompt + more)), tuple(text * (2 + more))) for _ in range(count)]


def _janus() -> ModelShape:
    known = {**janus.DEFAULTS, "num_hidden_layers": 30, "vocab_size": 102400}  # the 7B
    text = decoder_arch({}, known, "janus")
    codes = range(text.vocab, text.vocab + 16384)
    return ModelShape(replace(text, vocab=codes.stop, outputs=codes, head_hidden=4096), Layout(24, 24, codes), 5.0)


def _emu3() -> ModelShape:
    ids = emu3.tokens({}, 32768)
    arch = replace(decoder_arch({}, emu3.DEFAULTS, "emu3"), outputs=ids.codes)
    ending = (ids.frame_end, ids.image_end, ids.end)
    return ModelShape(arch, Layout(90, 90, ids.codes, row_end=ids.row_end, epilogue=ending), 3.0, 2048)


def _llamagen() -> ModelShape:
    rope = Rope((0, 16, 16), pairing="interleaved", prefix="zero")
    arch = Arch(1280, 36, 20, 3584, 16384, rope, outputs=range(16384))
    return ModelShape(arch, Layout(32, 32, range(16384)), 7.5, 1000, llamagen.TEXT)


def _toy() -> ModelShape:
    codes = range(4, 132)
    return ModelShape(Arch(64, 2, 4, 96, 140, Rope.one_axis(16), outputs=codes), Layout(12, 12, codes), 2.0, 40, 8)


SHAPES: dict[str, Callable[[], ModelShape]] = {
    "anole-7b": lambda: ModelShape(_CHAMELEON, Layout(32, 32, chameleon.CODES), 3.0, 2000),
    "lumina-7b": lambda: ModelShape(_CHAMELEON, lumina.layout(ImageSize(768, 768)), 3.0, 2000),
    "llamagen-xl": _llamagen,
    "janus-7b": _janus,
    "emu3-8b": _emu3,
    "toy": _toy,
}


def shape(name: str) -> ModelShape:
    """A published shape by name."""
    if name not in SHAPES:
        raise unknown("random model", name, SHAPES)
    return SHAPES[name]()


def random_target(arch: Arch, placement: Placement) -> DecoderTarget:
    """A decoder with random weights at the scale of trained ones."""
    net = allocate(lambda: Transformer(arch), placement)
    randomise(net)
    return DecoderTarget(net)


@torch.no_grad()
def randomise(module: torch.nn.Module) -> None:
    """Fill the module where it lies; norms keep what they are, up to noise that no shortcut can use."""
    weight = next(module.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.ndim == 1 or "norm" in name:
            parameter.mul_(0.1).add_(float(name.endswith("weight")))
        elif "embedding" not in name:
            parameter.mul_(parameter.shape[1] ** -0.5)
