"""`tokenmill report`: one HTML page about a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli._flags import Store
from tokenmill.cli._output import progress
from tokenmill.errors import TokenmillError
from tokenmill.formatting import plural

__all__ = ["report"]


def report(
    store: Store,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as report.html.")],
    seq_len: Annotated[int, typer.Option(help="Tokens in a row, for the packings.")] = 2048,
    sample_tokens: Annotated[
        int | None, typer.Option(help="Sample about this many tokens \\[default: 64 million].")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of the store first.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures as JSON.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write one page about a store: totals, lengths, packing, tokens, odd documents, checks, the run, a browser."""
    from tokenmill.tools.report import SAMPLE_TOKENS
    from tokenmill.tools.report import report as write

    with progress() as advance:
        figures = write(
            store,
            out,
            seq_len=seq_len,
            sample_tokens=SAMPLE_TOKENS if sample_tokens is None else sample_tokens,
            verify=verify,
            json=json,
            overwrite=overwrite,
            advance=advance,
        )
    print(f"{out}: {plural(figures.num_documents, 'document')}, {plural(figures.num_tokens, 'token')}")
    problems = figures.checks.problems
    if problems:
        raise TokenmillError(f"{store} has {plural(len(problems), 'problem')}; {out} lists them")
