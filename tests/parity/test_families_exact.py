"""Every family decodes the same tokens with and without drafting, with its prompts, guidance and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_writers
import pytest
import torch
import toy_models
from parity_cases import ParityCase

from underdraw.drafters.eagle import Eagle
from underdraw.drafters.trained import SHARED_WEIGHTS, build_net
from underdraw.models.loading import load_drafter_files
from underdraw.pipeline import Pipeline

FAMILIES = ("anole", "lumina", "t2i", "c2i", "converted", "janus", "emu3", "glm_image", "simplear", "lumina2")
HEADS = {"anole": ("anole", 4), "lumina": ("anole", 1), "t2i": ("llamagen", 0), "converted": ("llamagen", 0)}
PROMPTS = {"c2i": ["goldfish", "3"]}
SIZES = {"glm_image": {"height": 96, "width": 128}, "lumina2": {"height": 32, "width": 64}}


def random_drafter(name: str, case: ParityCase, folder: Path) -> Any:
    """A LANTERN head with random weights where the family has one, else a random EAGLE drafter of our format."""
    if name in HEADS:
        kind, rows = HEADS[name]
        checkpoint_writers.write_drafter(folder, kind, rows=rows)
        return load_drafter_files(folder, case.model)
    net = build_net(case.model.target, "eagle", {"layers": 1, "ffn": 64, "above": False})
    for parameter_name, parameter in net.named_parameters():
        if not parameter_name.startswith(SHARED_WEIGHTS):
            torch.nn.init.constant_(parameter, float("norm" in parameter_name))
    toy_models.randomise(net.fc, 1)
    toy_models.randomise(net.body.blocks, 1)
    return Eagle(net.eval().requires_grad_(False), image_offset=case.model.target.image_offset)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_same_seed_same_image(request: pytest.FixtureRequest, tmp_path: Path, name: str, temperature: float) -> None:
    """Two prompts of different lengths in one batch, guidance on, against plain autoregression."""
    case: ParityCase = request.getfixturevalue(name)
    prompts = PROMPTS.get(name, ["a red fox on the blue ice", "snow"])

    def codes(**parts: Any) -> torch.Tensor:
        pipe = Pipeline(case.model, **parts)
        out = pipe(prompts, seed=[3, 9], temperature=temperature, output_type="codes", **SIZES.get(name, {}))
        assert out.complete
        return out.images

    plain = codes(drafter="jacobi", tree="none")
    head = random_drafter(name, case, tmp_path)
    assert torch.equal(codes(drafter=head, tree="confidence:nodes=12,depth=4,top_k=3"), plain)
    assert torch.equal(codes(drafter=head, tree="adjacency:nodes=16"), plain)
    assert torch.equal(codes(drafter="jacobi", tree="chain:depth=5"), plain)
    assert torch.equal(codes(drafter="jacobi-tree", tree="trunk:nodes=24"), plain)
    assert plain[0].unique().numel() > 2  # an image of one code would prove little


def test_janus_head_is_row_invariant(janus: ParityCase) -> None:
    """The head with a hidden layer gives a row the same bits alone and among others."""
    net = janus.model.target.net
    features = torch.randn(1, 67, net.arch.dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = net.logits(features)
        alone = torch.cat([net.logits(features[:, index : index + 1]) for index in range(67)], 1)
    assert torch.equal(together, alone)


def test_every_family_has_a_parity_case() -> None:
    from underdraw.registry import families

    assert {*families.names()} - {"tiny"} == {
        "anole",
        "lumina",
        "llamagen",
        "janus",
        "emu3",
        "glm_image",
        "simplear",
        "lumina2",
    }
