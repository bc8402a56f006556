"""Models in transformers' classes whose images mostly repeat the row above, so that drafts can be right or wrong.

With purely random weights every greedy choice depends on every token before, so no draft is ever right; image models
are not like that. Here all weights are random too, but one head of the first layer looks at the cell above, the other
sub-layers are scaled down (the noise), and the LM head is fitted by ridge regression to made-up grids. So a greedy
image follows the grids' rule, except where the random layers overturn it. No training is needed at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

COLOURS = 32  # codes that occur in grids; codebooks have more
TEXTURE = 8  # after one of the first codes comes `successor`, whatever is above
DEVIATIONS = 0.04  # share of cells in the grids that follow no rule
# Dimension 0 of every embedding is a constant, from which queries and keys that ignore content are made. It is so much
# larger than the others that the norm of a state hardly depends on its content; norms scale the others up again.
CONSTANT = 10.0  # times the square root of the width
SHARPNESS = 12.0  # how much larger the score of the cell above is than those of its neighbours
RIDGE = 1e-2
TIE_BREAK = 0.25  # share of the successor in regression targets: what to draw in the first row, which has none above
BATCH = 16  # grids at a time
SEARCH_STEPS, TOLERANCE = 6, 0.02  # of the accuracy
NOISE_RANGE = (1 / 64, 4.0)
HEAD_SCALE = 12.0  # regression targets are 0 and 1; logits are larger

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, its codebook and its grid."""

    width: int
    mlp: int
    layers: int
    heads: int
    side: int
    codes: int = 64
    words: int = 320  # text tokens
    kv_heads: int | None = None  # None: as many as heads


def successor(codes: Tensor) -> Tensor:
    return (5 * codes + 3) % COLOURS


