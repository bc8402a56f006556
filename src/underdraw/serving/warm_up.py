"""Passes before the first request: measures, compiles and captures what would make the first pictures slow."""

from __future__ import annotations

from collections.abc import Callable

from underdraw.engine.scheduler import Scheduler

PASSES, PASSES_CAPTURED = 2, 6  # of each batch; a pass is captured when it comes for the second time


def warm_up(scheduler: Scheduler, should_stop: Callable[[], bool]) -> None:
    """Run a few passes with each number of slots and decode a picture; raises what makes drawing fail."""
    pipe, slots = scheduler.pipe, scheduler.slots
    counts = {1, slots}
    if pipe.graphs is not None:  # every size of a batch has buffers and graphs of its own
        counts |= {1 << power for power in range(slots.bit_length())}
    for count in sorted(counts):
        images = scheduler.add(pipe.sample_request(count), request_id="warm-up")
        for _ in range(PASSES if pipe.graphs is None else PASSES_CAPTURED):
            if should_stop():
                break
            for image in scheduler.step().finished:
                if image.error is not None:
                    raise image.error
        scheduler.cancel(images)
        scheduler.step()
        if should_stop():
            return
        pipe.decode_images([images[0].history])
