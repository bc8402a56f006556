"""Where tokens are accepted, and which neighbourhood predicts it: from the cells of a run of the preset `kinds`.

    underdraw bench --preset kinds --prompts benchmarks/prompts_kinds.json --limit 10 --temperature 1 --out run
    python benchmarks/acceptance_maps.py run --out docs/images/row-above.png --json benchmarks/results/row-above.json

The figure shows a photo and a sprite on a plain background with the tokens accepted in every cell. The table has the
correlation between the accepted length of a pass and the mean accepted length in the neighbourhoods that a policy can
look at: the row above, the cells to the left, above-right, and the pass before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.bench.results import ResultFolder
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.io import atomic_write_json, unpack_grid
from underdraw.layout import Layout
from underdraw.policies.running_sums import accepted_sums

METHOD = "Jacobi tree, row above"
INITS = ("above", "left", "above-right", "both", "previous")


def read_histories(folder: ResultFolder, method: str, temperature: float) -> list[tuple[dict[str, Any], History]]:
    """Row and history of every picture of a method; a history has what `neighbourhood` and heat maps read."""
    pictures = []
    for key, cells in sorted(folder.cells.items(), key=lambda item: item[0].prompt):
        if (key.method, key.temperature, key.repeat) != (method, temperature, 0):
            continue
        grids = {
            name: unpack_grid(cells[name], str(folder.path)) for name in ("codes", "accepted", "pass_index", "depth")
        }
        height, width = grids["codes"].shape
        history = History(Layout(height, width, range(int(grids["codes"].max()) + 1)))
        for name, values in (("tokens", grids["codes"]), *((n, g) for n, g in grids.items() if n != "codes")):
            getattr(history, name)[:] = values.reshape(-1)
        history.passes = int(history.pass_index.max()) + 1
        pictures.append((folder.rows[key], history))
    if not pictures:
        raise ConfigError(f"{folder.path} has no cells of {method!r} at T={temperature:g}; run the preset kinds again.")
    return pictures


def pass_starts(history: History) -> list[tuple[int, int]]:
    """The root's step and the accepted length of every pass after the first two rows."""
    drawn = np.flatnonzero(history.pass_index >= 0)
    _, first = np.unique(history.pass_index[drawn], return_index=True)
    starts = [(int(drawn[index]) - 1, int(history.accepted[drawn[index]])) for index in first]
    return [(step, accepted) for step, accepted in starts if step >= 2 * history.layout.row_stride]


def seen_before(history: History, step: int, init: str) -> float:
    """Mean accepted length in a neighbourhood of the root, as a policy sees it."""
    sums = accepted_sums(history, step)
    return sums.mean_accepted(sums.neighbourhood(init)) or 0.0


def correlations(histories: list[History]) -> dict[str, float]:
    """Correlation of accepted lengths with what each neighbourhood predicts, over all passes of the pictures."""
    starts = [(history, step, accepted) for history in histories for step, accepted in pass_starts(history)]
    actual = np.array([accepted for _, _, accepted in starts], dtype=np.float64)
    result = {}
    for init in INITS:
        predicted: NDArray[np.float64] = np.array([seen_before(history, step, init) for history, step, _ in starts])
        has_spread = len(starts) > 2 and predicted.std() > 0 and actual.std() > 0
        value = float(np.corrcoef(np.log1p(predicted), np.log1p(actual))[0, 1]) if has_spread else 0.0
        result[init] = round(value, 3)
    return {**result, "passes": len(starts)}


def draw(pictures: list[tuple[dict[str, Any], History]], out: Path, model: str) -> None:
    """A photo and an emoji, each with its map of accepted tokens."""
    from PIL import Image

    from underdraw import Pipeline
    from underdraw.images import HEATMAP_PANELS, heatmap, save_png

    pipe = Pipeline.from_pretrained(model)
    panels = [panel for panel in HEATMAP_PANELS if panel.field == "accepted"]
    sheets = []
    for kind in ("photo", "plain"):
        _, history = next(item for item in pictures if item[0]["kind"] == kind)
        sheets.append(heatmap(history, pipe.decode_images([history])[0], panels))
    size = (sum(sheet.width for sheet in sheets), max(sheet.height for sheet in sheets))
    joined = Image.new("RGB", size, "white")
    joined.paste(sheets[0], (0, 0))
    joined.paste(sheets[1], (sheets[0].width, 0))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_png(joined, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, metavar="PNG")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="tiny", help="whose image tokenizer decodes the codes")
    parser.add_argument("--method", default=METHOD)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    folder = ResultFolder.read(options.run)
    pictures = read_histories(folder, options.method, options.temperature)
    kinds = dict.fromkeys(row["kind"] for row, _ in pictures)
    table = {kind: correlations([history for row, history in pictures if row["kind"] == kind]) for kind in kinds}
    table["all"] = correlations([history for _, history in pictures])
    for kind, values in table.items():
        print(f"{kind:10s} " + "  ".join(f"{name} {value}" for name, value in values.items()))
    if options.json is not None:
        facts = {"method": options.method, "temperature": options.temperature, "pictures": len(pictures)}
        facts |= {"dtype": folder.info["settings"]["dtype"], "machine": folder.info["machine"]}
        atomic_write_json(options.json, {"kind": "neighbourhoods", **facts, "kinds": table})
    if options.out is not None:
        draw(pictures, options.out, options.model)


if __name__ == "__main__":
    main()
