"""Data sets of the Hugging Face Hub: found by their cards and names, fetched into the user's own cache.

parse what was written -> repository at a commit -> files of a split -> cache -> ordinary local inputs
"""

from __future__ import annotations

import msgspec

from tokenmill.errors import UsageError
from tokenmill.inputs.base import Expansion, Input
from tokenmill.inputs.columns import text_column_of_card, text_column_of_file
from tokenmill.inputs.hub.counting import count_documents
from tokenmill.inputs.hub.fetching import fetch
from tokenmill.inputs.hub.layout import (
    Selection,
    by_names,
    choose_config,
    choose_split,
    configurations,
    fixed_folder,
    has_magic,
    match,
    readable,
    select,
)
from tokenmill.inputs.hub.names import CONVERTED, Target, parse
from tokenmill.inputs.hub.refusals import NoRevision
from tokenmill.inputs.hub.repository import Repository, open_repository, quietly
from tokenmill.progress import Display, format_bytes

__all__ = ["expand"]

KINDS_READ = "Parquet, JSON lines, JSON or text"
PARTIAL = "partial-"


def expand(item: str, display: Display, limit: int | None = None) -> Expansion:
    """The files of a data set, or of a path in one, in the cache; as many as `limit` documents need."""
    target = parse(item)
    with quietly():
        return _expand(target, display, limit)


def _expand(target: Target, display: Display, limit: int | None) -> Expansion:
    repository = open_repository(target)
    if repository.silence is not None:
        display.say(f"the Hub does not answer; {target.item} is taken as the cache knows it", style="yellow")
    if target.path:
        paths, is_named = _find_path(repository, target, display)
        local = _fetch(repository, paths, display, limit)
        return Expansion(_take(repository, local, None), is_named)
    repository, selection = _find_split(repository, target, display)
    config = f":{selection.config}" if selection.config is not None else ""
    display.say(f"split      {selection.split} of {repository.id}{config}")
    text_key = target.text_key or text_column_of_card(repository.card(), selection.config)
    local = _fetch(repository, selection.paths, display, limit)
    return Expansion(_take(repository, local, text_key), False)


def _fetch(repository: Repository, paths: list[str], display: Display, limit: int | None) -> dict[str, str]:
    """Where files are, by their paths in the repository; with a limit, the first ones that have so many documents."""
    files = {path: repository.files[path] for path in paths}
    size = format_bytes(sum(file.bytes for file in files.values()))
    count = f"{len(files):,} file{'s' if len(files) > 1 else ''}"
    display.say(f"data set   {repository.id} at {repository.commit[:12]}: {count}, {size}")
    if limit is None:
        return dict(zip(paths, fetch(repository, files, display), strict=True))
    local: dict[str, str] = {}
    num_documents, step = 0, 1
    while len(local) < len(paths):
        some = paths[len(local) : len(local) + step]
        for path, file in zip(some, fetch(repository, {path: files[path] for path in some}, display), strict=True):
            local[path] = file
            num_documents += count_documents(file, limit)
            if num_documents >= limit:
                display.say(f"           the first {limit:,} documents are in {len(local):,} of these files")
                return local
        step *= 2
    return local


def _take(repository: Repository, local: dict[str, str], text_key: str | None) -> list[Input]:
    """Files as inputs, called what they are called on the Hub, wherever the cache may be."""
    text_key = text_key or text_column_of_file(next(iter(local.values())))
    branch = f"@{CONVERTED}" if repository.target.revision == CONVERTED else ""
    home = f"datasets/{repository.id}{branch}"
    return [Input(file, f"{home}/{path}", text_key, repository.origin) for path, file in local.items()]


def _find_path(repository: Repository, target: Target, display: Display) -> tuple[list[str], bool]:
    """The files of a path, a folder or a glob, and whether it is one file."""
    path = target.path
    if has_magic(path):
        found = sorted(match(path, repository.tree(fixed_folder(path))))
    elif repository.find(path) is not None:
        return [path], True
    else:
        found = readable(repository.tree(path))
        splits = by_names(lambda folder: found, path)
        if len(splits) > 1:
            display.say(f"{target.item} has files of {', '.join(splits)}; all of them are read", style="yellow")
    if not found:
        raise UsageError(f"input {target.item}: nothing at {path} of {repository.id} is {KINDS_READ}")
    return found, False


def _find_split(repository: Repository, target: Target, display: Display) -> tuple[Repository, Selection]:
    """The files of a data set by its own description, else those that the Hub has made of it."""
    if target.revision == CONVERTED:
        return repository, _find_converted(repository, target)
    card = repository.card()
    script = f"{repository.id.partition('/')[2]}.py"
    is_script = not configurations(card) and script in repository.tree()
    if not is_script:
        selection = select(repository.id, card, repository.tree, target.words)
        if selection is not None:
            return repository, selection
    what = f"is a loading script, {script}, which is not run" if is_script else f"has no {KINDS_READ}"
    try:
        converted = open_repository(msgspec.structs.replace(target, revision=CONVERTED))
    except NoRevision:
        raise UsageError(
            f"input {target.item}: {repository.id} {what}, and the Hub has no Parquet of it on the branch {CONVERTED}; "
            "write its documents as Parquet or JSON lines and pass these"
        ) from None
    selection = _find_converted(converted, target)
    display.say(f"{repository.id} {what}; its Parquet from the branch {CONVERTED} is read", style="yellow")
    return converted, selection


def _find_converted(repository: Repository, target: Target) -> Selection:
    """The Hub's conversion has a folder for each configuration, and in it one for each split."""
    configs: dict[str, dict[str, list[str]]] = {}
    for path in readable(repository.tree()):
        folders = path.split("/")
        if len(folders) > 2:
            configs.setdefault(folders[0], {}).setdefault(folders[1], []).append(path)
    if not configs:
        raise UsageError(f"input {target.item}: the branch {CONVERTED} of {repository.id} is empty")
    config, split = choose_config(repository.id, list(configs), target.words)
    splits = configs[config or ""]
    partial = [name for name in splits if name.startswith(PARTIAL) and name.removeprefix(PARTIAL) == (split or "train")]
    if partial:
        raise UsageError(
            f"input {target.item}: the Hub has converted a part of {repository.id} only; to take that part, write "
            f"{repository.id}:{config}:{partial[0]}"
        )
    return choose_split(repository.id, splits, config, split)
