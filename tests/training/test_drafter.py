"""Training sees what drafting sees: the logits that a loss compares are those that a session gives along its path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import pytest
import torch
import toy_models
from commands import call
from torch import Tensor

from underdraw import Pipeline
from underdraw.drafters.trained import load_drafter
from underdraw.errors import CheckpointError
from underdraw.layout import Layout
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.loading import load_model, resolve_placement
from underdraw.nn.weights import load_weights
from underdraw.policies.fixed import Chain
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.training.losses import BlockLoss, EagleLoss, distance
from underdraw.training.samples import Samples, kept_features, prompts_of, raster_of
from underdraw.training.teacher import Teacher
from underdraw.tree import DraftTree, Frontier

GUIDANCE = 2.0


@dataclass
class Watched:
    """A drafter that notes the logits it gives to each level of the trees it grows."""

    proposes: ClassVar[str] = "tree"

    drafter: Any
    seen: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # steps of the roots, logits by level

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> WatchedSession:
        return WatchedSession(self, self.drafter.open(prompts, layout, prefill, guidance=guidance))


class WatchedSession:
    def __init__(self, watch: Watched, session: Any) -> None:
        self.session = session
        make_expand_fn = session.make_expand_fn

        def watched(request: DraftRequest) -> Any:
            expand, levels = make_expand_fn(request), []
            watch.seen.append((request.steps.clone(), levels))

            def noted(level: Frontier) -> Tensor:
                levels.append(expand(level))
                return levels[-1]

            return noted

        session.make_expand_fn = watched

    def draft(self, request: DraftRequest) -> DraftTree:
        return self.session.draft(request)

    def commit(self, verified: VerifiedStep) -> None:
        self.session.commit(verified)


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("kind", ["eagle", "eagle, two layers", "block"])
@torch.no_grad()
def test_a_loss_compares_what_a_session_gives(kind: str, layout: Layout) -> None:
    torch.set_num_threads(1)
    of = toy_models.target()
    drafter: Any = (
        toy_models.block(of) if kind == "block" else toy_models.eagle(of, above=True, layers=1 + ("two" in kind))
    )
    watch = Watched(drafter)
    rows, depth = toy_models.prompts(4), 4
    tokens, _, steps = toy_models.run_decode(
        of, watch, Chain(depth), layout=layout, seeds=(3, 4, 5, 6), guidance=GUIDANCE, temperature=0.5, rows=rows
    )
    lesson = Teacher(of, layout).lesson(rows, tokens)
    net = drafter.net
    loss: Any = BlockLoss(net, of.net) if kind == "block" else EagleLoss(net, of.net, depth)
    compared = 0
    for roots, levels in watch.seen:
        draft, _, valid = loss.ahead(lesson, roots[:, None].clamp(max=layout.stop - 2), torch.tensor(GUIDANCE))
        for image, root in enumerate(roots.tolist()):
            step = next((s for s in steps if s.sequence == image and s.start == root), None)
            for level in range(min(len(levels), (step.accepted if step else -1) + 1)):
                if not valid[image, 0, level]:
                    continue
                torch.testing.assert_close(levels[level][image, 0], draft[image, 0, level], rtol=1e-4, atol=1e-4)
                compared += level > 0
    assert compared > 3


@torch.no_grad()
def test_a_lesson_knows_the_targets_own_distribution() -> None:
    """The teacher's logits at a step are those that the target itself chose the token from."""
    torch.set_num_threads(1)
    of, rows = toy_models.target(), toy_models.prompts(2)
    tokens = toy_models.plain_tokens(of, seeds=(3, 4), guidance=GUIDANCE, temperature=0.0, rows=rows)
    lesson = Teacher(of, toy_models.PLAIN).lesson(rows, tokens)
    steps = torch.arange(toy_models.PLAIN.start, toy_models.PLAIN.stop).expand(2, -1)
    chosen = lesson.logits(of.net, steps, torch.tensor(GUIDANCE)).argmax(-1)
    assert torch.equal(toy_models.PLAIN.token_ids(chosen), tokens[:, toy_models.PLAIN.start : toy_models.PLAIN.stop])


def test_distance_is_least_for_the_target_itself() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    own = distance(logits, logits)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(own, entropy)
    assert (distance(logits.roll(1, -1), logits) > own).all()


