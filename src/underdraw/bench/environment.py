"""On what a number was measured: processor and devices, versions, and the commit of the code if it has one."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import underdraw
from underdraw.engine.autotune import processor


def about(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit, for records."""
    return {
        "underdraw": underdraw.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "safetensors")},
        "platform": platform.platform(),
        "processor": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def commit() -> str | None:
    """The commit of the code that runs, with a + if it was changed since; None where there is no repository.

    The variable UNDERDRAW_COMMIT says it for code that was copied out of its repository.
    """
    if told := os.environ.get("UNDERDRAW_COMMIT"):
        return told
    folder = Path(underdraw.__file__).parent
    try:
        found = [
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "."))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].strip() + ("+" if found[1].strip() else "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
