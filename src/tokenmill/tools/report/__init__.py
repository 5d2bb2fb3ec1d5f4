"""`report`: one page that answers the usual questions about a data set, to keep beside it or to share."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenmill.arguments import local_path
from tokenmill.display import Advance, ignore_progress
from tokenmill.errors import UsageError
from tokenmill.files import write_durably
from tokenmill.store.store import TokenStore
from tokenmill.tools.report.browser import browse
from tokenmill.tools.report.collect import SAMPLE_TOKENS, collect_figures
from tokenmill.tools.report.figures import Figures
from tokenmill.tools.report.page import render_page

__all__ = ["SAMPLE_TOKENS", "write_report"]


def write_report(
    store: TokenStore,
    out: Path,
    *,
    seq_len: int = 2048,
    sample_tokens: int = SAMPLE_TOKENS,
    verify: bool = False,
    json: Path | None = None,
    overwrite: bool = False,
    advance: Advance = ignore_progress,
) -> Figures:
    """Write the page and, with `json`, its figures; the same store and settings give the same bytes."""
    for path in (out, json):
        if path is not None:
            _check_target(path, overwrite)
    figures = collect_figures(store, seq_len=seq_len, sample_tokens=sample_tokens, verify=verify, advance=advance)
    write_durably(out, render_page(figures, browse(store, figures)))
    if json is not None:
        write_durably(json, msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    return figures


def _check_target(path: Path, overwrite: bool) -> None:
    local_path(path, "-o")
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file, such as {path / 'report.html'}")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another name, or pass --overwrite")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a directory; make it first, or choose another place with -o")
