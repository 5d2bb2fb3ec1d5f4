"""A data set's repository at one commit: its card, its files and where they are on the disk.

The client of the Hub does the asking, with the user's token, cache and endpoint. What it was told of a commit is kept
in the same cache, so that the same words mean the same files where there is no network: a cache that holds some files
of a data set does not say how many there are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tokenmill.errors import MissingDependencyError
from tokenmill.files import write_durably
from tokenmill.inputs.hub.names import Target
from tokenmill.inputs.hub.refusals import Unreachable, explain, is_passing

__all__ = ["File", "Repository", "open_repository", "persist", "quietly"]

FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
ASK_SECONDS = 30.0
MOST_TRIES = 3
"""Of the client, which does not give up at once either."""
FIRST_WAIT_SECONDS = 0.5

Answer = TypeVar("Answer")


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of a repository: its size, and what the cache calls its content."""

    bytes: int
    mark: str


class Repository:
    """What the Hub has under one name, at one commit."""

    def __init__(self, target: Target, commit: str, silence: Unreachable | None = None) -> None:
        self.target = target
        self.id = target.repository
        self.commit = commit
        self.silence = silence
        """Why the Hub cannot be asked and the cache has to answer; None: it can."""
        self._trees: dict[str, dict[str, File]] = {}
        self.files: dict[str, File] = {}
        """All that was listed so far."""

    @property
    def origin(self) -> str:
        """The URL of exactly this content."""
        return f"hf://datasets/{self.id}@{self.commit}"

    def card(self) -> dict[str, Any]:
        """The metadata at the head of README.md; empty where there is none, or none that can be read."""
        import yaml

        text = self._remember("card", self._read_card, str)
        found = FRONT_MATTER.match(text)
        try:
            loaded = yaml.safe_load(found[1]) if found else None
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def tree(self, folder: str = "") -> dict[str, File]:
        """The files below a folder, by their paths; none where there is no such folder."""
        if folder not in self._trees:
            key = f"tree-{quote(folder, safe='')}"
            self._trees[folder] = self._remember(key, lambda: self._list(folder), dict[str, File])
            self.files |= self._trees[folder]
        return self._trees[folder]

    def find(self, path: str) -> File | None:
        """One file, without listing its folder; None where this is no file."""
        self.files |= self._remember(f"file-{quote(path, safe='')}", lambda: self._look_at(path), dict[str, File])
        return self.files.get(path)

    def _read_card(self) -> str:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            path = hf_hub_download(self.id, "README.md", repo_type="dataset", revision=self.commit)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return ""
        return Path(path).read_text("utf-8", errors="replace")

    def _list(self, folder: str) -> dict[str, File]:
        from huggingface_hub.errors import EntryNotFoundError

        api, where = _client(), folder or None
        try:
            entries = api.list_repo_tree(self.id, where, recursive=True, repo_type="dataset", revision=self.commit)
            return {entry.path: _describe(entry) for entry in entries if hasattr(entry, "size")}
        except EntryNotFoundError:
            return {}

    def _look_at(self, path: str) -> dict[str, File]:
        entries = _client().get_paths_info(self.id, [path], repo_type="dataset", revision=self.commit)
        return {entry.path: _describe(entry) for entry in entries if hasattr(entry, "size")}

    def _remember(self, key: str, ask: Callable[[], Answer], kind: Any) -> Answer:
        """What the Hub says, kept for when it cannot be asked; of a commit that is the same for ever."""
        kept = _read_note(self.id, self.commit, key, kind)
        if kept is not None:
            answer: Answer = kept
            return answer
        if self.silence is not None:
            raise self.silence
        answer = persist(ask, self.target)
        _write_note(self.id, self.commit, key, answer)
        return answer


@contextmanager
def quietly() -> Iterator[None]:
    """Have the client keep its bars and warnings to itself: what is to be said is said here."""
    _client()
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level, were_disabled = logging.get_verbosity(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not were_disabled:
            enable_progress_bars()


def open_repository(target: Target) -> Repository:
    """A repository at the commit that its revision means; as far as the cache knows, if the Hub cannot be reached."""
    key = quote(target.revision, safe="")
    known = _read_note(target.repository, "refs", key, str)
    if known is not None and known == target.revision:
        return Repository(target, known)
    try:
        commit = persist(lambda: _ask_commit(target), target)
    except Unreachable as silence:
        if known is None:
            raise
        return Repository(target, known, silence)
    _write_note(target.repository, "refs", key, commit)
    return Repository(target, commit)


def _ask_commit(target: Target) -> str:
    info = _client().dataset_info(target.repository, revision=target.revision, timeout=ASK_SECONDS)
    return str(info.sha)


def persist(ask: Callable[[], Answer], target: Target) -> Answer:
    """Ask again what failed for a reason that may pass; say in a sentence what does not."""
    wait = FIRST_WAIT_SECONDS
    for tries_left in reversed(range(MOST_TRIES)):
        try:
            return ask()
        except Exception as error:
            if not tries_left or not is_passing(error):
                raise explain(error, target) from None
        time.sleep(wait)
        wait *= 2
    raise AssertionError


def _client() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingDependencyError("reading data sets of the Hub", "hf") from None
    return HfApi(library_name="tokenmill")


def _describe(entry: Any) -> File:
    """A file of a listing; the content of large files is known by another hash than that of small ones."""
    return File(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)


def _note_path(repository: str, folder: str, key: str) -> Path:
    from huggingface_hub import cached_assets_path

    owner, _, name = repository.partition("/")
    place = cached_assets_path("tokenmill", namespace=f"datasets--{owner}--{name}", subfolder=folder)
    return Path(place) / f"{key}.json"


def _read_note(repository: str, folder: str, key: str, kind: Any) -> Any:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_note_path(repository, folder, key).read_bytes(), type=kind)
    return None


def _write_note(repository: str, folder: str, key: str, answer: Any) -> None:
    """A cache that nobody may write to is still a cache."""
    with suppress(OSError):
        write_durably(_note_path(repository, folder, key), msgspec.json.encode(answer))