@pytest.fixture(scope="module")
def samples(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures that the small model drew, six shards of two."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "prompts.txt").write_text("a red fox\na blue fox\na fox\nred\nblue\nfox fox\n")
    options = ["--model", str(small_model), "--prompts", str(folder / "prompts.txt"), "--count", "12", "--batch", "2"]
    assert call("train", "samples", *options, "--out", folder / "samples").code == 0
    return folder / "samples"


def options_of(small_model: Path, samples: Path, out: Path, kind: str) -> list[str]:
    return [
        "train", "drafter", "--model", str(small_model), "--samples", str(samples), "--out", str(out), "--kind", kind,
        "--batch", "4", "--accumulate", "2", "--depth", "3", "--layers", "1", "--ffn", "32", "--roots", "8",
        "--held-out", "1", "--measured", "2", "--learning-rate", "0.01", "--report-every", "0.5", "--device", "cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_training_a_drafter_learns_stops_and_goes_on(
    kind: str, small_model: Path, samples: Path, tmp_path: Path
) -> None:
    """A drafter gets closer to its target, goes on where it stopped, has a card, and a pipeline loads it."""
    out = tmp_path / "drafter"
    options = options_of(small_model, samples, out, kind)
    losses, steps = [], []
    for pause in ("0.3", "1.5", "3", "3.3"):
        if pause == "3.3":
            (out / "state.pt").unlink()  # only the weights are left
        assert call(*options, "--seconds", "3.3", "--pause", pause).code == 0
        card = (out / "README.md").read_text()
        losses.append(float(re.search(r"loss ([\d.]+) nats", card)[1]))  # type: ignore[index]
        steps.append(load_weights(out)[1]["progress"]["steps"])
    assert losses[0] > losses[2] and losses[0] > losses[3]
    assert 0 < steps[0] < steps[1] < steps[2]
    assert (
        ("An EAGLE drafter" if kind == "eagle" else "A block drafter") in card
        and "Tokens per target pass" in card
        and "| 3 |" in card
    )
    pipe = Pipeline.from_pretrained(small_model, drafter=str(out), tree="confidence:nodes=12,depth=3,top_k=4")
    drawn = pipe("a red fox", seed=3, temperature=1.0, output_type="codes")
    assert torch.equal(drawn.images, pipe.plain()("a red fox", seed=3, temperature=1.0, output_type="codes").images)
    assert drawn.stats.tokens_per_pass > 1.2  # an untrained one gets 1.0


def test_kept_features_are_what_the_target_would_give(small_model: Path, samples: Path, tmp_path: Path) -> None:
    kept = tmp_path / "samples"
    shutil.copytree(samples, kept)
    options = options_of(small_model, kept, tmp_path / "drafter", "block")
    assert call(*options, "--seconds", "0.2", "--keep-features").code == 0
    own, model = Samples.load(kept), load_model(open_checkpoint(small_model), resolve_placement("cpu", "auto"))
    teacher = Teacher(model.target, model.make_layout(model.sizes[0]))
    rows = kept_features(own, 1, torch.device("cpu"))
    assert rows is not None
    now = teacher.rows(prompts_of(model, own.texts[2:4]), own.tokens[2:4])
    torch.testing.assert_close(rows.behind, now.behind)
    torch.testing.assert_close(rows.before, now.before)


def test_a_drafter_for_another_target_is_refused(small_model: Path, samples: Path, tmp_path: Path) -> None:
    assert call(*options_of(small_model, samples, tmp_path / "drafter", "block"), "--seconds", "0.1").code == 0
    of = toy_models.target()
    with pytest.raises(CheckpointError, match="was trained for a target"):
        load_drafter(tmp_path / "drafter", of)


def test_pictures_become_samples(small_model: Path, tmp_path: Path) -> None:
    """What `generate` wrote is encoded again; the codes are those that the image tokenizer gives."""
    (tmp_path / "prompts.txt").write_text("a red fox\na fox\n")
    drawn = ["generate", "--model", str(small_model), "--prompts", str(tmp_path / "prompts.txt"), "--tree", "none"]
    assert call(*drawn, "-o", tmp_path / "pictures").code == 0
    options = ["--model", str(small_model), "--images", str(tmp_path / "pictures"), "--out", str(tmp_path / "samples")]
    assert call("train", "samples", *options).code == 0
    own, model = (
        Samples.load(tmp_path / "samples"),
        load_model(open_checkpoint(small_model), resolve_placement("cpu", "auto")),
    )
    assert own.texts == ("a red fox", "a fox")
    layout = model.make_layout(model.sizes[0])
    first = np.asarray(PIL.Image.open(sorted((tmp_path / "pictures").glob("*.png"))[0]), dtype=np.float32)
    pixels = torch.from_numpy(first / 127.5 - 1).permute(2, 0, 1)[None]
    assert torch.equal(layout.grid(own.tokens[:1]), model.image_tokenizer.encode(pixels))


def test_rasters_are_the_inverse_of_grids() -> None:
    codes = torch.randint(0, len(toy_models.ROW_ENDS.codes), (3, toy_models.ROW_ENDS.height, toy_models.ROW_ENDS.width))
    assert torch.equal(toy_models.ROW_ENDS.grid(raster_of(toy_models.ROW_ENDS, codes)), codes)


def test_two_processes_train_one_drafter(small_model: Path, samples: Path, tmp_path: Path) -> None:
    """Through accelerate, on two CPU processes: both take the same steps, one writes."""
    options = options_of(small_model, samples, tmp_path / "drafter", "block")[2:]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    command = [*launch, "-m", "underdraw.training.drafter", *options, "--seconds", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert load_weights(tmp_path / "drafter")[1]["progress"]["steps"] > 1
