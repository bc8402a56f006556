"""Measure everything that the embedded model's card shows: contact sheets, subjects, variety, colours, speed.

    python benchmarks/card.py --pack pack192.bin [--drafter FOLDER] [--only sheet subjects ...]

Run it in the root of the repository. --only selects parts; the pages are generated each time. Times (`targets`) need a
machine without other load.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

RESULTS = "benchmarks/results/tiny"
PROMPTS = "benchmarks/prompts64.txt"
PAGES = ("src/underdraw/assets/tiny/README.md", "docs")


def commands(pack: Path, drafter: str, pictures: Path, batch: int) -> dict[str, list[str]]:
    """The module and arguments of every part."""
    drafter_option, pack_option = ["--drafter", drafter], ["--pack", str(pack)]
    common = ["--prompts", PROMPTS, *drafter_option]
    folder = ["-o", str(pictures), "--seed", "0", "--batch", str(batch), "--force"]
    return {
        "prompts": ["recipes.tiny.combinations", *pack_option, "--prompts", PROMPTS],
        "sheet": ["underdraw", "generate", *common, *folder, "--sheet", "docs/images/tiny-sheet.jpg"],
        "statistics": [  # of the acceptance of a trained drafter
            "underdraw", "evaluate", "statistics", "--prompts", PROMPTS, "-f", "--out", f"{RESULTS}/statistics.json",
            "--drafter", "drafter-eagle" if drafter == "auto" else drafter,
        ],
        "loss": ["recipes.tiny.grade_loss", *pack_option, "--into", f"{RESULTS}/statistics.json"],
        "subjects": [
            "recipes.tiny.grade_subjects", *pack_option, *drafter_option, "--batch", str(batch),
            "--out", f"{RESULTS}/subjects.json", "--sheet", str(pictures / "subjects.png"),
        ],
        "variety": [
            "recipes.tiny.grade_variety", *drafter_option, "--batch", str(batch), "--out", f"{RESULTS}/variety.json",
        ],
        "defaults": [
            "recipes.tiny.grade_variety", *drafter_option, "--batch", str(batch),
            "--temperature", "0.7", "--top-p", "0.9",
            "--out", f"{RESULTS}/variety-defaults.json", "--sheet", "docs/images/tiny-seeds.jpg",
        ],
        "colours": [
            "recipes.tiny.grade_colours", *drafter_option, "--batch", str(batch), "--seed", "0",
            "--out", f"{RESULTS}/colours.json", "--sheet", str(pictures / "colours.jpg"),
        ],
        "targets": ["recipes.tiny.targets", *common, "--out", "benchmarks/results/targets/cpu"],
        "figures": ["underdraw", "plot", "benchmarks/results/targets/cpu"],
        **{page: ["underdraw", "plot", "--page", page] for page in PAGES},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pack", type=Path, required=True, help="training pack")
    parser.add_argument("--drafter", default="auto", help="auto, jacobi, or a drafter's folder")
    parser.add_argument("--pictures", type=Path, default=Path("pictures"), help="folder of the contact sheet's images")
    parser.add_argument("--batch", type=int, default=1, help="batch size")
    parser.add_argument(
        "--only", nargs="*", metavar="PART", help="prompts, sheet, statistics, loss, subjects, variety, defaults, ..."
    )
    options = parser.parse_args()
    if not Path(PROMPTS).is_file():
        raise SystemExit("error: run this in the root of the repository, where benchmarks and docs are.")
    parts = commands(options.pack, options.drafter, options.pictures, options.batch)
    if unknown := set(options.only or ()) - set(parts):
        raise SystemExit(f"error: unknown part {unknown.pop()!r}; use {', '.join(parts)}.")
    options.pictures.mkdir(parents=True, exist_ok=True)
    Path(RESULTS).mkdir(parents=True, exist_ok=True)
    for name, words in parts.items():
        if options.only and name not in options.only and name not in PAGES:
            continue
        print(f"+ {shlex.join(words)}", flush=True)
        if code := subprocess.run([sys.executable, "-m", *words]).returncode:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
