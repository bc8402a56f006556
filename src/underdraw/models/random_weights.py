"""Decoders of published shapes with random weights, created on their device, to measure speed without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from underdraw.errors import unknown
from underdraw.layout import Layout
from underdraw.models import anole, chameleon, emu3, glm_image, janus, llamagen, lumina, lumina2, simplear
from underdraw.models.config import ImageSize, Placement
from underdraw.models.transformers_layout import decoder_arch
from underdraw.models.weight_map import allocate
from underdraw.nn.linear import QuantizedLinear
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import Prompt

JANUS_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder, the layout of its image, and the usual sampling parameters and prompt length."""

    arch: Arch
    layout: Layout
    guidance: float
    top_k: int = 0
    top_p: float = 1.0
    prompt_length: int = 32

    def prompts(self, count: int, more: int = 0) -> list[Prompt]:
        """Prompts of one repeated text token; unconditional rows have two tokens, as in most families.

        `more` tokens are added to both rows, to measure as if the image were already generated in part.
        """
        codes = self.layout.codes
        token = next((token for token in range(1, self.arch.vocab) if token not in codes), codes.start)
        return [Prompt((token,) * (self.prompt_length + more), (token,) * (2 + more)) for _ in range(count)]


def _chameleon_arch() -> Arch:
    arch = decoder_arch({}, chameleon.DEFAULTS, "chameleon")
    return replace(arch, qk_norm="layer", qk_norm_heads="per_head", outputs=chameleon.CODES)


def _anole_7b() -> ModelShape:
    return ModelShape(_chameleon_arch(), anole.make_layout(ImageSize(512, 512)), guidance=3.0, top_k=2000)


def _lumina_7b() -> ModelShape:
    return ModelShape(_chameleon_arch(), lumina.make_layout(ImageSize(768, 768)), guidance=3.0, top_k=2000)


def _lumina_2_7b() -> ModelShape:
    arch = replace(_chameleon_arch(), vocab=lumina2.VOCAB_SIZE, outputs=lumina2.CODES, qk_norm_heads="shared")
    layout = lumina2.make_layout(ImageSize(768, 768), lumina2.Lumina2Tokens())
    return ModelShape(arch, layout, lumina2.SAMPLING.guidance, lumina2.SAMPLING.top_k)


def _janus(config: Mapping[str, Any]) -> ModelShape:
    text = decoder_arch({"vocab_size": 102400, **config}, janus.DEFAULTS, "janus")
    codes = range(text.vocab, text.vocab + 16384)
    arch = replace(text, vocab=codes.stop, outputs=codes, head_hidden=text.dim)
    return ModelShape(arch, Layout(24, 24, codes), guidance=5.0)


def _emu3_8b() -> ModelShape:
    tokens = emu3.special_tokens({}, 32768)
    arch = replace(decoder_arch({}, emu3.DEFAULTS, "emu3"), outputs=tokens.codes)
    return ModelShape(arch, emu3.make_layout(ImageSize(720, 720), 8, tokens), guidance=3.0, top_k=2048)


def _glm_image_9b() -> ModelShape:
    arch = glm_image.glm_arch({}, glm_image.CODES, "glm-image")
    layout = glm_image.make_layout(ImageSize(1024, 1024))
    return ModelShape(arch, layout, guidance=glm_image.SAMPLING.guidance, top_p=glm_image.SAMPLING.top_p)


def _llamagen_xl() -> ModelShape:
    rope = Rope((0, 16, 16), pairing="interleaved", rotate_prompt=False)
    arch = Arch(1280, 36, 20, 3584, 16384, rope, outputs=range(16384))
    layout = Layout(32, 32, range(16384))
    return ModelShape(arch, layout, guidance=7.5, top_k=1000, prompt_length=llamagen.MAX_TEXT_FEATURES)


def _simplear(config: Mapping[str, Any]) -> ModelShape:
    codes = range(simplear.DEFAULTS["vocab_size"] - simplear.CODES, simplear.DEFAULTS["vocab_size"])
    layout = simplear.make_layout(ImageSize(1024, 1024), codes)
    return ModelShape(simplear.simplear_arch(config, codes, "simplear"), layout, simplear.SAMPLING.guidance)


def _toy() -> ModelShape:
    codes = range(4, 132)
    arch = Arch(64, 2, 4, 96, 140, Rope.one_axis(16), outputs=codes)
    return ModelShape(arch, Layout(12, 12, codes), guidance=2.0, top_k=40, prompt_length=8)


SHAPES: dict[str, Callable[[], ModelShape]] = {
    "anole-7b": _anole_7b,
    "lumina-7b": _lumina_7b,
    "lumina-2-7b": _lumina_2_7b,
    "llamagen-xl": _llamagen_xl,
    "janus-1b": lambda: _janus(JANUS_1B),
    "janus-7b": lambda: _janus({"num_hidden_layers": 30}),
    "emu3-8b": _emu3_8b,
    "glm-image-9b": _glm_image_9b,
    "simplear-0.5b": lambda: _simplear({}),
    "simplear-1.5b": lambda: _simplear(simplear.SHAPE_1_5B),
    "toy": _toy,
}


def model_shape(name: str) -> ModelShape:
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
    """Fill a module's parameters in place with seeded noise; norm weights become noise around 1."""
    weight = next(module.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    quantized = {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}
    for name, parameter in module.named_parameters():
        linear = quantized.get(name.rpartition(".")[0])
        if linear is not None:
            if name.endswith("values"):
                noise = torch.empty(linear.outputs, linear.inputs, device=weight.device, dtype=weight.dtype)
                if noise.is_cpu:  # input-major, as a matrix that is not quantised
                    noise = noise.view(linear.inputs, linear.outputs).t()
                linear.fill(slice(None), noise.normal_(generator=generator).mul_(linear.inputs**-0.5))
                linear.pack()
            continue
        parameter.normal_(generator=generator)
        if parameter.ndim == 1 or "norm" in name:
            parameter.mul_(0.1).add_(float(name.endswith("weight")))
        elif "embedding" not in name:
            parameter.mul_(parameter.shape[1] ** -0.5)
