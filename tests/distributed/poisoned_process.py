"""A worker process that ends when it is asked to draw the prompt "poison", for `test_runs`."""

from __future__ import annotations

import os

from underdraw.distributed import process
from underdraw.distributed.planned_images import FailedImage, PlannedImage
from underdraw.distributed.worker import ImageWorker

add = ImageWorker.add


def add_unless_poison(self: ImageWorker, image: PlannedImage) -> FailedImage | None:
    if image.prompt == "poison":
        os._exit(9)
    return add(self, image)


ImageWorker.add = add_unless_poison  # type: ignore[method-assign]
process.main()
