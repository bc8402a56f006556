"""A Hugging Face hub in memory: repositories with file listings as the real ones have them, and a log of downloads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from underdraw.models.checkpoint import tensor_shapes


class FakeHub:
    """Repositories of `huggingface_hub`, backed by local folders; `downloads` lists what was fetched, in order."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: dict[str, dict[str, Path | int]] = {}  # repository -> file name -> its content, or only its size
        self.downloads: list[tuple[str, str]] = []
        self.shown_bars = 0  # downloads while the hub's progress bars were enabled

    def add(self, repository: str, folder: Path | None = None, sizes: Mapping[str, int] | None = None) -> None:
        """Add a repository: the files of a folder, and files that are listed with a size and have no content."""
        files = self.files.setdefault(repository, {})
        if folder is not None:
            files.update({str(f.relative_to(folder)): f for f in sorted(folder.rglob("*")) if f.is_file()})
        files.update(sizes or {})

    def downloaded(self, repository: str) -> list[str]:
        """The files of a repository that were fetched."""
        return sorted({name for fetched, name in self.downloads if fetched == repository})

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        """Replace the functions of huggingface_hub."""
        import huggingface_hub

        hub = self

        class Api:
            def __init__(self, **_: Any) -> None: ...

            def model_info(self, repository: str, **_: Any) -> Any:
                files = hub._repository(repository)
                siblings = [
                    SimpleNamespace(rfilename=name, size=file if isinstance(file, int) else file.stat().st_size)
                    for name, file in files.items()
                ]
                return SimpleNamespace(siblings=siblings)

            def parse_safetensors_file_metadata(self, repository: str, name: str, **_: Any) -> Any:
                """The header alone: nothing is downloaded."""
                file = hub._repository(repository)[name]
                assert isinstance(file, Path)
                tensors = {key: SimpleNamespace(shape=tuple(shape)) for key, shape in tensor_shapes(file).items()}
                return SimpleNamespace(tensors=tensors)

            def create_repo(self, repository: str, **_: Any) -> None:
                hub.files.setdefault(repository, {})

            def upload_folder(self, *, repo_id: str, folder_path: str) -> str:
                copy = shutil.copytree(folder_path, hub.cache / "uploads" / repo_id)
                hub.add(repo_id, copy)
                return f"https://huggingface.co/{repo_id}"

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._snapshot)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, **_: str(self._fetch(name, file)))
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
        return self

    def _repository(self, name: str) -> dict[str, Path | int]:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if name not in self.files:
            raise LocalEntryNotFoundError(f"there is no {name}")
        return self.files[name]

    def _snapshot(self, repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        for name in self._repository(repository):
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                self._fetch(repository, name)
        return str(self._folder(repository))

    def _fetch(self, repository: str, name: str) -> Path:
        from huggingface_hub.utils import are_progress_bars_disabled

        source = self._repository(repository)[name]
        target = self._folder(repository) / name
        if not target.exists():
            self.downloads.append((repository, name))
            self.shown_bars += not are_progress_bars_disabled()
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, int):
                target.touch()
            else:
                shutil.copy(source, target)
        return target

    def _folder(self, repository: str) -> Path:
        return self.cache / f"models--{repository.replace('/', '--')}" / "snapshots" / "main"
