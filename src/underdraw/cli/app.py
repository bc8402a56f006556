"""`underdraw COMMAND`: finds the command, runs it, and turns what the user can mend into one sentence.

A command is a module of this folder with a typer app called `app`; COMMANDS names it. A module is imported when its
command is asked for, so that no command waits for what another one needs.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from underdraw import __version__
from underdraw.errors import UnderdrawError, unknown

COMMANDS = {
    "generate": "underdraw.cli.generate",
    "bench": "underdraw.cli.bench",
    "bench engine": "underdraw.cli.engine",
    "plot": "underdraw.cli.plot",
    "evaluate": "underdraw.cli.evaluate",
    "evaluate subjects": "recipes.tiny.grade_subjects",
    "evaluate statistics": "underdraw.cli.statistics",
    "models": "underdraw.cli.models",
    "train": "underdraw.cli.train",
    "env": "underdraw.cli.env",
}
MISTAKE, INTERRUPTED = 2, 130  # exit codes; 1 is left to bugs
UsageError: type[Any] = typer.BadParameter.__mro__[1]  # click's, which some versions of typer carry inside


class Commands(TyperGroup):
    """The group of all commands, each imported when it is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A command's name may be two words."""
        two = " ".join(args[:2])
        if two in COMMANDS and len(args) > 1:
            return two, self.get_command(ctx, two), args[2:]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            raise unknown("command", cmd_name, COMMANDS)
        command = typer.main.get_command(importlib.import_module(COMMANDS[cmd_name]).app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Example: underdraw generate "a red fox on a blue background" -o fox.png --seed 7',
)


@app.callback(invoke_without_command=True)
def underdraw(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """Autoregressive image models, faster: the same seed gives the same image as plain sampling."""
    if version:
        print(__version__)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a prompt may hold signs that the terminal lacks
    try:
        code = app(args=arguments, prog_name="underdraw", standalone_mode=False)
    except UsageError as error:
        return complain(error.format_message())
    except UnderdrawError as error:
        return complain(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "underdraw"):
            raise
        return complain(f"this needs the package {package}, which is not installed; pip install {package}.")
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        return complain(f"{name}{error.strerror or error}.")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("stopped.", file=sys.stderr)
    return code if isinstance(code, int) else 0


def complain(sentence: str) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return MISTAKE
