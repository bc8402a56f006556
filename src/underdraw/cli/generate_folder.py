"""`underdraw generate` for many images: fills a run folder, a batch at a time, and resumes it at any moment."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underdraw.cli.progress import StepCallback, drafted_tokens, print_result, progress_bar
from underdraw.cli.records import comparison_records, rounded, stats_record, summary_line
from underdraw.errors import ConfigError
from underdraw.run_folder import RunFolder

if TYPE_CHECKING:
    from underdraw.cli.generate import GenerateOptions
    from underdraw.pipeline import Pipeline
    from underdraw.request import GenerationRequest

SHEET_WIDTH = 144  # pixels of an image on a contact sheet


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a folder. Its index counts skipped prompts too, so that skipping does not change seeds."""

    index: int
    prompt: str
    seed: int

    @property
    def file(self) -> str:
        return f"{self.index:05d}.png"


def generate_folder(pipe: Pipeline, options: GenerateOptions, request_options: dict[str, Any]) -> None:
    """Generate the images that the folder does not hold yet."""
    assert options.out is not None
    run = RunFolder(options.out)
    saved = {} if options.force else run.saved_settings() or {}
    seed = options.seed if options.seed is not None else saved.get("seed", secrets.randbelow(2**31))
    items, skipped = _list_items(pipe, options, seed)
    request = pipe.request([item.prompt for item in items], seed=[item.seed for item in items], **request_options)
    run.open(_run_settings(pipe, options, request, seed), restart=options.force)
    missing = [position for position, item in enumerate(items) if item.index not in run.rows]
    plain = pipe.plain() if options.compare else None
    total = drafted_tokens(pipe.model.make_layout(request.size)) * len(missing) * (1 + options.compare)
    try:
        with progress_bar(total, silent=options.silent) as advance:
            for start in range(0, len(missing), options.batch):
                batch = missing[start : start + options.batch]
                _generate_batch(run, pipe, plain, request.select(batch), [items[i] for i in batch], advance)
    except KeyboardInterrupt:
        print(f"{run.count()} of {len(items)} images are finished; the same command continues.", file=sys.stderr)
        raise
    rows = [run.rows[item.index] for item in items]
    if options.sheet is not None:
        _write_sheet(run, rows, options.sheet)
    record = {
        "out": str(options.out),
        "seed": seed,
        **_totals(rows),
        "drawn": len(missing),
        "skipped": skipped,
        "unknown_words": pipe.model.unknown_words(request.prompts),
    }
    counts = f"{len(rows)} images ({len(missing)} new{f', {skipped} prompts skipped' if skipped else ''})"
    line = f"{options.out}: {counts}, {summary_line(record)}; seed {seed}"
    print_result(line, record, as_json=options.json, quiet=options.quiet)


def _list_items(pipe: Pipeline, options: GenerateOptions, seed: int) -> tuple[list[Item], int]:
    """The images of a folder, and how many prompts were skipped because they are too long for the model."""
    items, skipped = [], 0
    for number, text in enumerate(options.prompts):
        try:
            pipe.model.check_prompt(text)
        except ConfigError as error:
            if options.overlong == "refuse":
                raise ConfigError(f"prompt {number + 1}: {error} Or skip such prompts: --overlong skip.") from None
            skipped += 1
            continue
        first = number * options.images_per_prompt
        items += [Item(i, text, seed + i) for i in range(first, first + options.images_per_prompt)]
    if not items:
        raise ConfigError(f"{pipe.model.name} can read none of the {skipped} prompts; shorten them.")
    return items, skipped


def _run_settings(pipe: Pipeline, options: GenerateOptions, request: GenerationRequest, seed: int) -> dict[str, Any]:
    """What must be the same for a run to be resumed."""
    digest = hashlib.sha256("\n".join(options.prompts).encode("utf-8", "surrogatepass")).hexdigest()
    return {
        "model": pipe.model.name,
        "prompts": len(options.prompts),
        "prompts_sha256": digest,
        "n": options.images_per_prompt,
        "seed": seed,
        "overlong": options.overlong,
        "compare": options.compare,
        **pipe.settings(request),
    }


def _generate_batch(
    run: RunFolder,
    pipe: Pipeline,
    plain: Pipeline | None,
    request: GenerationRequest,
    items: Sequence[Item],
    advance: StepCallback,
) -> None:
    """Generate some images together, write them and append their lines."""
    from underdraw.images import save_png
    from underdraw.io import pack_grid
    from underdraw.output import Stats

    output = pipe.generate(request, callback_on_step_end=advance)
    comparisons: list[dict[str, Any]] = [{} for _ in items]
    if plain is not None:
        comparisons = comparison_records(output, plain.generate(request, callback_on_step_end=advance))
    run.start()
    seconds = output.stats.seconds / len(items)  # images of a batch share its time equally
    for position, item in enumerate(items):
        save_png(output.images[position], run.folder / item.file, output.metadata(position))
        history = output.histories[position]
        run.append(
            {
                "index": item.index,
                "file": item.file,
                "prompt": item.prompt,
                "seed": item.seed,
                **stats_record(Stats.of([history], seconds)),
                **comparisons[position],
                "codes": pack_grid(history.layout.grid(history.tokens)),
            }
        )


def _write_sheet(run: RunFolder, rows: list[dict[str, Any]], path: Path) -> None:
    """Write small copies of the images of a folder with their prompts."""
    from PIL import Image

    from underdraw.images import contact_sheet
    from underdraw.metrics.exact_match import read_pixels

    images = [Image.fromarray(read_pixels(run.folder / row["file"])) for row in rows]
    contact_sheet(images, path, captions=[row["prompt"] for row in rows], caption_lines=5, width=SHEET_WIDTH)


def _totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the folder; mean depth and nodes are weighted by passes."""
    passes, tokens = (sum(row[key] for row in rows) for key in ("passes", "tokens"))
    seconds = sum(row["seconds"] for row in rows)
    totals: dict[str, Any] = {
        "pictures": len(rows),
        "seconds": rounded(seconds),
        "passes": passes,
        "tokens": tokens,
        "tokens_per_pass": rounded(tokens / passes),
    }
    for key in ("mean_depth", "mean_nodes"):
        totals[key] = rounded(sum(row[key] * row["passes"] for row in rows) / passes)
    if "plain_seconds" in rows[0]:
        plain_seconds = sum(row["plain_seconds"] for row in rows)
        totals["plain_seconds"] = rounded(plain_seconds)
        totals["speedup"] = rounded(plain_seconds / seconds)
        totals["identical"] = all(row["identical"] for row in rows)
    return totals
