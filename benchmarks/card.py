"""Everything that the embedded model's card shows, measured anew: the sheet, subjects, statistics, targets, the pages.

    python benchmarks/card.py --pack pack192.bin [--drafter FOLDER] [--only sheet subjects ...]

In the root of the repository. Parts can be run apart with --only; the pages are written anew each time. Times
(`targets`) want a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

RESULTS = "benchmarks/results/tiny"
PROMPTS = "benchmarks/prompts64.txt"
PAGES = ("src/underdraw/assets/tiny/README.md", "docs/lab.md", "docs/experiments.md")


def commands(pack: Path, drafter: str, pictures: Path, batch: int) -> dict[str, list[str]]:
    """The command of every part, without the interpreter."""
    parts = ["--drafter", drafter]
    common = ["--prompts", PROMPTS, *parts]
    given = ["--pack", str(pack)]
    drawn = ["-o", str(pictures), "--seed", "0", "--batch", str(batch), "--force"]
    return {
        "prompts": ["recipes.tiny.combinations", *given, "--prompts", PROMPTS],
        "sheet": ["underdraw", "generate", *common, *drawn, "--sheet", "docs/images/tiny-sheet.jpg"],
        "statistics": ["underdraw", "evaluate", "statistics", *common, "--out", f"{RESULTS}/statistics.json"],
        "loss": ["recipes.tiny.grade_loss", *given, "--into", f"{RESULTS}/statistics.json"],
        "subjects": [
            "recipes.tiny.grade_subjects", *given, *parts, "--batch", str(batch),
            "--out", f"{RESULTS}/subjects.json", "--sheet", str(pictures / "subjects.png"),
        ],
        "targets": ["recipes.tiny.targets", *common, "--out", "benchmarks/results/targets/cpu"],
        "figures": ["underdraw", "plot", "benchmarks/results/targets/cpu"],
        **{page: ["underdraw", "plot", "--page", page] for page in PAGES},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pack", type=Path, required=True, help="training pack")
    parser.add_argument("--drafter", default="auto", help="auto (the model's own, or jacobi), jacobi, or a folder")
    parser.add_argument("--pictures", type=Path, default=Path("pictures"), help="folder for the sheet's pictures")
    parser.add_argument("--batch", type=int, default=1, help="pictures drawn together")
    parser.add_argument(
        "--only", nargs="*", metavar="PART", help="prompts, sheet, statistics, loss, subjects, targets, ..."
    )
    options = parser.parse_args()
    if not Path(PROMPTS).is_file():
        raise SystemExit("error: run this in the root of the repository, where benchmarks and docs are.")
    parts = commands(options.pack, options.drafter, options.pictures, options.batch)
    if unknown := set(options.only or ()) - set(parts):
        raise SystemExit(f"error: there is no part {unknown.pop()!r}; use {', '.join(parts)}.")
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
