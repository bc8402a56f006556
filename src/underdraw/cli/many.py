"""`generate` for many pictures: a folder with a manifest, a few pictures at a time, resumable at any moment."""

from __future__ import annotations

import hashlib
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underdraw.cli.manifest import Manifest
from underdraw.cli.report import Callback, close, compared, figures, progress, rounded, sentence, work
from underdraw.cli.task import Sampling, Task
from underdraw.errors import ConfigError

if TYPE_CHECKING:
    from underdraw.pipeline import Pipeline
    from underdraw.request import GenerationRequest

SHEET_WIDTH = 144  # pixels of a picture on a sheet


@dataclass(frozen=True, slots=True)
class Item:
    """One picture to draw. Its number counts all prompts of the task, so that skipping some moves no seed."""

    index: int
    prompt: str
    seed: int

    @property
    def file(self) -> str:
        return f"{self.index:05d}.png"


@dataclass(frozen=True, slots=True)
class Run:
    """What all pictures of a folder have in common. The request is that of the first prompt."""

    pipe: Pipeline
    task: Task
    sampling: Sampling
    request: GenerationRequest
    manifest: Manifest


def draw_many(pipe: Pipeline, task: Task, sampling: Sampling) -> None:
    """Draw what the folder does not hold yet."""
    assert task.out is not None
    manifest = Manifest(task.out)
    known = {} if task.force else manifest.settings() or {}
    seed = task.seed if task.seed is not None else known.get("seed", secrets.randbelow(2**31))
    request = pipe.request(task.prompts[0], seed=seed, **sampling.arguments())
    if sampling.negative is not None:
        pipe.model.check_prompt(sampling.negative)
    items, skipped = _items(pipe, task, seed)
    manifest.open(_settings(pipe, task, request, seed), "anew" if task.force else "resume")
    todo = [item for item in items if item.index not in manifest.rows]
    run = Run(pipe, task, sampling, request, manifest)
    total = work(pipe.model.make_layout(request.size)) * len(todo) * (1 + task.compare)
    try:
        with progress(total, silent=task.silent) as advance:
            for start in range(0, len(todo), task.batch):
                _draw(run, todo[start : start + task.batch], advance)
    except KeyboardInterrupt:
        print(
            f"{manifest.count()} of {len(items)} pictures are drawn; the same command goes on from there.",
            file=sys.stderr,
        )
        raise
    rows = [manifest.rows[item.index] for item in items]
    if task.sheet is not None:
        _sheet(manifest, rows, task.sheet)
    record = {"out": str(task.out), "seed": seed, **_totals(rows), "drawn": len(todo), "skipped": skipped}
    left = f", {skipped} prompts skipped" if skipped else ""
    line = f"{task.out}: {len(rows)} pictures ({len(todo)} new{left}), {sentence(record)}; seed {seed}"
    close(line, record, as_json=task.json, quiet=task.quiet)


def _items(pipe: Pipeline, task: Task, seed: int) -> tuple[list[Item], int]:
    """The pictures of a task, and how many prompts were left out because the model cannot read them."""
    items, skipped = [], 0
    for number, text in enumerate(task.prompts):
        try:
            pipe.model.check_prompt(text)
        except ConfigError as error:
            if task.overlong == "refuse":
                raise ConfigError(f"prompt {number + 1}: {error} Or leave such prompts out: --overlong skip.") from None
            skipped += 1
            continue
        for index in range(number * task.n, (number + 1) * task.n):
            items.append(Item(index, text, seed + index))
    if not items:
        raise ConfigError(f"{pipe.model.name} can read none of the {skipped} prompts; shorten them.")
    return items, skipped


def _settings(pipe: Pipeline, task: Task, request: GenerationRequest, seed: int) -> dict[str, Any]:
    """What must not change between two parts of one run."""
    digest = hashlib.sha256("\n".join(task.prompts).encode("utf-8", "surrogatepass")).hexdigest()
    return {
        "model": pipe.model.name, "prompts": len(task.prompts), "prompts_sha256": digest, "n": task.n, "seed": seed,
        "overlong": task.overlong, "compare": task.compare, **pipe.settings(request),
    }  # fmt: skip


def _draw(run: Run, items: list[Item], advance: Callback) -> None:
    """Draw some pictures together and note each of them."""
    from underdraw.images import save_png
    from underdraw.io import pack_grid
    from underdraw.output import Stats

    pipe, manifest = run.pipe, run.manifest
    seeds = [item.seed for item in items]
    request = pipe.request([item.prompt for item in items], seed=seeds, **run.sampling.arguments())
    out = pipe.generate(request, callback_on_step_end=advance)
    comparisons: list[dict[str, Any]] = [{} for _ in items]
    if run.task.compare:
        comparisons = compared(out, pipe.plain().generate(request, callback_on_step_end=advance))
    manifest.begin()
    share = out.stats.seconds / len(items)  # pictures of a batch take their time together
    for index, (item, history, comparison) in enumerate(zip(items, out.histories, comparisons, strict=True)):
        save_png(out.images[index], manifest.folder / item.file, out.metadata(index))
        row = {"index": item.index, "file": item.file, "prompt": item.prompt, "seed": item.seed}
        codes = pack_grid(history.layout.grid(history.tokens))
        manifest.append({**row, **figures(Stats.of([history], share)), **comparison, "codes": codes})


def _sheet(manifest: Manifest, rows: list[dict[str, Any]], path: Path) -> None:
    """Small copies of the pictures of a folder, with their prompts."""
    from PIL import Image

    from underdraw.images import contact_sheet
    from underdraw.metrics.exact_match import pixels

    images = [Image.fromarray(pixels(manifest.folder / row["file"])) for row in rows]
    contact_sheet(images, path, captions=[row["prompt"] for row in rows], caption_lines=5, width=SHEET_WIDTH)


def _totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the whole folder; means are over passes."""
    passes, tokens = (sum(row[key] for row in rows) for key in ("passes", "tokens"))
    total: dict[str, Any] = {
        "pictures": len(rows), "seconds": rounded(sum(row["seconds"] for row in rows)), "passes": passes,
        "tokens": tokens, "tokens_per_pass": rounded(tokens / passes),
    }  # fmt: skip
    for key in ("mean_depth", "mean_nodes"):
        total[key] = rounded(sum(row[key] * row["passes"] for row in rows) / passes)
    if "plain_seconds" in rows[0]:
        plain = sum(row["plain_seconds"] for row in rows)
        total.update(
            plain_seconds=rounded(plain), speedup=rounded(plain / sum(row["seconds"] for row in rows)),
            identical=all(row["identical"] for row in rows),
        )  # fmt: skip
    return total
