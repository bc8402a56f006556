"""`underdraw train drafter`: it learns, resumes, keeps held-out samples out of training, and runs in many processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_models
from commands import call
from torch import Tensor

from underdraw import Pipeline
from underdraw.drafters.trained import load_drafter
from underdraw.errors import CheckpointError
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.loading import load_model, resolve_placement
from underdraw.nn.weights import load_weights
from underdraw.training.batches import DrafterBatch, FeatureExtractor, read_features
from underdraw.training.losses import BlockLoss
from underdraw.training.samples import Samples, encode_prompts
from underdraw.training.trainer import load_state


def options_for(small_model: Path, samples: Path, out: Path, kind: str = "block") -> list[str]:
    return [
        "train", "drafter", "--model", str(small_model), "--samples", str(samples), "--out", str(out), "--kind", kind,
        "--batch", "4", "--accumulate", "2", "--depth", "3", "--layers", "1", "--ffn", "32", "--roots", "8",
        "--held-out", "1", "--evaluate-images", "2", "--learning-rate", "0.01", "--report-every", "0.5",
        "--device", "cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_training_learns_pauses_and_resumes(kind: str, small_model: Path, samples: Path, tmp_path: Path) -> None:
    """A drafter gets closer to its target, continues where it stopped, has a card, and a pipeline loads it."""
    out = tmp_path / "drafter"
    options = options_for(small_model, samples, out, kind)
    losses, steps = [], []
    for pause in ("0.3", "1.5", "3", "4"):
        if pause == "4":
            (out / "state.pt").unlink()  # only the weights are left
        done = call(*options, "--seconds", "4", "--pause", pause, "--evaluate-every", "1")
        assert done.code == 0 and f"{out}: loss " in done.out
        card = (out / "README.md").read_text()
        losses.append(float(re.search(r"loss ([\d.]+) nats", card)[1]))  # type: ignore[index]
        steps.append(load_weights(out)[1]["progress"]["steps"])
    assert losses[0] > losses[2] and losses[0] > losses[3]
    assert 0 < steps[0] < steps[1] < steps[2] < steps[3]
    assert ("An EAGLE drafter" if kind == "eagle" else "A block drafter") in card
    assert "Tokens per target pass" in card and "| 3 |" in card
    pipe = Pipeline.from_pretrained(small_model, drafter=str(out), tree="confidence:nodes=12,depth=3,top_k=4")
    fast = pipe("a red fox", seed=3, temperature=1.0, output_type="codes")
    assert torch.equal(fast.images, pipe.plain()("a red fox", seed=3, temperature=1.0, output_type="codes").images)
    assert fast.stats.tokens_per_pass > 1.2  # an untrained one gets 1.0


def test_cached_features_equal_those_of_the_target(small_model: Path, samples: Path, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    shutil.copytree(samples, folder)
    options = options_for(small_model, folder, tmp_path / "drafter")
    assert call(*options, "--seconds", "0.2", "--keep-features").code == 0
    everything = Samples.load(folder)
    model = load_model(open_checkpoint(small_model), resolve_placement("cpu", "auto"))
    cached = read_features(folder, 1, torch.device("cpu"))
    assert cached is not None
    prompts = encode_prompts(model, everything.texts[2:4])
    computed = FeatureExtractor.for_model(model).features(prompts, everything.tokens[2:4])
    for name in ("image", "prompt", "prompt_tokens", "lengths", "offset"):
        torch.testing.assert_close(getattr(cached, name), getattr(computed, name))


@pytest.mark.parametrize("more", [[], ["--keep-features"]], ids=["computed", "cached"])
def test_held_out_samples_are_never_trained_on(
    more: list[str], small_model: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches hold all training samples, with their features, and none of the held-out texts."""
    folder = tmp_path / "samples"
    shutil.copytree(samples, folder)
    model = load_model(open_checkpoint(small_model), resolve_placement("cpu", "auto"))
    extractor, everything = FeatureExtractor.for_model(model), Samples.load(folder)
    forward, trained = BlockLoss.forward, set()

    def record(self: BlockLoss, batch: DrafterBatch, *more: Tensor) -> tuple[Tensor, Tensor]:
        for row in range(len(batch.images)):
            sample = (everything.tokens == batch.images[row]).all(1).nonzero().item()
            if sample not in trained:
                trained.add(sample)
                prompts = encode_prompts(model, everything.texts[sample : sample + 1])
                alone = extractor.batch(prompts, batch.images[row : row + 1])
                torch.testing.assert_close(batch.features[row], alone.features[0], rtol=1e-4, atol=1e-4)
        return forward(self, batch, *more)

    monkeypatch.setattr(BlockLoss, "forward", record)
    options = options_for(small_model, folder, tmp_path / "drafter")
    options[options.index("--held-out") + 1] = "3"
    assert call(*options, "--seconds", "1", *more).code == 0
    training, evaluation = everything.split(3)
    assert trained == set(training.rows.tolist()) and len(evaluation) == 6


