"""`tokenmill verify`: check that a store is sound, and that its ids equal the reference's."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tokenmill.cli._flags import AsJson, Store
from tokenmill.cli._output import print_json, progress
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.formatting import format_facts, plural

__all__ = ["verify"]


def verify(
    store: Store,
    more: Annotated[list[str] | None, typer.Argument(metavar="[INPUT...]", help="More inputs for --against.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT...", help="Compare ids of a sample with the reference's, from these inputs."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With --against: compare every document.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every byte and every document of a store, and its ids against the reference."""
    from tokenmill.tools.verify import verify as check

    if (more or every) and not against:
        raise UsageError("the inputs to compare with come after --against: tokenmill verify OUT --against INPUT...")
    with progress() as advance:
        result = check(store, against=[*(against or []), *(more or [])], every=every, advance=advance)
    if as_json:
        print_json(result)
    elif not result.num_files:
        # Without a manifest, nothing was checked.
        raise TokenmillError(result.problems[0])
    else:
        print(format_facts(result.rows()))
    for problem in result.problems:
        print(problem, file=sys.stderr)
    if not result.is_sound:
        raise TokenmillError(f"{store} has {plural(len(result.problems), 'problem')}")
    if not as_json:
        print("sound")
