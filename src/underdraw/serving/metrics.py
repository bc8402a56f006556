"""Metrics of the server in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from underdraw.serving.engine_thread import EngineThread, Event, Failed, Finished, PartialPicture, Pass

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


class Metrics:
    """Counters of one server; each has a registry of its own, so that servers in one process do not mix."""

    def __init__(self, engine: EngineThread) -> None:
        registry = self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Iterable[float], labels: Iterable[str] = ()) -> Histogram:
            return Histogram(f"underdraw_{name}", text, tuple(labels), buckets=tuple(buckets), registry=registry)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"underdraw_{name}", text, tuple(labels), registry=registry)

        self.requests = counter("requests", "HTTP requests.", ("route", "status"))
        text = "From a request to the last byte of its answer."
        self.request_seconds = histogram("request_seconds", text, SECONDS, ("route",))
        self.images = counter("images", "Images that left the server or failed.", ("status",))
        self.partial_images = counter("partial_images", "Partial images decoded.")
        self.tokens = counter("tokens", "Image tokens committed by passes.")
        self.passes = counter("passes", "Target passes, counted once per image.")
        self.tokens_per_pass = histogram("tokens_per_pass", "Tokens committed by a pass of an image.", TOKENS)
        self.queue_seconds = histogram("queue_seconds", "Time an image waited for a slot.", SECONDS)
        self.draw_seconds = histogram("draw_seconds", "Time an image spent in a slot.", SECONDS)
        for name, text in (("running", "Images in slots."), ("waiting", "Images in the queue.")):
            gauge = Gauge(f"underdraw_images_{name}", text, registry=registry)
            gauge.set_function(lambda name=name: getattr(engine, name))  # type: ignore[misc]
        Gauge("underdraw_slots", "Images that can be drawn at once.", registry=registry).set(engine.slots)
        engine.on_event = self.count

    def count(self, event: Event) -> None:
        """Count an event of the engine."""
        if isinstance(event, Pass):
            self.passes.inc()
            self.tokens.inc(len(event.result.tokens))
            self.tokens_per_pass.observe(len(event.result.tokens))
        elif isinstance(event, PartialPicture):
            self.partial_images.inc()
        elif isinstance(event, Finished):
            self.images.labels("finished").inc()
            self.queue_seconds.observe(event.image.queued_seconds)
            self.draw_seconds.observe(event.image.run_seconds)
        elif isinstance(event, Failed):
            self.images.labels("failed").inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