def test_too_few_texts_name_the_option(small_model: Path, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    done = call("train", "drafter", "--model", small_model, "--samples", samples, "--out", out)
    assert done.code == 2 and done.err.count("\n") == 1 and not out.exists()
    assert "6 different texts" in done.err and "--held-out 64" in done.err and "--held-out 1 to 5" in done.err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seconds", "0"), ("--seconds", "nan"), ("--learning-rate", "-1"), ("--batch", "0"), ("--depth", "0"),
     ("--held-out", "0"), ("--kind", "medusa"), ("--evaluate-every", "0"), ("--samples", "missing"),
     ("--secnds", "3")],
)  # fmt: skip
def test_bad_option_prints_one_line_and_writes_nothing(
    option: str, value: str, small_model: Path, samples: Path, tmp_path: Path
) -> None:
    done = call(*options_for(small_model, samples, tmp_path / "drafter"), option, value)
    assert done.code == 2 and done.err.count("\n") == 1 and not (tmp_path / "drafter").exists()
    assert option in done.err or value in done.err


def test_drafter_for_another_target_is_refused(small_model: Path, samples: Path, tmp_path: Path) -> None:
    assert call(*options_for(small_model, samples, tmp_path / "drafter"), "--seconds", "0.1").code == 0
    with pytest.raises(CheckpointError, match="was trained for a target"):
        load_drafter(tmp_path / "drafter", toy_models.target())


def test_other_sizes_in_the_same_folder_are_refused(small_model: Path, samples: Path, tmp_path: Path) -> None:
    options = options_for(small_model, samples, tmp_path / "drafter")
    assert call(*options, "--seconds", "0.1").code == 0
    for state in (True, False):
        if not state:
            (tmp_path / "drafter" / "state.pt").unlink()
        done = call(*options, "--seconds", "1", "--ffn", "48")
        assert done.code == 2 and "other options" in done.err and done.err.count("\n") == 1


def test_damaged_state_is_named(small_model: Path, samples: Path, tmp_path: Path) -> None:
    options = options_for(small_model, samples, tmp_path / "drafter")
    assert call(*options, "--seconds", "0.1").code == 0
    path = tmp_path / "drafter" / "state.pt"
    assert load_state(path.parent) is not None
    path.write_bytes(path.read_bytes()[:1000])
    done = call(*options, "--seconds", "1")
    assert done.code == 2 and "state.pt is damaged" in done.err


def test_two_processes_train_one_drafter(small_model: Path, samples: Path, tmp_path: Path) -> None:
    """Through accelerate, on two CPU processes: both take the same steps, one writes; a second run continues."""
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
    command = [*launch, "-m", "underdraw", *options_for(small_model, samples, tmp_path / "drafter")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    steps = []
    for seconds in ("1", "2"):
        done = subprocess.run(
            [*command, "--seconds", seconds], capture_output=True, text=True, timeout=200, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("details in README.md") == 1
        steps.append(load_weights(tmp_path / "drafter")[1]["progress"]["steps"])
    assert 1 < steps[0] < steps[1]
