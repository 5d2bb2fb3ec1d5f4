"""The command line: each command reads flags, calls one function and prints the result.

Results go to stdout, progress and errors to stderr. An error is one sentence and exit code 1
(2 for wrong usage); a run that a signal stopped exits with 128 plus the signal's number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import __version__
from tokenmill.arguments import show
from tokenmill.cli import bench
from tokenmill.cli._output import fail
from tokenmill.cli.demo import demo
from tokenmill.cli.estimate import estimate
from tokenmill.cli.export import export
from tokenmill.cli.inspect import inspect
from tokenmill.cli.report import report
from tokenmill.cli.status import status
from tokenmill.cli.tokenize import finish, tokenize
from tokenmill.cli.trace import trace
from tokenmill.cli.train_tokenizer import train_tokenizer
from tokenmill.cli.verify import verify
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.program import open_standard_streams

if TYPE_CHECKING:
    from tokenmill.executors.base import Executor

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Raw text to training batches: tokenize once, choose everything else when loading.",
)
GROUPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Make a store": (tokenize, estimate, status, finish, train_tokenizer),
    "Look into a store, and use it": (inspect, verify, report, trace, export),
    "Try and measure": (demo,),
}
"""The commands, under the headings of `--help`."""
for group, commands in GROUPS.items():
    for command in commands:
        name, needs_arguments = command.__name__.replace("_", "-"), command is not demo
        app.command(name, no_args_is_help=needs_arguments, rich_help_panel=group)(command)
app.add_typer(bench.app, name="bench", rich_help_panel=group)

INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"tokenmill {__version__}")
        raise typer.Exit


def main(started: Executor | None = None) -> None:
    """Run the command line; turn errors into a sentence and an exit code. `tokenize` uses the executor `started`."""
    open_standard_streams()
    try:
        with closing(started) if started is not None else nullcontext():
            code = app(standalone_mode=False, obj=started)
        # typer turns Ctrl-C into an exit code and returns it.
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except TokenmillError as error:
        fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        fail("stopped", INTERRUPTED)
    except UnicodeEncodeError as error:
        # Only a name of a file or folder that is not UTF-8 has these code points, one for each wrong byte.
        if not any("\udc80" <= character <= "\udcff" for character in error.object):
            raise
        fail(f"{show(error.object, 200)} is a name that is not UTF-8; rename it")
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
    except Exception as error:
        # typer raises click's exceptions, or those of its own copy of click; both have an exit code.
        if not hasattr(error, "exit_code"):
            raise
        if hasattr(error, "show"):
            error.show()
        sys.exit(error.exit_code)
