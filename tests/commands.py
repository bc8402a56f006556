"""Run commands: in this process, which is fast, or in a subprocess."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from underdraw.cli.app import app, main

# A program for `start`: `underdraw` that sends itself SIGTERM while it loads the model.
TERMINATED_ON_LOAD = (
    "-c",
    """
import os, signal, sys
from underdraw.cli.app import main
from underdraw.pipeline import Pipeline
Pipeline.from_pretrained = lambda **_: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main())
""",
)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def record(self) -> Any:
        """The JSON object in the last line."""
        return json.loads(self.out.splitlines()[-1])


def call(*arguments: object) -> Result:
    """`underdraw ARGUMENTS` in this process."""
    return _run(app, "underdraw", arguments)


def run_script(module: ModuleType, *arguments: object) -> Result:
    """`python -m MODULE ARGUMENTS` of a script with a typer app, in this process."""
    return _run(module.app, f"python -m {module.__name__}", arguments)


def _run(command: typer.Typer, name: str, arguments: Sequence[object]) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments], command=command, name=name)
    return Result(code, out.getvalue(), err.getvalue())


def start(*arguments: object, cwd: Path, program: tuple[str, str] = ("-m", "underdraw")) -> subprocess.Popen[str]:
    """`underdraw ARGUMENTS` in a subprocess."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_enable_interrupt,
    )


def _enable_interrupt() -> None:
    """Restore Ctrl-C, which a shell disables for the commands that it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
