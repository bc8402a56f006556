"""Programs of triton kernels, run by its interpreter: no device needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_NUMPY = "only 0-dimensional arrays can be converted to Python scalars"  # what older interpreters run into


def run(program: str) -> None:
    """Run a program with this process's paths; what it ends with is an error here."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if _NUMPY in done.stderr:
        pytest.skip("this triton's interpreter does not work with this numpy")
    assert done.returncode == 0, done.stderr[-2000:]
