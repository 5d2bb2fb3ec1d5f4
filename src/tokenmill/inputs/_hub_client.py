"""A data set's repository at one commit, and what the Hub's client says when it fails.

The client asks the Hub, with the user's token, cache and endpoint. The answers about a commit are stored in the same
cache, because a cache that holds some files of a data set does not say how many there are: without a network, the same
words then mean the same files.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError
from tokenmill.files import write_durably
from tokenmill.inputs._hub_names import Target, suggest

__all__ = [
    "File",
    "HubUnreachable",
    "NoRevision",
    "Repository",
    "cache_folder",
    "explain",
    "is_offline",
    "open_repository",
    "quiet_client",
    "retry",
]

ASK_SECONDS = 30.0
MAX_TRIES = 3
"""Attempts; each of them includes the retries of the client itself."""
FIRST_WAIT_SECONDS = 0.5
PASSING = {408, 429, 500, 502, 503, 504}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT, errno.EIO, errno.ENOTDIR}
BUGS = (AssertionError, AttributeError, LookupError, NameError, TypeError)
"""Programming errors, which are neither retried nor explained."""

Answer = TypeVar("Answer")


class HubUnreachable(UsageError):
    """The Hub did not answer, or the user forbids asking it; the cache may still have the answer."""


class NoRevision(UsageError):
    """The repository has no such branch, tag or commit."""


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of a repository."""

    bytes: int
    blob: str
    """The name of its content in the cache."""


class _Pin(msgspec.Struct, frozen=True, array_like=True):
    """The commit of a revision, and the current name of the repository."""

    commit: str
    id: str


class Repository(msgspec.Struct, frozen=True):
    """A repository of the Hub at one commit."""

    target: Target
    id: str
    commit: str
    silence: HubUnreachable | None = None
    """Why the cache must answer for the Hub; None if the Hub can be asked."""
    is_snapshot: bool = False
    """Whether another program filled the cache, so that its files have to be taken for the whole repository."""

    @property
    def origin(self) -> str:
        """The URL of exactly this content."""
        return f"hf://datasets/{self.id}@{self.commit}"

    @property
    def cache(self) -> Path:
        """The folder in which the client keeps files of this commit."""
        return _repository_folder(self.id) / "snapshots" / self.commit

    def has_blob(self, file: File) -> bool:
        """Whether the content of a file is in the cache, from this commit or from another one."""
        return (_repository_folder(self.id) / "blobs" / file.blob).exists()

    def remember(self, key: str, ask: Callable[[], Answer], kind: type[Answer]) -> Answer:
        """Return the stored answer, else ask and store it: at a commit, an answer never changes."""
        if self.is_snapshot:
            return retry(ask, self.target)
        stored: Answer | None = _read_note(self.id, self.commit, key, kind)
        if stored is not None:
            return stored
        if self.silence is not None:
            raise self.silence
        answer = retry(ask, self.target)
        _write_note(self.id, self.commit, key, answer)
        return answer


def open_repository(target: Target) -> Repository:
    """Resolve a revision to a commit; if the Hub cannot be reached, to the commit that the cache knows."""
    known: _Pin | None = _read_note(target.repository, "refs", target.revision, _Pin)
    if known is not None and known.commit == target.revision:
        return Repository(target, known.id, known.commit)

    def ask() -> _Pin:
        from huggingface_hub import HfApi

        api = HfApi(library_name="tokenmill")
        info = api.dataset_info(target.repository, revision=target.revision, timeout=ASK_SECONDS)
        return _Pin(str(info.sha), str(info.id))

    try:
        pin = retry(ask, target)
    except HubUnreachable as silence:
        if known is not None:
            return Repository(target, known.id, known.commit, silence)
        return _open_snapshot(target, silence)
    _write_note(target.repository, "refs", target.revision, pin)
    return Repository(target, pin.id, pin.commit)


def _open_snapshot(target: Target, silence: HubUnreachable) -> Repository:
    """The commit that another program fetched, for a data set that tokenmill never asked the Hub about."""
    folder = _repository_folder(target.repository)
    try:
        commit = (folder / "refs" / target.revision).read_text().strip()
    except (OSError, ValueError):
        commit = target.revision
    repository = Repository(target, target.repository, commit, silence, is_snapshot=True)
    if not repository.cache.is_dir():
        raise silence
    return repository


@contextmanager
def quiet_client() -> Iterator[None]:
    """Turn off the client's progress bars and warnings; tokenmill shows its own."""
    try:
        from huggingface_hub import utils
    except ImportError:
        raise MissingDependencyError("reading data sets of the Hub", "hf") from None

    level, were_disabled = utils.logging.get_verbosity(), utils.are_progress_bars_disabled()
    utils.logging.set_verbosity_error()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if not were_disabled:
            utils.enable_progress_bars()


