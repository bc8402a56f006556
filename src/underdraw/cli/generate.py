"""`underdraw generate`: images from a prompt or a file of prompts.

Reads the options and checks those that need no model, then loads the model; `generate_image` and `generate_folder`
build the request and write the files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from underdraw.cli import options, scale_options
from underdraw.cli.outputs import check_file, check_folder, check_outputs, check_png, real_path
from underdraw.cli.scale_options import ScaleOptions
from underdraw.errors import ConfigError
from underdraw.extras import require_package

if TYPE_CHECKING:
    from underdraw.prompts import PromptRow
    from underdraw.shards import Format

EXAMPLES = """
Examples:

underdraw generate "a fox, 3D render, on a sky blue background" -o fox.png --seed 5

underdraw generate "a fox, 3D render, on a sky blue background" -o fox.png --compare-image both.png --heatmap heat.png

underdraw generate "a house" --n 4 -o houses/

underdraw generate --prompts prompts.txt -o pictures/ --batch 4 --json

underdraw generate --prompts prompts.jsonl -o shards/ --format webdataset --workers 8 --batch 8

underdraw generate "a tree" --tree adjacency:init=both,nodes=24 --temperature 0 -o tree.png
"""
MAX_BATCH, MAX_IMAGES = 256, 10**6
SHEET_SUFFIXES = (".jpg", ".jpeg", ".png")
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to draw, in a few words.")]
Limit = Annotated[
    int | None,
    typer.Option(metavar="COUNT", rich_help_panel=options.PROMPTS, help="Only the first COUNT prompts of the file."),
]
Number = Annotated[
    int, typer.Option("--n", "-n", metavar="COUNT", rich_help_panel=options.PROMPTS, help="Images per prompt.")
]
Negative = Annotated[
    str | None, typer.Option(metavar="TEXT", rich_help_panel=options.PROMPTS, help="What guidance leads away from.")
]
Height = Annotated[
    int | None,
    typer.Option(metavar="PIXELS", rich_help_panel=options.PROMPTS, help="A height that the model supports."),
]
Width = Annotated[
    int | None, typer.Option(metavar="PIXELS", rich_help_panel=options.PROMPTS, help="A width that the model supports.")
]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|parti|coco",
        rich_help_panel=options.PROMPTS,
        help="Many prompts: a text file with one a line, JSON lines, CSV or Parquet with the column prompt (and id, "
        "seed), a TSV of PartiPrompts, a captions JSON of COCO, or the published sets by name. The images go into the "
        "folder --out; run the command again to resume it.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        rich_help_panel=options.OUTPUT,
        help="A PNG file; a folder with --prompts or several images. Without it, a name made of prompt and seed.",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", "-f", rich_help_panel=options.OUTPUT, help="Replace existing files; start a folder again."),
]
Heatmap = Annotated[
    Path | None,
    typer.Option(
        metavar="PNG",
        rich_help_panel=options.OUTPUT,
        help="Also write, for every cell: accepted tokens, depth of the tree, entropy and top-1 probability.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="JSON",
        rich_help_panel=options.OUTPUT,
        help="Also write the trees and their accepted tokens, for: underdraw bench engine --replay.",
    ),
]
Sheet = Annotated[
    Path | None,
    typer.Option(
        metavar="JPG|PNG",
        rich_help_panel=options.OUTPUT,
        help="Also write small copies of all images of the folder on one sheet, with their prompts.",
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        rich_help_panel=options.OUTPUT,
        help="Draw the same seed without speculation too: are the pixels identical, and how much faster was it?",
    ),
]
CompareImage = Annotated[
    Path | None,
    typer.Option(
        metavar="PNG",
        rich_help_panel=options.OUTPUT,
        help="Also write both images side by side with their times; implies --compare.",
    ),
]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The options of `generate` besides the model and the sampling: prompts, and what is written where."""

    prompts: Iterable[PromptRow]
    from_file: bool  # whether --prompts named a file
    images_per_prompt: int
    seed: int | None
    overlong: Literal["refuse", "skip"]
    out: Path | None
    force: bool
    batch: int
    format: Format
    shard_size: int
    scale: ScaleOptions
    compare: bool
    compare_image: Path | None
    heatmap: Path | None
    trace: Path | None
    sheet: Path | None
    json: bool
    quiet: bool

    @property
    def into_folder(self) -> bool:
        """Whether --out is a folder of images."""
        return self.from_file or self.images_per_prompt > 1

    @property
    def is_sharded(self) -> bool:
        """Whether images go into tar or Parquet files."""
        return self.format != "folder"

    @property
    def prompt(self) -> str:
        """The prompt of a single image."""
        return next(iter(self.prompts)).prompt

    @property
    def silent(self) -> bool:
        """Whether to show no progress."""
        return self.json or self.quiet

    def check(self) -> None:
        """Raise for counts out of range and for paths that cannot be written."""
        if self.images_per_prompt < 1:
            raise ConfigError(f"--n {self.images_per_prompt} draws nothing; use at least 1.")
        if self.images_per_prompt > MAX_IMAGES:
            raise ConfigError(f"--n {self.images_per_prompt} asks for more than {MAX_IMAGES} images; use less.")
        if not 1 <= self.batch <= MAX_BATCH:
            raise ConfigError(f"--batch {self.batch} is out of range; use 1 to {MAX_BATCH}.")
        if self.shard_size < 1:
            raise ConfigError(f"--shard-size {self.shard_size} stores nothing; use at least 1.")
        self.scale.check()
        if self.into_folder:
            self._check_folder()
        else:
            self._check_files()

    def _check_folder(self) -> None:
        single = {"--heatmap": self.heatmap, "--compare-image": self.compare_image, "--trace": self.trace}
        for name, path in single.items():
            if path is not None:
                raise ConfigError(f"{name} is for one image; leave it out, or draw one prompt with --n 1.")
        if self.out is None:
            raise ConfigError("several images need a folder; name it with --out FOLDER.")
        if self.out.suffix.lower() == ".png" or (self.out.exists() and not self.out.is_dir()):
            raise ConfigError(f"several images need a folder and {self.out} is a file; name a folder with --out.")
        if self.is_sharded and self.sheet is not None:
            raise ConfigError("--sheet shows PNG files; leave it out, or use --format folder.")
        if self.format == "parquet":
            require_package("pyarrow", "formats", "--format parquet")
        if self.sheet is not None:
            self._check_sheet(self.sheet, self.out)
        check_folder(self.out)

    def _check_files(self) -> None:
        if self.sheet is not None:
            raise ConfigError("--sheet shows a folder of images; draw several, with --prompts FILE or --n.")
        for name, is_set in (
            ("--workers", self.scale.workers),
            ("--ray", self.scale.ray),
            ("--format", self.is_sharded),
        ):
            if is_set:
                raise ConfigError(f"{name} is for many images; draw several, with --prompts FILE or --n.")
        images = {"--out": self.out, "--heatmap": self.heatmap, "--compare-image": self.compare_image}
        for option, path in images.items():
            check_png(option, path)
        check_outputs({**images, "--trace": self.trace}, force=self.force)

    def _check_sheet(self, sheet: Path, out: Path) -> None:
        """A sheet must not be a file of the run; that of an earlier start of the same run is replaced."""
        from underdraw.images import is_contact_sheet

        if sheet.suffix.lower() not in SHEET_SUFFIXES:
            raise ConfigError(f"{sheet} must end in one of {', '.join(SHEET_SUFFIXES)}.")
        if real_path(sheet.parent) == real_path(out) and sheet.suffix.lower() == ".png":
            raise ConfigError(f"{sheet} could be a picture of the run; put the sheet elsewhere, or name it .jpg.")
        check_file(sheet, force=self.force, is_own=is_contact_sheet)

    def image_path(self, seed: int) -> Path:
        """Where a single image goes: --out, or a name made of prompt and seed."""
        if self.out is not None:
            return self.out
        words = "-".join(re.findall(r"\w+", self.prompt.lower()))[:60].encode()[:120].decode(errors="ignore")
        path = Path(f"{words.strip('-') or 'image'}-{seed}.png")
        others = {"--heatmap": self.heatmap, "--compare-image": self.compare_image, "--trace": self.trace}
        check_outputs({**others, "the image": path}, force=self.force)
        return path


