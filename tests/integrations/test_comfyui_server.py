"""The ComfyUI nodes in a running ComfyUI, if COMFYUI_URL names one (docs/integrations.md says how to start it)."""

from __future__ import annotations

import io
import json
import os
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from underdraw import Pipeline

URL = os.environ.get("COMFYUI_URL", "").rstrip("/")
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECONDS = 600

pytestmark = pytest.mark.skipif(not URL, reason="COMFYUI_URL names no running ComfyUI")


def call(path: str, content: Any = None) -> bytes:
    body = None if content is None else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/{path}", body), timeout=60) as answer:
        return answer.read()


def run(workflow: dict[str, Any]) -> dict[str, Any]:
    """The entry of a workflow in ComfyUI's history, once it has ended."""
    key = json.loads(call("prompt", {"prompt": workflow}))["prompt_id"]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if entry := json.loads(call(f"history/{key}")).get(key):
            return entry
        time.sleep(0.5)
    raise TimeoutError(f"ComfyUI did not end the workflow within {SECONDS} s")


def documented_workflow() -> dict[str, Any]:
    return json.loads(PAGE.read_text().partition("```json\n")[2].partition("```")[0])


def test_documented_workflow_draws_the_images_of_the_pipeline() -> None:
    outputs = run(documented_workflow())["outputs"]
    images, maps = ([call(f"view?{urllib.parse.urlencode(image)}") for image in outputs[key]["images"]] for key in "34")
    drawn = [np.asarray(Image.open(io.BytesIO(image))) for image in images]
    expected = Pipeline.from_pretrained("tiny")("a red fox", seed=3, num_images_per_prompt=2).images
    assert len(drawn) == len(maps) == 2
    # ComfyUI cuts 255 * value to a whole number, which may be one less than the rounded one
    assert all(np.abs(a.astype(int) - np.asarray(b)).max() <= 1 for a, b in zip(drawn, expected, strict=True))


def test_wrong_size_is_reported() -> None:
    workflow = documented_workflow()
    workflow["2"]["inputs"]["width"] = 33
    status = run(workflow)["status"]
    assert status["status_str"] == "error" and "33" in json.dumps(status["messages"])
