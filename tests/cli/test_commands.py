"""The tree of commands: help lists subcommands, the first argument selects one, shells complete names and options."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from commands import call

from underdraw.cli.app import COMMANDS
from underdraw.cli.progress import RunProgress
from underdraw.cli.signals import SigtermHandler, Terminated
from underdraw.distributed.planned_images import FailedImage, ModelInfo, PlannedImage, Progress

SUBCOMMANDS = [*(name for name in COMMANDS if " " in name), "train samples", "train drafter"]
GROUPS = sorted({name.split()[0] for name in SUBCOMMANDS})


def subcommands(group: str) -> list[str]:
    return [name.split()[1] for name in SUBCOMMANDS if name.startswith(f"{group} ")]


def complete(line: str) -> list[str]:
    """What bash offers for a command line that ends at the cursor."""
    words = line.split(" ")
    environment = {
        **os.environ, "_UNDERDRAW_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    code = (
        "import atexit, sys; from underdraw.cli.app import main; "
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "False\n", done
    return done.stdout.split()


def test_help_lists_commands_and_subcommands() -> None:
    text = call("--help").out
    for name in COMMANDS:
        if " " not in name:
            assert f"│ {name} " in text
    assert f"Subcommands: {', '.join(subcommands('bench'))}." in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("group", GROUPS)
def test_group_help_lists_its_subcommands(group: str) -> None:
    text = call(group, "--help").out
    assert all(f"│ {name} " in text for name in subcommands(group))


def test_train_without_a_subcommand_prints_help() -> None:
    done = call("train")
    assert done.code == 2 and done.err == "error: train needs a command: samples or drafter.\n"
    assert done.out.strip() == call("train", "--help").out.strip() and "Commands" in done.out
    assert "unknown command of train 'draftr'. Did you mean 'drafter'?" in call("train", "draftr").err


def test_first_argument_selects_the_subcommand() -> None:
    assert "usage: underdraw bench engine [options]" in call("bench", "engine", "--help").out.casefold()
    assert "unknown command of bench 'engin'. Did you mean 'engine'?" in call("bench", "engin").err
    assert "Missing option '--prompts'; see underdraw bench --help." in call("bench").err
    assert "there is nothing to compare with" in call("evaluate", "folder").err
    assert call("bench", "--limit", 1, "engine").code == 2


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("underdraw ge", {"generate"}),
        ("underdraw ", {name for name in COMMANDS if " " not in name}),
        ("underdraw bench ", set(subcommands("bench"))),
        ("underdraw train ", set(subcommands("train"))),
        ("underdraw generate --pro", {"--prompts"}),
        ("underdraw bench engine --rep", {"--replay", "--replay-drafter"}),
        ("underdraw bench --pre", {"--preset"}),
        ("underdraw generate --compile ca", {"capture"}),
        ("underdraw nothing --x", set()),
    ],
)
def test_shell_completion(line: str, offered: set[str]) -> None:
    assert set(complete(line)) == offered


def test_completion_script() -> None:
    command = [sys.executable, "-m", "underdraw"]
    environment = {**os.environ, "_UNDERDRAW_COMPLETE": "source_bash"}
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "_UNDERDRAW_COMPLETE=complete_bash" in script and "underdraw" in script
    assert "--install-completion" in call("--help").out


def test_sigterm_interrupts_this_process_and_ends_forked_ones() -> None:
    context = multiprocessing.get_context("fork")
    has_started = context.Event()

    def work() -> None:
        has_started.set()
        time.sleep(60)

    with SigtermHandler() as sigterm:
        worker = context.Process(target=work)
        worker.start()
        assert has_started.wait(30)
        worker.terminate()
        worker.join(30)
        assert worker.exitcode == -signal.SIGTERM and not sigterm.was_received
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    assert sigterm.was_received and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [(1, "1/4 images, 0.05 images/s, 3.00 tokens/pass, 1 min left"), (2, "1/4 images, 0.05 images/s, 2 min left")],
)
def test_progress_in_a_log_counts_tokens(
    repeats: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images of a batch end together, so the time that is left follows from tokens, not from finished images."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("underdraw.cli.progress.LOG_SECONDS", 10.0)
    with RunProgress(silent=False, passes_per_token=repeats) as progress:
        progress.start(ModelInfo("tiny", None, {}, {}, "none", tokens=60), missing=4)
        now[0] = 20.0
        progress.update(Progress(tokens=60, passes=20))
        progress.update(FailedImage(PlannedImage(0, "0", 0, "a fox", 1), "", is_permanent=True))
    assert capsys.readouterr().err.strip() == expected
