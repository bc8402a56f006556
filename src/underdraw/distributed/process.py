"""`python -m underdraw.distributed.process FD`: the worker process that `local.WorkerProcesses` starts.

It ends when its parent closes the connection or dies, so a killed run leaves no process behind.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from underdraw.errors import UnderdrawError

if TYPE_CHECKING:
    from underdraw.distributed.worker import ImageWorker

REPORT_SECONDS = 0.3  # between two reports of progress


def main() -> None:
    """Serve until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        options, number = connection.recv()
        if options.quiet:
            logging.getLogger("underdraw").setLevel(logging.ERROR)
        try:
            from underdraw.distributed.worker import ImageWorker

            worker = ImageWorker.load(options, number)
            connection.send(worker.describe())
        except UnderdrawError as error:
            connection.send(error)
            return
        serve(connection, worker)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        pass


def serve(connection: Connection[Any, Any], worker: ImageWorker) -> None:
    """Draw what the parent sends, one pass at a time."""
    from underdraw.distributed.planned_images import Progress

    tokens, passes, reported = 0, 0, time.monotonic()
    while True:
        while not worker.images or connection.poll():
            kind, content = connection.recv()
            if kind == "check":
                connection.send(worker.check(content))
            elif kind == "tree":
                worker.set_tree(content)
            else:
                for image in content:
                    if failed := worker.add(image):
                        connection.send(failed)
        for event in worker.step():
            if isinstance(event, Progress):
                tokens, passes = tokens + event.tokens, passes + event.passes
            else:
                connection.send(event)
        if passes and (time.monotonic() - reported > REPORT_SECONDS or not worker.images):
            connection.send(Progress(tokens, passes))
            tokens, passes, reported = 0, 0, time.monotonic()


if __name__ == "__main__":
    main()
