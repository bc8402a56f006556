"""What quantised weights change: greedy choices and KL with the context forced, and the distribution of whole images.

    python benchmarks/weights_quality.py benchmarks/results/weights/quality.json              # minutes on a GPU
    python benchmarks/weights_quality.py quality.json --limit 8 --pictures 1 --formats int8    # to try it

Draws the images of a prompt file with full and with quantised weights, same prompts and seeds, and with full weights
and other seeds as a control; then runs the kernel two-sample test of each against the full weights. Next to that,
`underdraw bench agreement` compares the distributions before every token along images of the full weights. The file is
written after every part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("int8", "fp8", "int4")
CONTROL = "full, other seeds"
CONTROL_SEED = 1000


def run(*words: object) -> str:
    """Output of an underdraw command."""
    command = [sys.executable, "-m", "underdraw", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Quality:
    """The record, and how its parts are measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.record: dict[str, Any] = {"kind": "weights", "model": Path(options.model).name, "test": [], "forced": []}

    def save(self) -> None:
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        self.options.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def draw(self, folder: Path, weights: str, seed: int = 0) -> None:
        limit = [] if self.options.limit is None else ["--limit", self.options.limit]
        prompts = ["--prompts", self.options.prompts, *limit, "--seed", seed, "--batch", self.options.batch]
        run("generate", *prompts, "--model", self.options.model, "--weights", weights, "-o", folder, "-q")

    def compare(self, name: str, folder: Path, full: Path) -> None:
        """The two-sample test of the images of a folder against those of the full weights."""
        text = run("evaluate", folder, "--against", full, "--metrics", "exact,test", "--json")
        result = json.loads(text.strip().splitlines()[-1])
        row = {"weights": name, "equal_codes": result["exact"]["equal_codes"], **result["test"]}
        self.record["test"].append({**row, "pictures": result["joined"]})
        self.save()

    def test_images(self, folder: Path) -> None:
        self.draw(folder / "full", "full")
        for weights in self.options.formats:
            self.draw(folder / weights, weights)
            self.compare(weights, folder / weights, folder / "full")
        self.draw(folder / "control", "full", CONTROL_SEED)
        self.compare(CONTROL, folder / "control", folder / "full")

    def compare_forced(self, folder: Path) -> None:
        """Equal greedy choices and KL along images of the full weights."""
        for weights in self.options.formats:
            out = folder / f"{weights}.json"
            run(
                "bench", "agreement", "--model", self.options.model, "--weights", weights, "--pictures",
                self.options.pictures, "--nodes", 8, "--batch", 1, "--temperature", self.options.temperature,
                "--tokens", 24, "--out", out, "-q",
            )  # fmt: skip
            result = json.loads(out.read_text())
            ((dtype, quality),) = result["quality"].items()
            self.record.update(machine=result["machine"], dtype=dtype, guidance=result["guidance"])
            self.record["forced"].append({"weights": weights, "temperature": self.options.temperature, **quality})
            self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=Path, default=ROOT / "benchmarks" / "prompts64.txt")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--pictures", type=int, default=4, help="images along which distributions are compared")
    parser.add_argument("--temperature", type=float, default=0.7, help="of these images")
    quality = Quality(parser.parse_args())
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(part, Path(name)) for part in (quality.test_images, quality.compare_forced)]
        for part in parts:
            part.result()
    print(json.dumps(quality.record))


if __name__ == "__main__":
    main()
