"""Data sets of the Hugging Face Hub: found by their cards and names, fetched into the user's own cache.

parse what was written -> repository at a commit -> files of a split -> cache -> ordinary local inputs
"""

from __future__ import annotations

import msgspec

from tokenmill.errors import UsageError
from tokenmill.inputs.base import ALL, Expansion, Extent, Input
from tokenmill.inputs.columns import text_column_of_card, text_column_of_file
from tokenmill.inputs.hub.counting import count_documents
from tokenmill.inputs.hub.fetching import fetch
from tokenmill.inputs.hub.kinds import sort_out
from tokenmill.inputs.hub.layout import Offer, Selection, by_names, configurations, converted, described
from tokenmill.inputs.hub.names import CONVERTED, MAIN, Target, parse
from tokenmill.inputs.hub.patterns import fixed_folder, has_magic, is_hidden, match
from tokenmill.inputs.hub.refusals import NoRevision, is_offline
from tokenmill.inputs.hub.repository import Repository, Snapshot, open_repository, quietly
from tokenmill.inputs.hub.sampling import choose_some, weigh
from tokenmill.progress import Display, format_bytes

__all__ = ["expand"]

KINDS_READ = "Parquet, JSON lines, JSON or text"


def expand(item: str, display: Display, extent: Extent = ALL) -> Expansion:
    """The files of a data set, or of a path in one, in the cache; as many as are wanted."""
    target = parse(item)
    with quietly():
        return _expand(target, display, extent)


def _expand(target: Target, display: Display, extent: Extent) -> Expansion:
    repository = open_repository(target)
    if repository.silence is not None:
        _tell_silence(repository, display)
    if target.path:
        paths, is_named = _find_path(repository, target, display)
        return Expansion(_take(repository, paths, display, extent), is_named)
    repository, selection = _find_split(repository, target, display)
    repository.check_whole(selection.paths)
    config = f":{selection.config}" if selection.config is not None else ""
    display.say(f"split      {selection.split} of {repository.id}{config}")
    _tell_others(selection.num_others, display)
    inputs = _take(repository, selection.paths, display, extent)
    if inputs[0].text_key is None:
        text_key = text_column_of_card(repository.card(), selection.config)
        inputs = [msgspec.structs.replace(item, text_key=text_key) for item in inputs]
    return Expansion(inputs, False)


def _tell_silence(repository: Repository, display: Display) -> None:
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the Hub does not answer"
    what = f"{repository.target.item} is taken as the cache knows it"
    if isinstance(repository, Snapshot):
        what = f"the files of {repository.id} that another program has put into the cache are taken for all of it"
    display.say(f"{why}; {what}", style="yellow")


def _tell_others(num_others: int, display: Display) -> None:
    if num_others:
        files = "1 data file is" if num_others == 1 else f"{num_others:,} data files are"
        display.say(f"           {files} of another kind than most, and left out", style="yellow")


def _take(repository: Repository, paths: list[str], display: Display, extent: Extent) -> list[Input]:
    """Files as inputs, called what they are called on the Hub, wherever the cache may be."""
    local = _fetch(repository, paths, display, extent)
    text_key = repository.target.text_key or text_column_of_file(next(iter(local.values())))
    branch = f"@{CONVERTED}" if repository.target.revision == CONVERTED else ""
    home = f"datasets/{repository.id}{branch}"
    weight = weigh({path: repository.files[path] for path in paths}, local) if extent.is_sample else 1.0
    return [Input(file, f"{home}/{path}", text_key, repository.origin, weight) for path, file in local.items()]


def _fetch(repository: Repository, paths: list[str], display: Display, extent: Extent) -> dict[str, str]:
    """Where files are, by their paths in the repository; no more of them than are wanted."""
    files = {path: repository.files[path] for path in paths}
    total = sum(file.bytes for file in files.values())
    count = f"{len(files):,} file{'s' if len(files) > 1 else ''}"
    display.say(f"data set   {repository.id} at {repository.commit[:12]}: {count}, {format_bytes(total)}")
    if total == 0:
        display.say(f"           {'it is' if len(files) == 1 else 'all of them are'} empty", style="yellow")
    if extent.documents is not None:
        return _fetch_first(repository, paths, display, extent.documents)
    if extent.is_sample:
        some = choose_some(files)
        if len(some) < len(files):
            display.say(f"           {len(some):,} of these files are fetched, and stand for all")
        files = {path: files[path] for path in some}
    return dict(zip(files, fetch(repository, files, display), strict=True))