def make_grids(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Random grids (B, side, side): a cell repeats the one above, or follows its left one after a texture code."""
    grids = torch.randint(COLOURS, (count, side * side), generator=generator)  # the first row stays random
    for cell in range(side, side * side):
        left, above = grids[:, cell - 1], grids[:, cell - side]
        code = torch.where(left < TEXTURE, successor(left), above)
        deviates = torch.rand(count, generator=generator) < DEVIATIONS
        grids[:, cell] = torch.where(deviates, grids[:, cell], code)
    return grids.view(count, side, side)


@dataclass(frozen=True)
class GridModel:
    """A model of transformers, and how it is asked for an image of side x side codes."""

    model: Any
    side: int
    prompt: Tokens
    layers: Any  # of the decoder
    features: Callable[[Tensor, Tokens], Tensor]  # (B, N) codes after a prompt -> (B, N, D) inputs of the LM head
    head: Any  # the last linear layer
    first_code: int  # row of code 0 in the head
    tokens: int  # of an image, as transformers' loop draws it
    plain_options: Callable[[], dict[str, Any]]  # arguments of transformers' own loop
    guidance: float = 1.0
    negative: Tokens = ()  # prompt of guidance
    options: dict[str, Any] = field(default_factory=dict)  # arguments of both loops
    custom_options: dict[str, Any] = field(default_factory=dict)  # arguments of `custom_generate`
    returns_prompt: bool = False  # before the image

    def inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([self.prompt], device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def draw_plain(self, **sampling: Any) -> Tensor:
        """The image's tokens from transformers' own loop (N,)."""
        ids = self.model.generate(**self.inputs(), **self.options, **self.plain_options(), **sampling)[0]
        return ids[len(self.prompt) :] if self.returns_prompt else ids

    def draw(self, **arguments: Any) -> tuple[Tensor, int]:
        """The image's tokens from `custom_generate` (N,), and the number of its passes."""
        from underdraw.integrations.transformers import custom_generate

        arguments |= {**self.options, **self.custom_options, "return_dict_in_generate": True, "max_new_tokens": 1}
        out = self.model.generate(**self.inputs(), custom_generate=custom_generate, **arguments)
        return out.sequences[0][len(self.prompt) if self.returns_prompt else 0 :][: self.tokens], out.passes[0]

    @torch.no_grad()
    def scale_noise(self, factor: float) -> None:
        """Scale what all sub-layers but the head that looks above add to the residual."""
        for index, layer in enumerate(self.layers):
            first = layer.self_attn.head_dim if index == 0 else 0
            layer.self_attn.o_proj.weight[:, first:] *= factor
            layer.mlp.down_proj.weight *= factor
            if hasattr(layer, "post_mlp_layernorm"):  # norms of what is added, which undo the scale before them
                layer.post_mlp_layernorm.weight *= factor
                layer.post_self_attn_layernorm.weight *= factor if index else 1.0

    def calibrate(self, accuracy: float, cells: int, fixed: float | None = None) -> tuple[float, float]:
        """Search for the noise with which the model predicts `accuracy` of the cells; returns (noise, accuracy).

        `fixed` is taken instead of a search.
        """
        (low, high), noise, reached = NOISE_RANGE if fixed is None else (fixed, fixed), 1.0, 0.0
        precision = torch.get_float32_matmul_precision()
        if self.model.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32: fits need no more
        for _ in range(SEARCH_STEPS):
            middle = (low * high) ** 0.5
            self.scale_noise(middle / noise)
            noise, reached = middle, self.fit_head(cells)
            if fixed is not None or abs(reached - accuracy) < TOLERANCE:
                break
            low, high = (middle, high) if reached > accuracy else (low, middle)
        torch.set_float32_matmul_precision(precision)
        return noise, reached

    @torch.no_grad()
    def fit_head(self, cells: int) -> float:
        """Set the LM head to predict grids as well as a linear map can; returns the guided accuracy on others."""
        generator, device = torch.Generator().manual_seed(0), self.model.device
        count = -(-cells // self.side**2)
        grids = make_grids(count + BATCH, self.side, generator).flatten(1).to(device)
        gram: Any = 0.0
        product: Any = 0.0
        for part in grids[:count].split(BATCH):
            features = functional.pad(
                self.features(part, self.prompt).float().flatten(0, 1), (0, 1), value=1.0
            )  # and the bias
            follower = successor(functional.pad(part[:, :-1], (1, 0)))  # of the cell to the left
            targets = functional.one_hot(part, COLOURS) + TIE_BREAK * functional.one_hot(follower, COLOURS)
            targets = targets.float().flatten(0, 1) - 1 / COLOURS
            gram, product = gram + features.T @ features, product + features.T @ targets
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        weight = HEAD_SCALE * torch.linalg.solve(gram, product).T  # (COLOURS, D + 1)
        rows = slice(self.first_code, self.first_code + COLOURS)
        self.head.weight.zero_()
        if self.head.bias is None:  # dimension 0 of the states is 1
            self.head.weight[:, 0] = -HEAD_SCALE  # of codes that do not occur
            self.head.weight[rows] = weight[:, :-1]
            self.head.weight[rows, 0] += weight[:, -1].to(self.head.weight)
        else:
            self.head.bias.fill_(-HEAD_SCALE)
            self.head.weight[rows], self.head.bias[rows] = weight[:, :-1], weight[:, -1]
        return float((self.predict(grids[count:])[..., rows].argmax(-1) == grids[count:]).float().mean())

    def predict(self, codes: Tensor) -> Tensor:
        """Guided logits (B, N, V) of each code, after those before it."""
        logits = self.head(self.features(codes, self.prompt))
        if not self.negative:
            return logits
        unconditional = self.head(self.features(codes, self.negative))
        return unconditional + self.guidance * (logits - unconditional)


@torch.no_grad()
def randomise(module: Any, generator: torch.Generator) -> None:
    """Random weights that keep the scale of their inputs; biases are 0, and norms are set later, but for QK norms."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 and "_norm." not in name:
            parameter.normal_(generator=generator).mul_(parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(float("_norm.weight" in name))


@torch.no_grad()
def set_norm(norm: Any, constant: float) -> None:
    """Set an RMS norm to give content the scale that it has in the residual, and dimension 0 the value `constant`."""
    norm.weight.fill_(CONSTANT)
    norm.weight[0] = constant * norm.weight.numel() ** -0.5


@dataclass(frozen=True)
class Axis:
    """Frequencies of the rotary positions on one axis, and how far back the cell above the next one is on it."""

    frequencies: Tensor
    distance: int
    sharpness: float = SHARPNESS

    def amplitude(self, head_width: int) -> Tensor:
        """Of query and key at each frequency, for the score of a neighbour to be lower by `sharpness`."""
        gap = float((1 - self.frequencies.cos()).sum())  # with amplitude 1
        return torch.full_like(self.frequencies, (self.sharpness * head_width**0.5 / gap) ** 0.5)


def raster_axis(distance: int, head_width: int, theta: float) -> Axis:
    return Axis(theta ** (-torch.arange(0, head_width, 2) / head_width), distance)


def score_vectors(axes: Sequence[Axis], head_width: int) -> tuple[Tensor, Tensor]:
    """Query and key (head_width,) whose score is largest at the distances of all axes."""
    angles = torch.cat([axis.distance * axis.frequencies for axis in axes])
    amplitude = torch.cat([axis.amplitude(head_width) for axis in axes])
    query = torch.cat([amplitude, torch.zeros_like(amplitude)])
    key = torch.cat([amplitude * angles.cos(), amplitude * angles.sin()])
    unrotated = head_width - len(query)
    return functional.pad(query, (0, unrotated)), functional.pad(key, (0, unrotated))


@torch.no_grad()
def look_above(layers: Any, axes: Sequence[Axis]) -> None:
    """Make the first head of the first layer copy the token above the next cell."""
    for layer in layers:
        set_norm(layer.input_layernorm, 1.0)
        set_norm(layer.post_attention_layernorm, 0.0)
        layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0, 0  # dimension 0 stays constant
        if hasattr(layer, "post_mlp_layernorm"):
            layer.post_self_attn_layernorm.weight.fill_(1.0)
            layer.post_mlp_layernorm.weight.fill_(1.0)
    attention = layers[0].self_attn
    width = attention.head_dim
    query, key = (vector.to(attention.q_proj.weight.device) for vector in score_vectors(axes, width))
    if hasattr(attention, "q_norm"):  # its biases are what does not depend on content
        for norm, vector in ((attention.q_norm, query), (attention.k_norm, key)):
            norm.weight[0], norm.bias[0] = 0, vector
    else:
        for matrix, vector in ((attention.q_proj.weight, query), (attention.k_proj.weight, key)):
            matrix[:width] = 0
            matrix[:width, 0] = vector
    attention.o_proj.weight[1:, :width] *= (attention.o_proj.weight.shape[1] / width) ** 0.5
