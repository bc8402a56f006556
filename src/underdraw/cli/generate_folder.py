"""`underdraw generate` for many images: fills a run folder with one process or many, and resumes it at any moment."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underdraw.cli.generate_image import summary_line
from underdraw.cli.options import load_pipeline
from underdraw.cli.progress import RunProgress, counted
from underdraw.distributed.planned_images import WorkerOptions, Workers
from underdraw.distributed.ranks import current_rank, local_rank
from underdraw.distributed.run import RunResult, RunSpec, draw_run
from underdraw.errors import ConfigError
from underdraw.image_store import image_name
from underdraw.run_folder import Rank, RunFolder, check_same_settings

if TYPE_CHECKING:
    from underdraw.cli.generate import GenerateOptions
    from underdraw.prompts import PromptRow

SHEET_WIDTH = 144  # pixels of an image on a contact sheet


def generate_folder(options: GenerateOptions) -> None:
    """Generate the images that the folder does not hold yet."""
    assert options.out is not None
    rank = current_rank()
    _check_rank(rank, options)
    run = RunFolder(options.out, rank)
    try:
        run.lock()
        saved = (None if options.force else run.saved()) or {"settings": {}}
        seed = _run_seed(options, saved["settings"], rank)
        spec = RunSpec(
            prompts=_seeded(options, seed),
            repeats=options.n,
            seed=seed,
            format=options.format,
            shard_size=options.shard_size,
            overlong=options.overlong,
            compare=options.is_compared,
        )
        for _ in spec.prompts:  # raises for a file without prompts, before the model is loaded
            break
        if saved["settings"]:  # compared again with what the model says, once it is loaded
            known = {"model": options.model, **spec.settings()}
            shared = {key: value for key, value in saved["settings"].items() if key in known}
            check_same_settings(options.out, shared, {key: known[key] for key in shared})
        workers = _make_workers(options)
        try:
            result = _draw(run, workers, spec, options)
        finally:
            workers.close()
        _report(run, options, spec, result)
    finally:
        run.close()


def _check_rank(rank: Rank, options: GenerateOptions) -> None:
    if rank.world == 1:
        return
    for name, value in {"--workers": options.workers, "--ray": options.ray, "--force": options.force}.items():
        if value:
            raise ConfigError(f"{name} cannot be combined with the {rank.world} ranks of this launcher; leave it out.")


def _run_seed(options: GenerateOptions, saved: dict[str, Any], rank: Rank) -> int:
    """The seed of the run: the option, that of the run in the folder, or a random one."""
    if options.seed is not None:
        last = options.seed + (0 if options.prompts is not None else options.n - 1)
        if options.seed < 0 or last >= 2**62:
            raise ConfigError(f"seed {last} is not allowed; use whole numbers from 0 to 2**62 - 1.")
        return options.seed
    if rank.world > 1 and "seed" not in saved:
        raise ConfigError(f"{rank.world} ranks need the same seed; add --seed NUMBER.")
    seed = saved.get("seed", secrets.randbelow(2**31))
    if type(seed) is not int:
        raise ConfigError(f"{options.out} has the seed {seed!r}; choose a new folder, or add --force to start again.")
    return seed


def _seeded(options: GenerateOptions, seed: int) -> Iterable[PromptRow]:
    """The prompts; the images of a single prompt have the seeds of a call of the pipeline: seed, seed + 1, ..."""
    rows = options.prompt_rows()
    return rows if options.prompts is not None else [replace(row, seed=seed) for row in rows]


def _make_workers(options: GenerateOptions) -> Workers:
    """Start whoever draws."""
    loading = options.loading()
    worker_options = WorkerOptions(
        pipeline=loading,
        request=options.request(),
        slots=options.batch,
        compare=options.is_compared,
        quiet=options.quiet,
        silent=options.silent,
    )
    if options.ray is not None:
        from underdraw.distributed.ray_data import RayActors

        return RayActors(worker_options, options.ray, options.pool, options.gpus_per_actor)
    if options.workers is not None:
        from underdraw.distributed.local import WorkerProcesses

        return WorkerProcesses(worker_options, options.workers)
    from underdraw.distributed.local import ThisProcess

    device = loading["device"]
    if current_rank().world > 1:
        from underdraw.distributed.worker import worker_device

        device = worker_device(device, local_rank())
    size = options.height, options.width
    pipe, _ = load_pipeline(**{**loading, "device": device}, size=size, silent=options.silent)
    from underdraw.distributed.worker import ImageWorker

    return ThisProcess(ImageWorker(pipe, worker_options))


def _draw(run: RunFolder, workers: Workers, spec: RunSpec, options: GenerateOptions) -> RunResult:
    loading = options.loading()
    model = Path(loading["model"])
    portable = {**loading, "model": str(model.resolve()) if model.exists() else loading["model"]}
    del portable["device"], portable["compile"]  # images do not depend on them
    with RunProgress(silent=options.silent, passes_per_token=1 + options.is_compared) as progress:
        try:
            return draw_run(
                run,
                workers,
                spec,
                restart=options.force,
                loading=portable,
                on_start=progress.start,
                on_event=progress.update,
            )
        except KeyboardInterrupt:
            if run.is_started:
                print(
                    f"{run.count()} of {run.images_planned} images are finished; the same command continues.",
                    file=sys.stderr,
                )
            raise


def _report(run: RunFolder, options: GenerateOptions, spec: RunSpec, result: RunResult) -> None:
    """Print what is in the folder now."""
    record: dict[str, Any] = {"out": str(options.out), "seed": spec.seed, **_totals(run)}
    record |= {
        "drawn": result.drawn,
        "skipped": result.skipped,
        "failed": result.failed,
        "unknown_words": result.unknown_words,
    }
    missing = run.images_planned - len(run.failed()) - record["images"]
    if result.is_complete and missing:
        raise ConfigError(f"{options.out} lacks {missing} images; delete its damaged shards and run the command again.")
    if options.sheet is not None:
        _write_sheet(run, options.sheet)
    counts = f"{counted(record['images'], 'image')} ({result.drawn} new"
    counts += f", {counted(result.skipped, 'prompt')} skipped" if result.skipped else ""
    counts += f", {result.failed} failed: see failed.jsonl; the same command tries them again" if result.failed else ""
    waiting = "" if result.is_complete else "; other ranks are still drawing"
    line = f"{options.out}: {counts}), {summary_line(record)}; seed {spec.seed}{waiting}"
    options.print(line, record)


def _write_sheet(run: RunFolder, path: Path) -> None:
    """Write small copies of the images of a folder with their prompts."""
    from underdraw.images import contact_sheet, read_image

    stored = list(run.images())
    images = [read_image(run.folder / image_name(image.index), image.png) for image in stored]
    captions = [image.row["prompt"] for image in stored]
    contact_sheet(images, path, captions=captions, caption_lines=5, width=SHEET_WIDTH)


def _totals(run: RunFolder) -> dict[str, Any]:
    """Sums over the folder; mean depth and nodes are weighted by passes."""
    sums = dict.fromkeys(("images", "passes", "tokens", "mean_depth", "mean_nodes"), 0.0)
    identical = True
    for row in run.rows():
        passes = row["passes"]
        values = {"images": 1, "passes": passes, "tokens": row["tokens"]}
        values |= {key: row[key] * passes for key in ("mean_depth", "mean_nodes")}
        sums = {key: sums[key] + value for key, value in values.items()}
        identical &= row.get("identical", True)
    passes = max(1.0, sums["passes"])
    seconds, plain_seconds = run.seconds()
    totals: dict[str, Any] = {
        "images": int(sums["images"]),
        "seconds": round(seconds, 4),
        "passes": int(sums["passes"]),
        "tokens": int(sums["tokens"]),
        "tokens_per_pass": round(sums["tokens"] / passes, 4),
        "mean_depth": round(sums["mean_depth"] / passes, 4),
        "mean_nodes": round(sums["mean_nodes"] / passes, 4),
    }
    if plain_seconds is not None:
        speedup = round(plain_seconds / seconds, 4) if seconds else None
        totals |= {"plain_seconds": round(plain_seconds, 4), "speedup": speedup, "identical": identical}
    return totals
