"""ServerSettings: limits and access of the server, checked before a model is loaded."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from underdraw.errors import ConfigError
from underdraw.ranges import check_number

MAX_SLOTS, MAX_QUEUE = 256, 100_000
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server listens, whom it serves and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()  # names that clients may call the server by, besides loopback's
    warm_up: bool = True  # run some passes before the server is ready
    slots: int = 8  # images drawn at once
    queue: int = 64  # images that may wait
    timeout: float = 600.0  # seconds from a request to its last byte
    body_timeout: float = 10.0  # seconds that a client may take to send its request
    max_body: int = 512 * 1024  # bytes: a prompt of 32,000 emoji, escaped, has 384,000
    api_key: str | None = None
    log_prompts: bool = False
    page: bool = True

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ConfigError("--host is empty; use 127.0.0.1 for this machine alone, or 0.0.0.0 for all.")
        check_number("--port", self.port, 0, 65535)
        check_number("--slots", self.slots, 1, MAX_SLOTS)
        check_number("--queue", self.queue, 0, MAX_QUEUE)
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"--timeout {self.timeout} is not allowed; use a number of seconds above 0.")
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"--allowed-host {name!r} is not a name or an address; use one such as draw.example.org, "
                    "without http:// and port."
                )
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isascii()):
            raise ConfigError("the API key must have at least 8 characters, all of them ASCII.")

    @property
    def address(self) -> str:
        """The host as part of an address that a browser on this machine can open."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host

    @property
    def is_open_to_all(self) -> bool:
        """Whether other machines can use the server without a key."""
        return self.api_key is None and not _is_loopback(self.host)

    def accepts_host(self, header: str) -> bool:
        """Whether a request with this Host header may be answered.

        A page of another site can give its name the address 127.0.0.1 (DNS rebinding) and would then be of the same
        origin as this server. So a server on loopback answers to names of loopback and to those in `allowed_hosts`.
        """
        if not self.allowed_hosts and not _is_loopback(self.host):
            return True
        name = header.rsplit("]", 1)[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
        allowed = (*LOOPBACK, self.host, *self.allowed_hosts)
        return name.rstrip(".").lower() in {entry.lower() for entry in allowed}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
