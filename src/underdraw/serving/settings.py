"""ServerSettings: limits and access of the server, checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from underdraw.errors import ConfigError

MAX_SLOTS, MAX_QUEUE = 256, 100_000


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server listens, whom it serves and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 8  # images drawn at once
    queue: int = 64  # images that may wait
    timeout: float = 600.0  # seconds from a request to its last byte
    body_timeout: float = 10.0  # seconds that a client may take to send its request
    max_body: int = 256 * 1024  # bytes
    api_key: str | None = None
    log_prompts: bool = False
    page: bool = True

    def __post_init__(self) -> None:
        checks = (
            ("--port", self.port, 0, 65535),
            ("--slots", self.slots, 1, MAX_SLOTS),
            ("--queue", self.queue, 0, MAX_QUEUE),
        )
        for name, value, low, high in checks:
            if not low <= value <= high:
                raise ConfigError(f"{name} {value} is out of range; use {low} to {high}.")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"--timeout {self.timeout} is not allowed; use a number of seconds above 0.")
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isascii()):
            raise ConfigError("the API key must have at least 8 characters, all of them ASCII.")
