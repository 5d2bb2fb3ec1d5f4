"""`tokenmill demo`: all steps on text that every machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli._output import console

__all__ = ["demo"]


def demo(
    folder: Annotated[Path | None, typer.Argument(help="Where to work \\[default: a temporary folder].")] = None,
) -> None:
    """Run all steps on text that every machine has, offline, in under a minute."""
    from tokenmill.tools.demo import run_demo

    run_demo(folder, console())
