"""A model of your own in the pipeline: `python examples/custom_family.py` draws a random mosaic into mosaic.png.

A family turns a checkpoint into a `LoadedModel`: a decoder, a layout, a way from words to tokens, and an image
tokenizer. Put it under the entry point group `underdraw.family` of your package, and `--model FOLDER` finds it.
"""

import torch

from underdraw import Pipeline
from underdraw.layout import Layout
from underdraw.models.family import ImageSize, LoadedModel, SamplingDefaults
from underdraw.nn.rope import Rope
from underdraw.nn.row_invariant import input_major
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import Prompt

CODES = range(256, 256 + 64)  # after the 256 bytes of a prompt come 64 colours


class Palette:
    """The smallest image tokenizer: a code is a colour, 8 x 8 pixels of it."""

    downsample = 8
    codebook = torch.cartesian_prod(*[torch.linspace(-1, 1, 4)] * 3)  # (64, 3)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:  # (B, H, W) -> (B, 3, 8 H, 8 W) in [-1, 1]
        return self.codebook[codes].permute(0, 3, 1, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)


torch.manual_seed(0)
net = Transformer(Arch(64, 2, 4, 128, CODES.stop, Rope.one_axis(16), outputs=CODES)).eval()
input_major(net)
model = LoadedModel(
    "mosaic", "mine", DecoderTarget(net), Palette(), SamplingDefaults(guidance=1.0), (ImageSize(64, 64),),
    make_layout=lambda size: Layout(8, 8, CODES), make_prompt=lambda words, negative, size: Prompt(tuple(words.encode())),
)  # fmt: skip
out = Pipeline(model, drafter="jacobi", tree="chain:depth=4")("a red fox", seed=7)
out.images[0].save("mosaic.png")
