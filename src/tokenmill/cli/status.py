"""`tokenmill status`: how a run is doing or how it ended."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli._flags import AsJson, Store
from tokenmill.cli._output import console, print_json

__all__ = ["WATCH_BUCKET_SECONDS", "WATCH_SECONDS", "status"]

WATCH_SECONDS = 1.0

WATCH_BUCKET_SECONDS = 10.0
"""Seconds between two looks at a bucket: a run reports to it this often."""


def status(
    store: Store,
    watch: Annotated[bool, typer.Option("--watch", help="Wait for a run, and keep showing it until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show progress, speed, ETA and memory of a run, from any terminal, even after it has died."""
    import time

    from rich.live import Live

    from tokenmill.arguments import is_remote
    from tokenmill.tools.status import find_status, read_status
    from tokenmill.tools.status_view import render_status

    if as_json:
        print_json(read_status(store))
    elif not watch:
        console().print(render_status(read_status(store)))
    else:
        pause = WATCH_BUCKET_SECONDS if is_remote(store) else WATCH_SECONDS
        with Live(console=console(), auto_refresh=False) as live:
            while (now := find_status(store)) is None or now.state == "running":
                live.update(f"waiting for a run in {store}" if now is None else render_status(now), refresh=True)
                time.sleep(pause)
            live.update(render_status(now), refresh=True)