def _fetch_first(repository: Repository, paths: list[str], display: Display, num_wanted: int) -> dict[str, str]:
    """The first files that have so many documents."""
    local: dict[str, str] = {}
    num_documents, step = 0, 1
    while len(local) < len(paths):
        some = {path: repository.files[path] for path in paths[len(local) : len(local) + step]}
        for path, file in zip(some, fetch(repository, some, display), strict=True):
            local[path] = file
            num_documents += count_documents(file, num_wanted)
            if num_documents >= num_wanted:
                display.say(f"           the first {num_wanted:,} documents are in {len(local):,} of these files")
                return local
        step *= 2
    return local


def _find_path(repository: Repository, target: Target, display: Display) -> tuple[list[str], bool]:
    """The files of a path, a folder or a glob, and whether it is one file."""
    path = target.path
    # A name may have brackets of its own.
    if repository.find(path) is not None:
        return [path], True
    if has_magic(path):
        found = sorted(match(path, repository.tree(fixed_folder(path))))
        if not found:
            raise UsageError(f"input {target.item}: no file of {repository.id} matches {path}")
        repository.check_whole(found, path)
        return found, False
    found = _find_folder(repository, target, display)
    repository.check_whole(found)
    return found, False


def _find_folder(repository: Repository, target: Target, display: Display) -> list[str]:
    """The data files of a folder, of all splits."""
    path = target.path
    files = sort_out(file for file in repository.tree(path) if not is_hidden(file[len(path) + 1 :]))
    if files is None:
        hint = f"; a split is written behind the name, {repository.id}:SPLIT" if ":" in path else ""
        raise UsageError(f"input {target.item}: nothing at {path} of {repository.id} is {KINDS_READ}{hint}")
    if files.not_read is not None:
        raise UsageError(
            f"input {target.item}: the data at {path} of {repository.id} is in .{files.not_read} files, which are not "
            f"read; expected {KINDS_READ}"
        )
    splits = by_names(lambda folder: files.paths, path)
    if len(splits) > 1:
        display.say(f"{target.item} has files of {', '.join(splits)}; all of them are read", style="yellow")
    _tell_others(files.num_others, display)
    return files.paths


def _find_split(repository: Repository, target: Target, display: Display) -> tuple[Repository, Selection]:
    """The files of a data set by its own description, else those that the Hub has made of it."""
    if target.revision == CONVERTED:
        return repository, _find_converted(repository, target)
    card = repository.card()
    script = f"{repository.id.partition('/')[2]}.py"
    if not configurations(card) and script in repository.tree():
        what = f"is a loading script, {script}, which is not run"
    else:
        selection = described(repository.id, card, repository.tree).choose(target.words)
        if selection is not None and selection.not_read is None:
            return repository, selection
        what = f"has no {KINDS_READ}" if selection is None else f"is in .{selection.not_read} files, which are not read"
    return _turn_to_converted(repository, what, display)


def _turn_to_converted(repository: Repository, what: str, display: Display) -> tuple[Repository, Selection]:
    """The Hub's own Parquet, in place of what cannot be read."""
    target = repository.target
    told = f"input {target.item}: {repository.id} {what}"
    advice = "write its documents as Parquet or JSON lines and pass these"
    if target.revision != MAIN:
        raise UsageError(f"{told}, and the Hub converts only what is on {MAIN}; {advice}")
    try:
        other = open_repository(msgspec.structs.replace(target, revision=CONVERTED))
    except NoRevision:
        raise UsageError(f"{told}, and the Hub has no Parquet of it on the branch {CONVERTED}; {advice}") from None
    selection = _find_converted(other, target)
    display.say(f"{repository.id} {what}; its Parquet from the branch {CONVERTED} is read", style="yellow")
    return other, selection


def _find_converted(repository: Repository, target: Target) -> Selection:
    offer: Offer = converted(repository.id, repository.tree())
    selection = offer.choose(target.words) if offer.configs else None
    if selection is None:
        raise UsageError(f"input {target.item}: the branch {CONVERTED} of {repository.id} is empty")
    return selection
