"""`underdraw serve`: OpenAI's images API and a page that shows a picture while it is drawn."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from underdraw.cli import options
from underdraw.cli.signals import Terminated
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw serve

underdraw serve --model leloy/Anole-7b-v0.1-hf --device cuda --slots 16 --port 9000

UNDERDRAW_API_KEY=something-long underdraw serve --host 0.0.0.0 --queue 200 --timeout 120
"""
API_KEY_VARIABLE = "UNDERDRAW_API_KEY"
access_option = partial(typer.Option, rich_help_panel="Access")
limit_option = partial(typer.Option, rich_help_panel="Limits")
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Host = Annotated[
    str,
    access_option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 lets other machines in, so set an API key with it.",
    ),
]
Port = Annotated[int, access_option("--port", metavar="NUMBER", help="Port to listen on; 0 takes a free one.")]
AllowedHost = Annotated[
    list[str] | None,
    access_option(
        "--allowed-host",
        metavar="NAME",
        help="Another name that clients may call this server by, as a proxy passes it on; may be repeated.",
    ),
]
ApiKey = Annotated[
    str | None,
    access_option(
        metavar="KEY",
        envvar=API_KEY_VARIABLE,
        help="Clients must send this as a bearer token. The environment variable keeps it out of process lists.",
    ),
]
Page = Annotated[bool, access_option("--page/--no-page", help="Serve the page at /, or the API alone.")]
Slots = Annotated[int, limit_option("--slots", metavar="COUNT", help="Images that are drawn at once.")]
Queue = Annotated[int, limit_option("--queue", metavar="COUNT", help="Images that may wait; further requests get 429.")]
Timeout = Annotated[
    float,
    limit_option(metavar="SECONDS", help="Longest time of a request, waiting included; then it gets 504."),
]
WarmUp = Annotated[
    bool,
    limit_option(
        "--warm-up/--no-warm-up",
        help="Run some passes before the server is ready, so that the first picture takes no longer than others.",
    ),
]
LogPrompts = Annotated[
    bool, options.output_option("--log-prompts", help="Write prompts into the log lines of requests.")
]
Quiet = Annotated[bool, options.output_option("--quiet", "-q", help="No log lines of requests, only failures.")]


@app.command(epilog=EXAMPLES)
@options.grouped
def serve(
    loading: options.PipelineOptions,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    allowed_host: AllowedHost = None,
    api_key: ApiKey = None,
    page: Page = True,
    slots: Slots = 8,
    queue: Queue = 64,
    timeout: Timeout = 600.0,
    warm_up: WarmUp = True,
    log_prompts: LogPrompts = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model: OpenAI's images API, and a page that shows a picture while it is drawn."""
    from underdraw.extras import require_package
    from underdraw.serving.settings import ServerSettings

    if api_key is None and API_KEY_VARIABLE in os.environ:  # as after $(openssl ...) without openssl
        raise ConfigError(f"{API_KEY_VARIABLE} is empty; set it to at least 8 characters, or unset it.")
    settings = ServerSettings(
        host=host, port=port, slots=slots, queue=queue, timeout=timeout, api_key=api_key,
        log_prompts=log_prompts, page=page, allowed_hosts=tuple(allowed_host or ()), warm_up=warm_up,
    )  # fmt: skip
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require_package(package, "serve", "underdraw serve")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("underdraw").setLevel(logging.WARNING if quiet else logging.INFO)

    def on_ready(address: str, warm_up_seconds: float | None) -> None:
        what = "page and API" if settings.page else "API"
        warm = "" if warm_up_seconds is None else f", warmed up in {warm_up_seconds:.1f} s"
        count = f"{slots} slot{'s' if slots > 1 else ''}"
        print(f"{pipe.model.name} on {pipe.device.type}, {count}{warm}: {what} at {address}", flush=True)

    with suppress(Terminated):  # while packages and model are loaded; the server answers signals itself
        from underdraw.models.loading import UnloadedModel
        from underdraw.serving.server import serve as run_server

        pipe, _ = options.load_pipeline(**asdict(loading), check=UnloadedModel.check_pixels, silent=quiet)
        run_server(pipe, settings, on_ready)
    print("stopped.", flush=True)
