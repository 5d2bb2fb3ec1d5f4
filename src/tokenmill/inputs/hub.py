"""Data sets of the Hugging Face Hub: found by the `datasets` library, fetched into the user's own cache.

parse the item -> repository at a commit -> files of a split -> cache -> ordinary local inputs
"""

from __future__ import annotations

import msgspec

from tokenmill.display import Display
from tokenmill.errors import UsageError
from tokenmill.formatting import format_bytes
from tokenmill.inputs._hub_client import NoRevision, Repository, is_offline, open_repository, quiet_client
from tokenmill.inputs._hub_fetch import choose_sample, fetch, fetch_first, weigh
from tokenmill.inputs._hub_layout import Layout, Selection
from tokenmill.inputs._hub_names import CONVERTED, MAIN, parse
from tokenmill.inputs._peek import text_column_of_file
from tokenmill.inputs.base import Expansion, Extent, Input

__all__ = ["expand"]


def expand(item: str, display: Display, extent: Extent) -> Expansion:
    """Fetch the files of a data set, or of a path in one, as many as are wanted."""
    with quiet_client():
        repository = open_repository(parse(item))
        if repository.silence is not None:
            _report_silence(repository, display)
        selection = _select(repository)
        if selection.obstacle is not None:
            repository, selection = _turn_to_converted(repository, selection.obstacle, display)
        if selection.split is not None:
            config = f":{selection.config}" if selection.config is not None else ""
            display.say(f"split      {selection.split} of {repository.id}{config}")
        for note in selection.notes:
            display.say(note, style="yellow")
        return Expansion(_fetch_inputs(repository, selection, display, extent), selection.is_named)


def _report_silence(repository: Repository, display: Display) -> None:
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the Hub does not answer"
    what = f"{repository.target.item} is read from the cache, as of its last use"
    if repository.is_snapshot:
        what = f"the files of {repository.id} that another program has put into the cache are taken for all of it"
    display.say(f"{why}; {what}", style="yellow")


def _fetch_inputs(repository: Repository, selection: Selection, display: Display, extent: Extent) -> list[Input]:
    """Fetch files and name them as the Hub does, so that a manifest does not depend on where the cache is."""
    files = selection.files
    total = sum(file.bytes for file in files.values())
    count = f"{len(files):,} file{'s' if len(files) > 1 else ''}"
    display.say(f"data set   {repository.id} at {repository.commit[:12]}: {count}, {format_bytes(total)}")
    if total == 0:
        display.say(f"           {'it is' if len(files) == 1 else 'all of them are'} empty", style="yellow")
    weight = 1.0
    if extent.documents is not None:
        local = fetch_first(repository, files, display, extent.documents)
    elif extent.is_sample:
        chosen = choose_sample(files)
        if len(chosen) < len(files):
            display.say(f"           {len(chosen):,} of these files are fetched, and stand for all")
        local = fetch(repository, {path: files[path] for path in chosen}, display)
        weight = weigh(files, local)
    else:
        local = fetch(repository, files, display)
    text_key = repository.target.text_key or text_column_of_file(next(iter(local.values()))) or selection.text_key
    branch = f"@{CONVERTED}" if repository.target.revision == CONVERTED else ""
    home = f"datasets/{repository.id}{branch}"
    return [Input(file, f"{home}/{path}", text_key, repository.origin, weight) for path, file in local.items()]


def _turn_to_converted(repository: Repository, obstacle: str, display: Display) -> tuple[Repository, Selection]:
    """Select from the Hub's own Parquet conversion, in place of files that cannot be read."""
    target = repository.target
    refusal = f"input {target.item}: {repository.id} {obstacle}"
    advice = "write its documents as Parquet or JSON lines and pass these"
    if target.revision != MAIN:
        raise UsageError(f"{refusal}, and the Hub converts only what is on {MAIN}; {advice}")
    try:
        other = open_repository(msgspec.structs.replace(target, revision=CONVERTED))
    except NoRevision:
        raise UsageError(f"{refusal}, and the Hub has no Parquet of it on the branch {CONVERTED}; {advice}") from None
    selection = _select(other)
    display.say(f"{repository.id} {obstacle}; its Parquet from the branch {CONVERTED} is read", style="yellow")
    return other, selection


def _select(repository: Repository) -> Selection:
    """The files that the target means; the library is asked once for each commit."""
    path, words = repository.target.path, repository.target.words

    def ask() -> Selection:
        layout = Layout(repository)
        return layout.select_path(path) if path else layout.select_split(words)

    if path:
        return repository.remember(f"path-{path}", ask, Selection)
    selection = repository.remember(f"split-{':'.join(words)}", ask, Selection)
    if selection.config is not None and selection.split is not None:
        # Without a network, the same split is found by its full name, too.
        repository.remember(f"split-{selection.config}:{selection.split}", lambda: selection, Selection)
    return selection
