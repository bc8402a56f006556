"""`underdraw COMMAND [SUBCOMMAND]`: looks up the command, runs it, and prints errors that users can fix in one line.

A command is a module with a typer app called `app`; COMMANDS lists them all. A module is imported when its command is
looked up, so no command waits for the imports of another one.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from underdraw import __version__
from underdraw.cli.signals import SigtermHandler
from underdraw.errors import ConfigError, UnderdrawError, one_line, unknown

COMMANDS = {  # "COMMAND SUBCOMMAND" is a subcommand; help, completion and parsing follow from this table
    "generate": "underdraw.cli.generate",
    "serve": "underdraw.cli.serve",
    "bench": "underdraw.cli.bench",
    "bench engine": "underdraw.cli.engine",
    "bench agreement": "underdraw.cli.agreement",
    "plot": "underdraw.cli.plot",
    "evaluate": "underdraw.cli.evaluate",
    "evaluate statistics": "underdraw.cli.statistics",
    "verify": "underdraw.cli.verify",
    "plan": "underdraw.cli.plan",
    "models": "underdraw.cli.models",
    "models inspect": "underdraw.cli.inspect",
    "train": "underdraw.cli.train",
    "env": "underdraw.cli.env",
}
PARSED = {"integer": "a whole number", "number": "a number"}  # words of pydantic, and ours
USER_ERROR, INTERRUPTED, TERMINATED = 2, 130, 143  # exit codes; 1 is a bug, or a training whose loss is not finite
UsageError: type[Any] = typer.BadParameter.__mro__[1]  # click's class, which newer versions of typer bundle


class CommandGroup(TyperGroup):
    """A group whose commands are imported on lookup. It may also be a command itself, with its own options.

    The first argument decides: `bench engine ...` runs the subcommand, `bench --prompts ...` the command `bench`. So
    `bench engine` does not need the options that `bench` requires.
    """

    path = ""  # the words in front of its commands' names: "" for `underdraw` itself, "bench" for `underdraw bench`

    def list_commands(self, ctx: Any) -> list[str]:
        prefix = f"{self.path} " if self.path else ""
        names = [name.removeprefix(prefix) for name in COMMANDS if name.startswith(prefix)]
        return [*self.commands, *(name for name in names if " " not in name)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        names = self.list_commands(ctx)
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name not in names:
            if ctx.resilient_parsing:  # shell completion of a misspelt command has nothing to offer
                return None
            raise unknown(f"command of {self.path}" if self.path else "command", cmd_name, names)
        return load_command(f"{self.path} {cmd_name}".strip())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not self.path:
            return super().parse_args(ctx, args)
        names = self.list_commands(ctx)
        if not args and self.callback is None and not ctx.resilient_parsing:
            print(ctx.get_help())
            raise ConfigError(f"{self.path} needs a command: {' or '.join(names)}.")
        takes_arguments = any(param.param_type_name == "argument" for param in self.params)
        if args and (args[0] in names or not (takes_arguments or args[0].startswith("-"))):
            self.params, self.callback = [], None  # only the subcommand runs
        else:
            ctx.allow_extra_args, ctx.allow_interspersed_args = False, True
        return super().parse_args(ctx, args)


def load_command(name: str) -> Any:
    """Import a command of COMMANDS; one with subcommands, there or in its module, becomes a `CommandGroup`."""
    command: Any = typer.main.get_command(importlib.import_module(COMMANDS[name]).app)
    command.name = name.split()[-1]
    in_module = dict(command.commands) if isinstance(command, TyperGroup) else {}
    subcommands = [*in_module, *(other.removeprefix(f"{name} ") for other in COMMANDS if other.startswith(f"{name} "))]
    if not subcommands:
        return command
    group = CommandGroup(
        name=command.name,
        commands=in_module,
        params=command.params,
        callback=command.callback,
        help=command.help,
        short_help=f"{command.help.splitlines()[0]} Subcommands: {', '.join(subcommands)}.",
        epilog=command.epilog,
        context_settings=command.context_settings,
        invoke_without_command=True,
        subcommand_metavar="[COMMAND]",
    )
    group.path = name
    return group


app = typer.Typer(
    cls=CommandGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Example: underdraw generate "a fox, 3D render, on a sky blue background" -o fox.png --seed 2',
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


def main(arguments: Sequence[str] | None = None, *, command: typer.Typer = app, name: str = "underdraw") -> int:
    """Run a command, `underdraw` or a script of its own; returns the exit code."""
    open_streams()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that choosing a BLAS library is experimental
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads that wait give way to other programs sooner
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a prompt may hold characters that the terminal lacks
    log = logging.getLogger("underdraw")
    level, sigterm = log.level, SigtermHandler()
    try:
        with sigterm:
            code = command(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()  # a full disk or a closed pipe is noticed here, not when Python ends
    except UsageError as error:
        return print_error(usage_message(error))
    except UnderdrawError as error:
        return print_error(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "underdraw"):
            raise
        return print_error(f"this needs the package {package}, which is not installed; pip install {package}.")
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        return print_error(f"{name}{error.strerror or error}.")
    except MemoryError:
        return print_error("there is not enough memory; use a smaller --batch, or end other programs.")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    finally:
        log.setLevel(level)  # which --quiet may have changed
    if code == INTERRUPTED:
        print("stopped.", file=sys.stderr)
        return TERMINATED if sigterm.was_received else INTERRUPTED
    return code if isinstance(code, int) else 0


def usage_message(error: Any) -> str:
    """What is wrong with an option. Newer versions of typer leave its checks to pydantic, and the value out."""
    message: str = error.format_message().replace("Value error, ", "").rstrip(".")
    if hasattr(error.__cause__, "errors"):
        message = message.replace("Input should", f"{error.__cause__.errors()[0]['input']} should")
    message = re.sub(r"a valid (integer|number), unable to parse .*", lambda kind: PARSED[kind[1]], message)
    command = getattr(error.ctx, "command_path", "")
    if "extra argument" in message and command.endswith(" generate"):
        message += "; put quotes around a prompt of several words"
    elif type(error) is UsageError or "Missing" in message:
        message += f"; see {command} --help"
    return f"{message}."


def open_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed, so that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def print_error(message: str, code: int = USER_ERROR) -> int:
    """Print one line on stderr, if there is one to print to; returns the exit code."""
    with suppress(OSError, ValueError, AttributeError):
        print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    return code