@app.command(epilog=EXAMPLES)
def generate(
    prompt: Prompt = None,
    prompts: Prompts = None,
    data: options.Data = None,
    limit: Limit = None,
    n: Number = 1,
    overlong: options.Overlong = "refuse",
    negative: Negative = None,
    height: Height = None,
    width: Width = None,
    seed: options.Seed = None,
    guidance: options.Guidance = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    model: options.Model = "tiny",
    tree: options.Tree = "auto",
    verifier: options.Verifier = "auto",
    drafter: options.Drafter = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    compile: options.Compile = "auto",
    numerics: options.Numerics = "row-invariant",
    weights: options.Weights = "auto",
    out: Out = None,
    force: Force = False,
    batch: scale_options.Batch = 1,
    workers: scale_options.Workers = None,
    format: scale_options.ImageFormat = "folder",
    shard_size: scale_options.ShardSize = 1000,
    ray: scale_options.Ray = None,
    actors: scale_options.Actors = "1",
    gpus_per_actor: scale_options.ActorGpus = None,
    compare: Compare = False,
    compare_image: CompareImage = None,
    heatmap: Heatmap = None,
    trace: Trace = None,
    sheet: Sheet = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw an image from words, or many into a folder. The same seed gives the same image, however it is drafted."""
    selected = GenerateOptions(
        prompts=read_prompts(prompt, prompts, data, limit), from_file=prompts is not None, images_per_prompt=n,
        seed=seed, overlong=overlong, out=out, force=force, batch=batch, format=format, shard_size=shard_size,
        scale=ScaleOptions(workers, ray, actors, gpus_per_actor),
        compare=compare or compare_image is not None, compare_image=compare_image,
        heatmap=heatmap, trace=trace, sheet=sheet, json=json, quiet=quiet,
    )  # fmt: skip
    selected.check()
    options.check_sampling_options(guidance, temperature, top_k, top_p, seed)
    if quiet:
        logging.getLogger("underdraw").setLevel(logging.ERROR)  # until `main` returns
    loading: dict[str, Any] = {
        "model": model, "drafter": drafter, "tree": tree, "verifier": verifier, "device": device, "dtype": dtype,
        "compile": compile, "numerics": numerics, "weights": weights,
    }  # fmt: skip
    request_options: dict[str, Any] = {
        "negative_prompt": negative, "height": height, "width": width, "guidance_scale": guidance,
        "temperature": temperature, "top_k": top_k, "top_p": top_p,
    }  # fmt: skip
    if selected.into_folder:
        from underdraw.cli.generate_folder import generate_folder

        generate_folder(selected, loading, request_options)
    else:
        from underdraw.cli.generate_image import generate_image

        pipe, load_seconds = options.load_pipeline(**loading, silent=selected.silent)
        generate_image(pipe, selected, request_options, load_seconds)


def read_prompts(prompt: str | None, source: str | None, data: Path | None, limit: int | None) -> Iterable[PromptRow]:
    """The prompts of the command line: the argument, or those of a file, which is read as it is needed."""
    if (prompt is None) == (source is None):
        raise ConfigError("give either a prompt or --prompts FILE; see underdraw generate --help.")
    if limit is not None and source is None:
        raise ConfigError("--limit counts prompts of a file; use it with --prompts.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} leaves no prompts; use at least 1.")
    from underdraw.prompts import PromptFile, PromptRow

    if source is None:
        return [PromptRow("0", prompt or "")]
    return PromptFile(source, data, limit)
