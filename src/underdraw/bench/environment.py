"""The machine and the software that a number was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import underdraw
from underdraw.engine.autotune import processor
from underdraw.extras import package_version


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit, for result files."""
    return {
        "underdraw": underdraw.__version__,
        "commit": current_commit(),
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "numpy", "safetensors")},
        "platform": platform.platform(),
        "processor": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def current_commit() -> str | None:
    """The git commit of the running code, with a + if files were changed since; None outside a repository.

    $UNDERDRAW_COMMIT overrides it, for code that was copied out of its repository.
    """
    if override := os.environ.get("UNDERDRAW_COMMIT"):
        return override
    folder = Path(underdraw.__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changes.strip() else "")
