"""Run your own model in the pipeline: `python examples/custom_family.py` writes a random mosaic to mosaic.png.

The pipeline needs a `LoadedModel`: a decoder, an image tokenizer, a token layout, and a function from text to prompt
tokens. docs/models.md shows how to make it a family that `--model FOLDER` loads from a checkpoint.
"""

import torch

from underdraw import Pipeline
from underdraw.layout import Layout
from underdraw.models.family import ImageSize, LoadedModel, SamplingDefaults
from underdraw.nn.linear import pack_weights
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import Prompt

CODES = range(256, 256 + 64)  # vocabulary: the 256 byte values of a prompt, then 64 colours


class PaletteTokenizer:
    """The smallest image tokenizer: every code is a colour and fills 8 x 8 pixels."""

    downsample = 8
    codebook = torch.cartesian_prod(*[torch.linspace(-1, 1, 4)] * 3)  # (64, 3)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:  # (B, H, W) -> (B, 3, 8 H, 8 W) in [-1, 1]
        return self.codebook[codes].permute(0, 3, 1, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)


torch.manual_seed(0)
net = Transformer(Arch(64, 2, 4, 128, CODES.stop, Rope.one_axis(16), outputs=CODES)).eval()
pack_weights(net)  # the layout that makes GEMMs row-invariant on a CPU
model = LoadedModel(
    family="mosaic",
    name="my-mosaic",
    target=DecoderTarget(net),
    image_tokenizer=PaletteTokenizer(),
    defaults=SamplingDefaults(guidance=1.0),
    sizes=(ImageSize(64, 64),),
    make_layout=lambda size: Layout(size.height // 8, size.width // 8, CODES),
    make_prompt=lambda text, negative, size: Prompt(tuple(text.encode())),
)
out = Pipeline(model, drafter="jacobi", tree="chain:depth=4")("a red fox", seed=7)
out.images[0].save("mosaic.png")
