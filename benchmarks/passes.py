"""Time target passes by their number of nodes on a CPU: `python benchmarks/passes.py`.

The passes are those of a half-finished image with guidance. Minimum and median of several are shown: a busy machine
moves the median.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.loading import load_model, resolve_placement
from underdraw.tree import chain

NODES = (1, 4, 8, 12, 16, 24, 32, 48, 64)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--times", type=int, default=15, help="passes of each size")
    options = parser.parse_args()
    model = load_model(open_checkpoint(options.model), resolve_placement("cpu", options.dtype))
    size = model.sizes[0]
    layout, target = model.make_layout(size), model.target
    session = target.open([model.make_prompt("a ghost", None, size)], layout, guidance=model.defaults.guidance)
    rows, half = len(session.lengths), layout.start + layout.cells // 2
    steps = torch.arange(layout.start, half).expand(rows, -1)
    drawn = torch.randint(layout.codes.start, layout.codes.stop, (1, steps.shape[1])).expand(rows, -1)
    counts = [steps.shape[1]] * rows
    session.decoder.append(target.net.embed(drawn), session.rope_table(steps), torch.tensor(counts), counts)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {model.placement.dtype}, {rows} rows")
    for count in options.nodes:
        tree = chain(torch.randint(layout.codes.start, layout.codes.stop, (1, count)))
        seconds = []
        for _ in range(options.times):
            start = time.perf_counter()
            session.forward(tree, torch.tensor([half]))
            seconds.append(time.perf_counter() - start)
            session.cache.drop_nodes()
        print(
            f"{count:3d} nodes  {1000 * min(seconds):6.1f} ms min  {1000 * statistics.median(seconds):6.1f} ms median"
        )


if __name__ == "__main__":
    main()
