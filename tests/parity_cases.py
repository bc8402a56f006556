"""Checkpoints loaded on the CPU, and their logits along a given token sequence, as the decoding loop computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underdraw.layout import Layout
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.family import LoadedModel, Placement
from underdraw.models.loading import load_model
from underdraw.protocols import Prompt
from underdraw.tree import chain

CPU = Placement(torch.device("cpu"), torch.float32)
FIXTURES = {  # small checkpoints of tests/parity/conftest.py, and their families
    "anole": "anole",
    "lumina": "lumina",
    "t2i": "llamagen",
    "c2i": "llamagen",
    "converted": "llamagen",
    "janus": "janus",
    "emu3": "emu3",
    "glm_image": "glm_image",
    "simplear": "simplear",
    "lumina2": "lumina2",
}


@dataclass(frozen=True)
class ParityCase:
    """A checkpoint on disk, the reference it was written from, and the model that underdraw loads from it."""

    path: Path
    reference: Any  # a state dict, or a model of transformers
    model: LoadedModel


ReferenceLogits = Callable[[Any, tuple[int, ...], Tensor], Tensor]
"""(model of transformers, prompt row, codes (N,)) -> (N + 1, K)."""


def load(path: Path) -> LoadedModel:
    return load_model(open_checkpoint(path), CPU)


def compare_guided_logits(
    case: ParityCase, text: str, codes: Tensor, scale: float, logits: ReferenceLogits
) -> tuple[Tensor, Tensor, Tensor]:
    """Our guided logits along codes (N,), and the reference's of the conditional and the unconditional row."""
    model, size = case.model, case.model.sizes[0]
    layout, prompt = model.make_layout(size), model.make_prompt(text, None, size)
    ours = chain_logits(model, prompt, layout, codes + layout.codes.start, scale)
    assert isinstance(prompt.condition, tuple) and isinstance(prompt.unconditional, tuple)
    cond, uncond = (logits(case.reference, row, codes) for row in (prompt.condition, prompt.unconditional))
    return ours, cond, uncond


def chain_logits(model: LoadedModel, prompt: Prompt, layout: Layout, tokens: Tensor, guidance: float = 1.0) -> Tensor:
    """Logits of the first cell and of the token after each of `tokens` (N,), which start there: (N + 1, K)."""
    session = model.target.open([prompt], layout, guidance=guidance)
    output = session.forward(chain(tokens[None]), torch.tensor([layout.start]))
    return torch.cat([session.prefill.logits[0], output.logits[0]])
