"""Runs programs with Triton kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# What the interpreter of older Triton versions runs into with a recent NumPy.
_NUMPY_ERROR = "only 0-dimensional arrays can be converted to Python scalars"


def run_interpreted(program: str) -> None:
    """Run a Python program with this process's import paths; fail if it fails."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if _NUMPY_ERROR in done.stderr:
        pytest.skip("this triton's interpreter does not work with this numpy")
    assert done.returncode == 0, done.stderr[-2000:]
