"""A run on a real Ray cluster of two nodes, one of which is killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_runs import PROMPTS, DrawRun, contents

from underdraw.distributed.local import ThisProcess
from underdraw.distributed.planned_images import DrawnImage, Event, WorkerOptions, image_seed
from underdraw.distributed.ray_data import RayActors
from underdraw.distributed.worker import ImageWorker

MEMORY = 80 * 2**20  # of an object store


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def test_run_survives_the_loss_of_a_node(
    cluster: Any, options: WorkerOptions, run_into: DrawRun, tmp_path: Path
) -> None:
    run_into(ThisProcess(ImageWorker.load(options)), tmp_path / "alone", "webdataset")
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    workers = RayActors(replace(options, slots=2), cluster.address, (1, 2))
    draw, drawn = workers.draw, 0

    def kill_node(images: Any, tree: str) -> Iterator[Event]:
        nonlocal drawn
        for event in draw(images, tree):
            drawn += isinstance(event, DrawnImage)
            if drawn == 10:
                cluster.remove_node(node, allow_graceful=False)
                drawn += 1
            yield event

    workers.draw = kill_node  # type: ignore[method-assign]
    try:
        result = run_into(workers, tmp_path / "ray", "webdataset")
    finally:
        workers.close()
    assert (result.drawn, result.failed) == (60, 0) and drawn >= 61
    assert contents(tmp_path / "ray") == contents(tmp_path / "alone")


def test_drawer_in_a_dataset(cluster: Any, options: WorkerOptions) -> None:
    import ray.data

    from underdraw.distributed import Drawer

    rows = [{"id": row.id, "prompt": row.prompt} for row in PROMPTS[:6]]
    arguments = {**options.pipeline, "seed": 7, "slots": 2}
    dataset = ray.data.from_items(rows).map_batches(
        Drawer, fn_constructor_kwargs=arguments, batch_size=3, concurrency=1, num_cpus=1
    )
    out = {row["id"]: row for row in dataset.take_all()}
    assert {name: row["seed"] for name, row in out.items()} == {row.id: image_seed(7, row.id, 0) for row in PROMPTS[:6]}
    assert all(row["image"].startswith(b"\x89PNG") and row["error"] is None for row in out.values())
