"""examples/first_pictures.ipynb runs from top to bottom, and is stored with outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

PATH = Path(__file__).parents[2] / "examples" / "first_pictures.ipynb"


def printed(notebook: Any) -> list[str]:
    """The lines that the cells print; a kernel may send one in several parts."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    parts = [output.text for output in outputs if output.output_type == "stream" and output.name == "stdout"]
    return "".join(parts).splitlines()


def test_notebook_runs(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new kernel, with a small model instead of the embedded one, which would take half a minute."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tests share the machine
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored = nbformat.read(PATH, as_version=4)
    drawn = nbformat.reads(
        PATH.read_text().replace('\\"tiny\\"', json.dumps(repr(str(small_model)))[1:-1]), as_version=4
    )
    NotebookClient(drawn, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    images = [
        output for cell in drawn.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(images) == 3
    assert len(printed(stored)) == len(printed(drawn)) == 2 and "identical pixels" in printed(drawn)[1]
