"""save_pretrained and push_to_hub: a saved pipeline loads again, and a failed save leaves nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_checkpoint

from underdraw import Pipeline
from underdraw.errors import CapacityError, UnderdrawError
from underdraw.history import History
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency


def test_saved_pipeline_loads_with_its_parts(small_model: Path, tmp_path: Path) -> None:
    pipe = Pipeline.from_pretrained(small_model, tree=Adjacency(init="both", nodes=16), verifier="lantern:delta=0.2")
    folder = pipe.save_pretrained(tmp_path / "deep" / "saved")
    assert {path.name for path in tmp_path.joinpath("deep").iterdir()} == {"saved"}  # no temporary files
    again = Pipeline.from_pretrained(folder)
    assert again.tree == pipe.tree and again.verifier_name == "lantern:delta=0.2" and again.drafter_name == "drafter"
    assert again("fox", seed=1).images[0].tobytes() == pipe("fox", seed=1).images[0].tobytes()
    chosen = Pipeline.from_pretrained(folder, tree="none", verifier="exact", drafter="jacobi")
    assert (chosen.tree_name, chosen.verifier_name, chosen.drafter_name) == ("none", "exact", "jacobi")
    twice = again.save_pretrained(tmp_path / "twice")
    assert sorted(p.name for p in twice.rglob("*")) == sorted(p.name for p in folder.rglob("*"))


def test_drafter_from_another_folder_is_copied(small_model: Path, tmp_path: Path) -> None:
    bare = small_checkpoint.write(tmp_path / "bare", drafter=False)
    shutil.copytree(small_model / "drafter", tmp_path / "mine")
    pipe = Pipeline.from_pretrained(bare, drafter=str(tmp_path / "mine"), tree="chain:depth=2")
    folder = pipe.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "mine")
    again = Pipeline.from_pretrained(folder)
    assert again.drafter_name == "drafter-mine"
    assert again("fox", seed=1).history.passes == pipe("fox", seed=1).history.passes


def test_folder_of_the_same_name_is_not_the_drafter(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's drafter is called `drafter`, and so is an unrelated folder of the working directory."""
    (tmp_path / "drafter").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = Pipeline.from_pretrained(small_model).save_pretrained("saved")
    assert json.loads((folder / "underdraw.json").read_text())["drafter"] == "drafter"
    assert not (folder / "drafter-drafter").exists()


@dataclass(frozen=True)
class UnregisteredPolicy:
    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan(1, 1, 1, 2)


def test_part_without_a_name_is_not_saved(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.tree = UnregisteredPolicy()
    with pytest.raises(UnderdrawError, match="unregisteredpolicy"):
        pipe.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_full_disk_is_refused_before_anything_is_copied(
    pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CapacityError, match=r"needs \d+\.\d MB, but .* has 0\.0 MB free"):
        pipe.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_folder_that_is_not_empty_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(UnderdrawError, match="not an empty folder"):
            pipe.save_pretrained(path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


class FakeHub:
    """The methods of huggingface_hub's HfApi that are used; records their calls."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("token", {"token": token}))

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if repo_id == "nobody/refused":
            raise OSError("403 Forbidden\nmore lines")
        self.calls.append(("create", {"repo_id": repo_id, **options}))

    def upload_folder(self, *, repo_id: str, folder_path: str) -> str:
        files = {str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()}
        choice = json.loads(Path(folder_path, "underdraw.json").read_text())
        self.calls.append(("upload", {"files": files, "choice": choice}))
        return f"https://huggingface.co/{repo_id}/commit/0"


def test_push_to_hub_uploads_the_saved_folder(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub.calls.clear()
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    pipe.tree = "chain:depth=2"
    assert pipe.push_to_hub("me/mine", token="t", private=True).startswith("https://huggingface.co/me/mine")
    (_, token), (_, create), (_, upload) = FakeHub.calls
    assert token == {"token": "t"} and create == {"repo_id": "me/mine", "private": True, "exist_ok": True}
    assert {"config.json", "decoder/text.json", "drafter/model-0.safetensors", "underdraw.json"} <= upload["files"]
    choice = {"drafter": "drafter", "tree": "chain:depth=2", "verifier": "exact", "size": "12x12"}
    assert upload["choice"] == choice
    with pytest.raises(UnderdrawError, match=r"403 Forbidden\); check the name and your token"):
        pipe.push_to_hub("nobody/refused")
