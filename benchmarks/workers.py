"""Overhead of the worker layer: the same images by one process and by several workers with the same total of threads.

    python benchmarks/workers.py                        # two workers with one thread each; minutes on two idle cores
    python benchmarks/workers.py --images 4 --rounds 1  # a trial

Loading is not counted: it is paid once per run. The rounds alternate, and the median of each way is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

PROMPT = "a fox, 3D render, on a sky blue background"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", default="chain:depth=24")
    parser.add_argument("--drafter", default="jacobi")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.workers)  # of one process; workers have one each

    from underdraw.distributed.local import ThisProcess, WorkerProcesses
    from underdraw.distributed.planned_images import DrawnImage, PlannedImage, WorkerOptions, Workers
    from underdraw.distributed.worker import ImageWorker

    loading = {"model": options.model, "drafter": options.drafter, "tree": options.tree, "device": "auto"}
    settings = WorkerOptions(loading, {}, slots=1, quiet=True)
    images = [PlannedImage(index, str(index), 0, PROMPT, index) for index in range(options.images)]
    ways: dict[str, Workers] = {
        "one process": ThisProcess(ImageWorker.load(settings)),
        f"{options.workers} workers": WorkerProcesses(settings, options.workers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        trees = {name: workers.start().tree for name, workers in ways.items()}
        for number in range(options.rounds + 1):  # the first one warms up
            for name, workers in ways.items():
                start = time.perf_counter()
                part = images[: options.workers] if number == 0 else images
                drawn = sum(isinstance(event, DrawnImage) for event in workers.draw(part, trees[name]))
                assert drawn == len(part)
                if number:
                    seconds[name].append(time.perf_counter() - start)
    finally:
        for workers in ways.values():
            workers.close()
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    alone, together = medians.values()
    record = {"images": options.images, "seconds": medians, "workers_over_process": round(together / alone, 4)}
    print(json.dumps(record) if options.json else f"{record['images']} images: {medians}, ratio {together / alone:.3f}")


if __name__ == "__main__":
    main()
