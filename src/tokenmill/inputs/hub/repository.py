"""A data set's repository at one commit: its card, its files and where they are on the disk.

The client of the Hub does the asking, with the user's token, cache and endpoint. What it was told of a commit is kept
in the same cache, so that the same words mean the same files where there is no network: a cache that holds some files
of a data set does not say how many there are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tokenmill.errors import MissingDependencyError
from tokenmill.files import write_durably
from tokenmill.inputs.hub.names import Target
from tokenmill.inputs.hub.patterns import match
from tokenmill.inputs.hub.refusals import Unreachable, cache_folder, explain, is_passing

__all__ = ["File", "Pin", "Repository", "Snapshot", "open_repository", "persist", "quietly", "repository_folder"]

FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
SHARD = re.compile(r"(.*[-.])(\d{5})-of-(\d{5})(.*)")
ASK_SECONDS = 30.0
MOST_TRIES = 3
"""Of the client, which does not give up at once either."""
FIRST_WAIT_SECONDS = 0.5

Answer = TypeVar("Answer")


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of a repository: its size, and what the cache calls its content."""

    bytes: int
    mark: str


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """What a name and a revision mean: a commit, and the name that the repository has by now."""

    commit: str
    id: str


class Repository:
    """What the Hub has under one name, at one commit."""

    def __init__(self, target: Target, pin: Pin, silence: Unreachable | None = None) -> None:
        self.target = target
        self.id = pin.id
        self.commit = pin.commit
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
        """The metadata at the head of README.md, under that of a file of its own; empty where there is none."""
        head = FRONT_MATTER.match(self._text("README.md"))
        return _parse_yaml(head[1] if head else "") | _parse_yaml(self._text(".huggingface.yaml"))

    def check_whole(self, paths: Sequence[str], pattern: str = "**") -> None:
        """Refuse files that are a part of what their names say a pattern finds; a listing of the Hub has all."""

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

    def _text(self, file: str) -> str:
        return self._remember(f"text-{quote(file, safe='')}", lambda: self._read_text(file), str)

    def _read_text(self, file: str) -> str:
        """The content of a small file; empty where there is none."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            path = hf_hub_download(self.id, file, repo_type="dataset", revision=self.commit)
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


class Snapshot(Repository):
    """What another program has left in the cache, where the Hub cannot be asked how much there is."""

    def __init__(self, target: Target, pin: Pin, silence: Unreachable) -> None:
        super().__init__(target, pin, silence)
        self._folder = repository_folder(pin.id) / "snapshots" / pin.commit

    def check_whole(self, paths: Sequence[str], pattern: str = "**") -> None:
        """Of files that say how many they are, all have to be here that the pattern finds."""
        for (head, total, tail), here in _numbered(paths).items():
            others = [f"{head}{number:05d}-of-{total:05d}{tail}" for number in range(total) if number not in here]
            missing = match(pattern, others)
            if missing:
                raise Unreachable(
                    f"input {self.target.item}: the cache does not have {missing[0]} of {self.id}, one of {total} such "
                    "files, and the Hub cannot be asked; run once with a network"
                )

    def _remember(self, key: str, ask: Callable[[], Answer], kind: Any) -> Answer:
        return ask()

    def _read_text(self, file: str) -> str:
        path = self._folder / file
        return path.read_text("utf-8", errors="replace") if path.is_file() else ""

    def _list(self, folder: str) -> dict[str, File]:
        files = (path for path in (self._folder / folder).rglob("*") if path.is_file())
        return {path.relative_to(self._folder).as_posix(): _describe_local(path) for path in files}

    def _look_at(self, path: str) -> dict[str, File]:
        file = self._folder / path
        return {path: _describe_local(file)} if file.is_file() else {}


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
    known = _read_note(target.repository, "refs", key, Pin)
    if known is not None and known.commit == target.revision:
        return Repository(target, known)
    try:
        pin = persist(lambda: _ask_pin(target), target)
    except Unreachable as silence:
        return Repository(target, known, silence) if known is not None else _open_snapshot(target, silence)
    _write_note(target.repository, "refs", key, pin)
    return Repository(target, pin)


def _ask_pin(target: Target) -> Pin:
    info = _client().dataset_info(target.repository, revision=target.revision, timeout=ASK_SECONDS)
    return Pin(str(info.sha), str(info.id))


def _open_snapshot(target: Target, silence: Unreachable) -> Snapshot:
    """What the cache has of a data set that nobody has asked about here before."""
    folder = repository_folder(target.repository)
    try:
        commit = (folder / "refs" / target.revision).read_text().strip()
    except (OSError, ValueError):
        commit = target.revision
    if not (folder / "snapshots" / commit).is_dir():
        raise silence
    return Snapshot(target, Pin(commit, target.repository), silence)


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


def _numbered(paths: Sequence[str]) -> dict[tuple[str, int, str], set[int]]:
    """Which of `train-00000-of-00004.parquet` and its like there are; what follows the numbers may differ."""
    found: dict[tuple[str, int], tuple[str, set[int]]] = {}
    for path in paths:
        told = SHARD.fullmatch(path)
        if told is not None:
            found.setdefault((told[1], int(told[3])), (told[4], set()))[1].add(int(told[2]))
    return {(head, total, tail): numbers for (head, total), (tail, numbers) in found.items()}


def _describe_local(path: Path) -> File:
    return File(path.stat().st_size, path.resolve().name)


def _parse_yaml(text: str) -> dict[str, Any]:
    """Metadata; empty if it cannot be read."""
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def repository_folder(repository: str) -> Path:
    """Where the client keeps what it has fetched of a data set."""
    owner, _, name = repository.partition("/")
    return Path(cache_folder()) / f"datasets--{owner}--{name}"


def _note_path(repository: str, folder: str, key: str) -> Path:
    from huggingface_hub import cached_assets_path

    owner, _, name = repository.partition("/")
    place = cached_assets_path("tokenmill", namespace=f"datasets--{owner}--{name}", subfolder=folder)
    return Path(place) / f"{key}.json"


def _read_note(repository: str, folder: str, key: str, kind: Any) -> Any:
    # The client says `ValueError` of a folder for notes that is a file.
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(_note_path(repository, folder, key).read_bytes(), type=kind)
    return None


def _write_note(repository: str, folder: str, key: str, answer: Any) -> None:
    """A cache that nobody may write to is still a cache."""
    with suppress(OSError, ValueError):
        write_durably(_note_path(repository, folder, key), msgspec.json.encode(answer))
