"""Progress bars of huggingface_hub and transformers are hidden by --json, --quiet and a disabled bar in Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoint_writers
import pytest
from commands import call
from fake_hub import FakeHub

from underdraw.distributed.planned_images import WorkerOptions
from underdraw.distributed.worker import ImageWorker
from underdraw.models.progress_bars import hidden_progress_bars, library_progress_bars
from underdraw.pipeline import Pipeline

LLAMAGEN, DRAFTER = "jadohu/LlamaGen-T2I", "jadohu/llamagen_drafter"
FILES = {LLAMAGEN: "LlamaGen-T2I", "google/flan-t5-xl": "t5/flan-t5-xl", DRAFTER: "drafter"}


@pytest.fixture
def llamagen_hub(fake_hub: FakeHub, tmp_path: Path) -> FakeHub:
    """LlamaGen with a text encoder, which transformers loads, and a drafter."""
    published = tmp_path / "published"
    checkpoint_writers.write_llamagen_converted(published / "LlamaGen-T2I")
    checkpoint_writers.write_drafter(published / "drafter", "llamagen")
    for repository, folder in FILES.items():
        fake_hub.add(repository, published / folder)
    fake_hub.files["peizesun/llamagen_t2i"] = {"vq_ds16_t2i.pt": published / "vq_ds16_t2i.pt"}
    return fake_hub


@pytest.fixture(autouse=True)
def _bars_stay_enabled() -> Iterator[None]:
    """What is hidden for a command or a pipeline is shown again afterwards."""
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    transformers.utils.logging.enable_progress_bar()
    yield
    assert transformers.utils.logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    enable_progress_bars()


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_commands_without_progress_hide_the_bars_of_libraries(
    llamagen_hub: FakeHub, tmp_path: Path, option: str
) -> None:
    done = call("generate", "a red fox", "--model", LLAMAGEN, "--drafter", DRAFTER, "-o", tmp_path / "a.png", option)
    assert done.code == 0 and "%|" not in done.err
    assert llamagen_hub.downloads and not llamagen_hub.shown_bars


def test_commands_with_progress_show_the_bars_of_the_hub(llamagen_hub: FakeHub, tmp_path: Path) -> None:
    call("generate", "a red fox", "--model", LLAMAGEN, "-o", tmp_path / "a.png")
    assert llamagen_hub.shown_bars == len(llamagen_hub.downloads)


def test_inspection_as_json_hides_the_bars_of_the_hub(llamagen_hub: FakeHub) -> None:
    assert call("models", "inspect", LLAMAGEN, "--json").code == 0
    assert llamagen_hub.downloads and not llamagen_hub.shown_bars


def test_worker_processes_hide_the_bars_of_libraries(llamagen_hub: FakeHub) -> None:
    loading = {"model": LLAMAGEN, "drafter": DRAFTER, "device": "cpu", "tree": "none"}
    ImageWorker.load(WorkerOptions(loading, {}, slots=1, silent=True)).close()
    assert llamagen_hub.downloads and not llamagen_hub.shown_bars


def test_disabled_bar_of_a_pipeline_hides_those_of_libraries(
    llamagen_hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = Pipeline.from_pretrained(LLAMAGEN, drafter="jacobi", tree="none")
    shown = llamagen_hub.shown_bars
    pipe.set_progress_bar_config(disable=True)
    pipe.drafter = DRAFTER
    capfd.readouterr()
    pipe("a red fox", output_type="codes")
    assert "%|" not in capfd.readouterr().err
    assert llamagen_hub.downloaded(DRAFTER) and llamagen_hub.shown_bars == shown


def test_bars_are_shown_unless_a_pipeline_disables_its_own(
    llamagen_hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = Pipeline.from_pretrained(LLAMAGEN, drafter="jacobi", tree="none")
    capfd.readouterr()
    pipe("a red fox", output_type="codes")
    assert "%|" in capfd.readouterr().err


def test_what_was_disabled_before_stays_disabled() -> None:
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    with hidden_progress_bars(), library_progress_bars():
        assert not transformers.utils.logging.is_progress_bar_enabled()
    assert are_progress_bars_disabled() and transformers.utils.logging.is_progress_bar_enabled()
    enable_progress_bars()


def test_users_choice_in_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With HF_HUB_DISABLE_PROGRESS_BARS=0 the library refuses to hide bars, with a warning."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", False)
    with hidden_progress_bars(), library_progress_bars():
        assert not are_progress_bars_disabled()


def test_quiet_commands_log_no_announcements(
    llamagen_hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every command, not of `generate` alone."""
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    words = ("--prompts", tmp_path / "prompts.txt", "--temperature", 1, "--tree", "chain:depth=2", "--quiet")
    assert call("evaluate", "statistics", "--model", LLAMAGEN, "--drafter", "jacobi", *words).code == 0
    assert llamagen_hub.downloads and not caplog.messages
