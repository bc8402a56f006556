"""docs/serving.md is true: its Python and curl examples run, its tables are complete; the load test runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call
from PIL import Image
from running_server import RunningServer

from underdraw.serving.schemas import ImageRequest
from underdraw.serving.settings import ServerSettings

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.S), ids=["pictures", "stream"])
def test_python_examples(
    block: str,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.replace(ADDRESS, server.url), "serving.md", "exec"), {})
    files = list(tmp_path.glob("*.png"))
    assert len(files) >= 2 and all(Image.open(file).size == (12, 12) for file in files)
    assert capsys.readouterr().out.strip()


def test_curl_example(server: RunningServer) -> None:
    (command,) = re.findall(r"^curl .*?\n.*?$", PAGE, re.M)
    done = subprocess.run(command.replace(ADDRESS, server.url), shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["data"][0]["underdraw"]["seed"] == 3


def test_every_field_and_option_is_documented() -> None:
    fields = PAGE.partition("### Fields")[2].partition("Anything else")[0]
    documented = {name for row in re.findall(r"^\| (`.*?) \|", fields, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(ImageRequest.model_fields)
    options = set(re.findall(r"--[a-z-]+", call("serve", "--help").out))
    assert set(re.findall(r"underdraw serve ([^\n`]*)", PAGE)) and {"--slots", "--queue", "--timeout"} <= options
    for line in re.findall(r"underdraw serve ([^\n`]*)", PAGE):
        assert set(re.findall(r"--[a-z-]+", line)) <= options
    settings = ServerSettings()
    for value in (settings.slots, settings.queue, int(settings.timeout), settings.max_body // 1024):
        assert re.search(rf"\| {value}\b", PAGE), value


def test_load_test_runs_and_writes_its_table(served_model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- load -->\nold\n<!-- /load -->\nafter\n")
    sizes = ["--clients", "8", "--requests", "16", "--seeds", "1", "--queue", "2", "--slots", "2"]
    files = ["--record", "--results", str(tmp_path / "load"), "--page", str(page)]
    done = subprocess.run(
        [sys.executable, "benchmarks/load_test.py", "--json", "--model", str(served_model), *sizes, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["pictures"] + record["refused_429"] == record["requests"] == 16
    assert record["pictures"] >= 4 and record["refused_429"] > 0 and record["wrong"] == record["other"] == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- load -->\n| model |") and text.endswith("<!-- /load -->\nafter\n")
    assert (
        f"| served | 8 | 16 | {record['pictures']} | {record['refused_429']} | 0 | all, 4 different ones | 0 | " in text
    )
