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
from tokenmill.tools.verify import local_copy

__all__ = ["SAMPLE_TOKENS", "report"]


def report(
    store: str | Path | TokenStore,
    out: str | Path,
    *,
    seq_len: int = 2048,
    sample_tokens: int = SAMPLE_TOKENS,
    verify: bool = False,
    json: str | Path | None = None,
    overwrite: bool = False,
    advance: Advance = ignore_progress,
) -> Figures:
    """Write one page about a store and, with `json`, its figures; the same store and settings give the same bytes.

    The store is opened, or named by its path or URL.
    """
    targets = [_check_target(path, overwrite) for path in (out, json) if path is not None]
    with local_copy(store.place if isinstance(store, TokenStore) else store, advance) as (folder, _):
        opened = store if isinstance(store, TokenStore) and store.path == folder else TokenStore(folder)
        figures = collect_figures(opened, seq_len=seq_len, sample_tokens=sample_tokens, verify=verify, advance=advance)
        write_durably(targets[0], render_page(figures, browse(opened, figures)))
    if json is not None:
        write_durably(targets[1], msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    return figures


def _check_target(target: str | Path, overwrite: bool) -> Path:
    path = local_path(target, "-o")
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file, such as {path / 'report.html'}")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; choose another name, or pass --overwrite")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a directory; make it first, or choose another place with -o")
    return path
