"""`underdraw generate`: images from a prompt or a file of prompts.

Checks the options that need no model, then loads the model; `generate_image` and `generate_folder` build the request
and write the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underdraw.cli import options
from underdraw.cli.options import output_option, prompts_option
from underdraw.cli.outputs import check_file, check_folder, check_outputs, check_png, real_path
from underdraw.cli.scale_options import ScaleOptions
from underdraw.errors import ConfigError
from underdraw.extras import require_package
from underdraw.ranges import MAX_IMAGES

if TYPE_CHECKING:
    from underdraw.prompts import PromptRow

EXAMPLES = """
Examples:

underdraw generate "a fox, 3D render, on a sky blue background" -o fox.png --seed 2

underdraw generate "a fox, 3D render, on a sky blue background" -o fox.png --compare-image both.png --heatmap heat.png

underdraw generate "a house" --n 4 -o houses/

underdraw generate --prompts prompts.txt -o pictures/ --batch 4 --json

underdraw generate --prompts prompts.jsonl -o shards/ --format webdataset --workers 8 --batch 8

underdraw generate "a tree" --tree adjacency:init=both,nodes=24 --temperature 0 -o tree.png
"""
SHEET_SUFFIXES = (".jpg", ".jpeg", ".png")
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to draw, in a few words.")]
Prompts = Annotated[
    str | None,
    prompts_option(
        metavar="FILE|parti|coco",
        help="Many prompts: a text file with one a line, JSON lines, CSV or Parquet with the column prompt (and id, "
        "seed), a TSV of PartiPrompts, a captions JSON of COCO, or the published sets by name. The images go into the "
        "folder --out; run the command again to resume it.",
    ),
]
Limit = Annotated[int | None, prompts_option(min=1, metavar="COUNT", help="Only the first COUNT prompts of the file.")]
Number = Annotated[int, prompts_option("--n", "-n", min=1, max=MAX_IMAGES, metavar="COUNT", help="Images per prompt.")]
Negative = Annotated[str | None, prompts_option("--negative", metavar="TEXT", help="What guidance leads away from.")]
Height = Annotated[int | None, prompts_option(metavar="PIXELS", help="A height that the model supports.")]
Width = Annotated[int | None, prompts_option(metavar="PIXELS", help="A width that the model supports.")]
Out = Annotated[
    Path | None,
    output_option(
        "--out",
        "-o",
        metavar="PATH",
        help="A PNG file; a folder with --prompts or several images. Without it, a name made of prompt and seed.",
    ),
]
Force = Annotated[bool, output_option("--force", "-f", help="Replace existing files; start a folder again.")]
Heatmap = Annotated[
    Path | None,
    output_option(
        metavar="PNG",
        help="Also write, for every cell: accepted tokens, depth of the tree, entropy and top-1 probability.",
    ),
]
Trace = Annotated[
    Path | None,
    output_option(
        metavar="JSON", help="Also write the trees and their accepted tokens, for: underdraw bench engine --replay."
    ),
]
Sheet = Annotated[
    Path | None,
    output_option(
        metavar="JPG|PNG", help="Also write small copies of all images of the folder on one sheet, with their prompts."
    ),
]
Compare = Annotated[
    bool,
    output_option(
        "--compare",
        help="Draw the same seed without speculation too: are the pixels identical, and how much faster was it?",
    ),
]
CompareImage = Annotated[
    Path | None,
    output_option(metavar="PNG", help="Also write both images side by side with their times; implies --compare."),
]


@dataclass(frozen=True)
class PromptOptions:
    """What to draw."""

    prompt: Prompt = None
    prompts: Prompts = None
    data: options.Data = None
    limit: Limit = None
    n: Number = 1
    overlong: options.Overlong = "refuse"
    seed: options.Seed = None

    def prompt_rows(self) -> Iterable[PromptRow]:
        """The argument, or the prompts of the file, which is streamed."""
        if (self.prompt is None) == (self.prompts is None):
            raise ConfigError("give either a prompt or --prompts FILE; see underdraw generate --help.")
        if self.limit is not None and self.prompts is None:
            raise ConfigError("--limit counts prompts of a file; use it with --prompts.")
        from underdraw.prompts import PromptFile, PromptRow

        if self.prompts is None:
            return [PromptRow("0", self.prompt or "")]
        return PromptFile(self.prompts, self.data, self.limit)


@dataclass(frozen=True)
class RequestGroup:
    """Arguments of `Pipeline.request`, by their names there."""

    negative_prompt: Negative = None
    height: Height = None
    width: Width = None
    guidance_scale: options.Guidance = None
    temperature: options.Temperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None


@dataclass(frozen=True)
class FileOptions:
    """What is written where."""

    out: Out = None
    force: Force = False
    compare: Compare = False
    compare_image: CompareImage = None
    heatmap: Heatmap = None
    trace: Trace = None
    sheet: Sheet = None


@dataclass(frozen=True)
class GenerateOptions(
    options.OutputOptions, ScaleOptions, FileOptions, options.PipelineOptions, RequestGroup, PromptOptions
):
    """All options of `generate`."""

    @property
    def into_folder(self) -> bool:
        """Whether --out is a folder of images."""
        return self.prompts is not None or self.n > 1

    @property
    def is_compared(self) -> bool:
        """Whether to draw every image without speculation too."""
        return self.compare or self.compare_image is not None

    def loading(self) -> dict[str, Any]:
        """Arguments of `Pipeline.from_pretrained`."""
        return options.values_of(options.PipelineOptions, self)

    def request(self) -> dict[str, Any]:
        """Arguments of `Pipeline.request` that all images share."""
        return options.values_of(RequestGroup, self)

    def check(self) -> None:
        """Raise for options that exclude each other and for paths that cannot be written."""
        self.prompt_rows()
        self.check_scale()
        if self.into_folder:
            self._check_folder()
        else:
            self._check_files()
        options.check_sampling_options(self.guidance_scale, self.temperature, self.top_k, self.top_p, self.seed)

    def _check_folder(self) -> None:
        single = {"--heatmap": self.heatmap, "--compare-image": self.compare_image, "--trace": self.trace}
        for name, path in single.items():
            if path is not None:
                raise ConfigError(f"{name} is for one image; leave it out, or draw one prompt with --n 1.")
        if self.out is None:
            raise ConfigError("several images need a folder; name it with --out FOLDER.")
        if self.out.suffix.lower() == ".png" or (self.out.exists() and not self.out.is_dir()):
            raise ConfigError(f"several images need a folder and {self.out} is a file; name a folder with --out.")
        if self.format != "folder" and self.sheet is not None:
            raise ConfigError("--sheet shows PNG files; leave it out, or use --format folder.")
        if self.format == "parquet":
            require_package("pyarrow", "formats", "--format parquet")
        if self.sheet is not None:
            self._check_sheet(self.sheet, self.out)
        check_folder(self.out)

    def _check_files(self) -> None:
        many = {
            "--sheet": self.sheet,
            "--workers": self.workers,
            "--batch": self.batch > 1,
            "--ray": self.ray,
            "--format": self.format != "folder",
        }
        for name, value in many.items():
            if value:
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
        check_file(sheet, force=self.force, may_replace=is_contact_sheet)

    def image_path(self, seed: int) -> Path:
        """Where a single image goes: --out, or a name made of prompt and seed."""
        if self.out is not None:
            return self.out
        words = "-".join(re.findall(r"\w+", str(self.prompt).lower()))[:60].encode()[:120].decode(errors="ignore")
        path = Path(f"{words.strip('-') or 'image'}-{seed}.png")
        others = {"--heatmap": self.heatmap, "--compare-image": self.compare_image, "--trace": self.trace}
        check_outputs({**others, "the image": path}, force=self.force)
        return path


@app.command(epilog=EXAMPLES)
@options.grouped
def generate(selected: GenerateOptions) -> None:
    """Draw an image from words, or many into a folder. The same seed gives the same image, however it is drafted."""
    selected.check()
    if selected.into_folder:
        from underdraw.cli.generate_folder import generate_folder

        generate_folder(selected)
    else:
        from underdraw.cli.generate_image import generate_image

        size = selected.height, selected.width
        pipe, load_seconds = options.load_pipeline(**selected.loading(), size=size, silent=selected.silent)
        generate_image(pipe, selected, load_seconds)