def retry(ask: Callable[[], Answer], target: Target) -> Answer:
    """Retry after a transient error, such as that of a busy server; turn any other one into a sentence."""
    wait = FIRST_WAIT_SECONDS
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            return ask()
        except (*BUGS, TokenmillError):
            raise
        except Exception as error:
            failure = explain(error, target)
            may_pass = _status(error) in PASSING or (isinstance(failure, HubUnreachable) and not is_offline())
            if not tries_left or not may_pass:
                raise failure from None
        time.sleep(wait)
        wait *= 2
    raise AssertionError


def explain(error: BaseException, target: Target) -> TokenmillError:
    """The sentence that tells a user what failed and what to do."""
    if isinstance(error, ImportError):
        return MissingDependencyError("reading data sets of the Hub", "hf")
    if isinstance(error, OSError) and _is_of_disk(error):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TokenmillError(
                f"no space is left in {cache_folder()} for {target.item}; free some, or set HF_HOME to a folder on "
                "another disk, and run the same command again"
            )
        where = error.filename or cache_folder()
        return TokenmillError(f"{where} cannot be written: {error.strerror}; set HF_HOME to a writable folder")
    kind, reason = _classify(error, target)
    meaning = " does not exist here, and as a data set of the Hub" if target.looks_local else ""
    return kind(f"input {target.item}{meaning}: {reason}")


def _classify(error: BaseException, target: Target) -> tuple[type[UsageError], str]:
    """The class of an error of the client, and the reason to print."""
    from huggingface_hub import constants, errors, get_token

    endpoint, status = constants.ENDPOINT, _status(error)
    page = f"{endpoint}/datasets/{target.repository}"
    if isinstance(error, errors.GatedRepoError):
        return UsageError, f"it is gated; accept its terms at {page} and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        near = suggest(target.repository)
        return UsageError, f"{endpoint} has no such data set, or it is private and needs HF_TOKEN{near}"
    if isinstance(error, errors.RevisionNotFoundError):
        expected = "expected a branch, a tag or a commit, with %2F for a slash"
        return NoRevision, f"it has no revision {target.revision!r}; {expected}; see {page}"
    if isinstance(error, errors.HFValidationError):
        return UsageError, f"the name is not valid ({_innermost(error)})"
    if status is None and is_offline():
        return HubUnreachable, "the cache does not have all of it, and HF_HUB_OFFLINE is set; run once without it"
    if status is None:
        why = f"{endpoint} does not answer ({_innermost(error)})"
        return HubUnreachable, f"{why}, and the cache does not have all of it; check the network"
    if status == 404:
        return UsageError, f"a file of it is gone; see {page}"
    if status in (401, 403) and get_token() is None:
        return UsageError, f"the Hub requires a login ({status}); set HF_TOKEN, or run hf auth login; see {page}"
    if status in (401, 403):
        return UsageError, f"the Hub rejects the token in HF_TOKEN, or that of the last login ({status}); see {page}"
    if status == 429:
        return UsageError, (
            f"{endpoint} has received too many requests from here (429); wait some minutes and run the same command "
            "again, which keeps the files that it has; with HF_TOKEN the limit is higher"
        )
    return UsageError, f"{endpoint} answers {status}; {'try again later' if status in PASSING else f'see {page}'}"


def _status(error: BaseException | None) -> int | None:
    """The status of the server's answer; the client may have wrapped the error that has it."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if response is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _is_of_disk(error: BaseException) -> bool:
    """Whether an error is from the file system; errors of the network may be `OSError`s too."""
    return isinstance(error, OSError) and error.errno in DISK and _status(error) is None


def _innermost(error: BaseException) -> str:
    """The first error of a chain, shortened: the client wraps it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."


def is_offline() -> bool:
    """Whether the user forbids asking the Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def cache_folder() -> str:
    """The folder in which the client keeps what it fetches."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _repository_folder(repository: str) -> Path:
    return Path(cache_folder()) / f"datasets--{repository.replace('/', '--')}"


def _note_path(repository: str, folder: str, key: str) -> Path:
    from huggingface_hub import cached_assets_path

    place = cached_assets_path("tokenmill", namespace=f"datasets--{repository.replace('/', '--')}", subfolder=folder)
    return Path(place) / f"{quote(key, safe='')}.json"


def _read_note(repository: str, folder: str, key: str, kind: Any) -> Any:
    # The client raises a `ValueError` if the folder for notes is a file.
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(_note_path(repository, folder, key).read_bytes(), type=kind)
    return None


def _write_note(repository: str, folder: str, key: str, answer: Any) -> None:
    """Store an answer; a cache that cannot be written to is still used."""
    with suppress(OSError, ValueError):
        write_durably(_note_path(repository, folder, key), msgspec.json.encode(answer))
