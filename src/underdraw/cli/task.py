"""What `generate` was asked to do: options as records, and the checks that need no model."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from underdraw.errors import ConfigError
from underdraw.prompts import check_prompt

if TYPE_CHECKING:
    from underdraw.pipeline import Pipeline

MAX_BATCH, MAX_PICTURES = 256, 10**6
SHEETS = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, slots=True)
class Parts:
    """What draws."""

    model: str
    drafter: str
    tree: str
    verifier: str
    device: str
    dtype: str
    compile: Literal["auto", "on", "capture", "off"] = "auto"

    def load(self, *, quiet: bool) -> Pipeline:
        """The pipeline. torch is imported here."""
        return self.timed(quiet=quiet)[0]

    def timed(self, *, quiet: bool) -> tuple[Pipeline, float]:
        """The pipeline, and how many seconds it took to load, once torch was there."""
        from rich.console import Console

        console = Console(stderr=True, quiet=quiet)
        with console.status(f"loading {self.model}"):
            from underdraw.pipeline import Pipeline

            began = time.perf_counter()
            pipe = Pipeline.from_pretrained(
                self.model, drafter=self.drafter, tree=self.tree, verifier=self.verifier, device=self.device,
                dtype=self.dtype, compile=self.compile,
            )  # fmt: skip
        pipe.set_progress_bar_config(disable=True)  # commands show their own
        if pipe.graphs is not None:
            pipe.graphs.tell = console.print
        return pipe, time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Sampling:
    """How it draws; None is the model's own setting."""

    guidance: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    negative: str | None
    height: int | None
    width: int | None

    def arguments(self) -> dict[str, Any]:
        """As arguments of a pipeline's call."""
        return {
            "guidance_scale": self.guidance, "temperature": self.temperature, "top_k": self.top_k,
            "top_p": self.top_p, "negative_prompt": self.negative, "height": self.height, "width": self.width,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """What is drawn, and what is written where."""

    prompts: list[str]
    listed: bool  # whether the prompts come from a file
    n: int
    seed: int | None
    out: Path | None
    heatmap: Path | None
    compare: bool
    compare_image: Path | None
    batch: int
    overlong: Literal["refuse", "skip"]
    force: bool
    json: bool
    quiet: bool
    trace: Path | None = None
    sheet: Path | None = None

    @property
    def many(self) -> bool:
        """Whether the pictures go into a folder."""
        return self.listed or self.n > 1

    @property
    def silent(self) -> bool:
        """Whether progress stays unseen."""
        return self.json or self.quiet

    def check(self) -> None:
        """Refuse what cannot end well before a model is loaded."""
        for text in self.prompts:
            check_prompt(text)
        if self.n < 1:
            raise ConfigError(f"--n {self.n} draws nothing; use at least 1.")
        if len(self.prompts) * self.n > MAX_PICTURES:
            raise ConfigError(f"--n {self.n} asks for more than {MAX_PICTURES} pictures; use less.")
        if not 1 <= self.batch <= MAX_BATCH:
            raise ConfigError(f"--batch {self.batch} must lie between 1 and {MAX_BATCH}.")
        if self.seed is not None and not 0 <= self.seed < 2**62 - len(self.prompts) * self.n:
            raise ConfigError(f"--seed {self.seed} is not allowed; use a whole number from 0 to 2**62 - 1.")
        self._check_folder() if self.many else self._check_files()

    def _check_folder(self) -> None:
        alone = (("--heatmap", self.heatmap), ("--compare-image", self.compare_image), ("--trace", self.trace))
        for name, given in alone:
            if given is not None:
                raise ConfigError(f"{name} is for one picture; leave it out, or draw one prompt with --n 1.")
        if self.out is None:
            raise ConfigError("several pictures need a folder; name it with --out FOLDER.")
        if self.out.suffix.lower() == ".png" or (self.out.exists() and not self.out.is_dir()):
            raise ConfigError(f"several pictures need a folder and {self.out} is a file; name a folder with --out.")
        if self.sheet is not None:
            if self.sheet.suffix.lower() not in SHEETS:
                raise ConfigError(f"{self.sheet} does not end in one of {', '.join(SHEETS)}; sheets are such files.")
            check_file(self.sheet)
        check_folder(self.out)

    def _check_files(self) -> None:
        if self.sheet is not None:
            raise ConfigError("--sheet shows a folder of pictures; draw several, with --prompts FILE or --n.")
        given = [path for path in (self.out, self.heatmap, self.compare_image) if path is not None]
        if len({path.resolve() for path in given}) < len(given):
            raise ConfigError(f"{given[-1]} is asked for twice; give every output a name of its own.")
        for path in given:
            check_output(path, self.force)
        if self.trace is not None:
            if self.trace.exists() and not self.force:
                raise ConfigError(f"{self.trace} exists; give another name, or --force to replace it.")
            if not self.trace.parent.is_dir():
                raise ConfigError(f"{self.trace} cannot be written: there is no folder {self.trace.parent}.")

    def file(self, seed: int) -> Path:
        """Where one picture goes: --out, or a name made of prompt and seed."""
        if self.out is not None:
            return self.out
        words = "-".join(re.findall(r"\w+", self.prompts[0].lower()))[:60].strip("-")
        return Path(f"{words or 'picture'}-{seed}.png")


def check_output(path: Path, force: bool) -> None:
    """Refuse a picture's name that cannot be written, or that is taken."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path} does not end in .png; pictures are written as PNG files.")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name.")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give another name, or --force to replace it.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first.")
    check_writable(path.parent, path)


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, or replaced; its folder is made when it is written."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name.")
    check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, or that takes no files."""
    above = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not above.is_dir():
        raise ConfigError(f"{folder} cannot be made: {above} is a file; choose another folder.")
    check_writable(above, folder)


def check_writable(folder: Path, path: Path) -> None:
    """Refuse a path inside a folder that takes no files."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another folder.") from None
