"""What the Hub's client says when it fails, in a sentence with what to do next."""

from __future__ import annotations

import errno
from typing import Any

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.inputs.hub.names import Target, suggest

__all__ = ["NoRevision", "Unreachable", "cache_folder", "explain", "is_offline", "is_passing"]

PASSING = {408, 429, 500, 502, 503, 504}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT, errno.EIO, errno.ENOTDIR}


class Unreachable(UsageError):
    """The Hub did not answer, or is not to be asked; its cache may."""


class NoRevision(UsageError):
    """A repository does not have the branch, tag or commit that was asked for."""


def is_passing(error: BaseException) -> bool:
    """Whether it may be otherwise in a second: the server is busy, or a connection broke."""
    from huggingface_hub.errors import HFValidationError

    if isinstance(error, (TokenmillError, HFValidationError)) or _is_offline(error) or _is_of_disk(error):
        return False
    status = _status(error)
    return status is None or status in PASSING


def explain(error: BaseException, target: Target) -> TokenmillError:
    """The sentence for a user."""
    if isinstance(error, TokenmillError):
        return error
    if isinstance(error, OSError) and _is_of_disk(error):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TokenmillError(
                f"no space is left in {cache_folder()} for {target.item}; free some, or set HF_HOME to a folder on "
                "another disk, and run the same command again"
            )
        where = error.filename or cache_folder()
        return TokenmillError(f"{where} cannot be written: {error.strerror}; set HF_HOME to a folder that can be")
    # What was not found on this machine may have been meant to be there.
    meaning = " does not exist here, and as a data set of the Hub" if target.is_bare else ""
    return _kind(error)(f"input {target.item}{meaning}: {_reason(error, target)}")


def _kind(error: BaseException) -> type[UsageError]:
    from huggingface_hub.errors import RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        return NoRevision
    return Unreachable if _status(error) is None else UsageError


def _reason(error: BaseException, target: Target) -> str:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{_endpoint()}/datasets/{target.repository}"
    status = _status(error)
    if isinstance(error, GatedRepoError):
        return f"it is gated; accept its terms at {page} and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return f"{_endpoint()} has no such data set, or it is private and needs HF_TOKEN{suggest(target.repository)}"
    if isinstance(error, RevisionNotFoundError):
        expected = "a branch, a tag or a commit, with %2F for a slash"
        return f"it has no revision {target.revision!r}; expected {expected}; see {page}"
    # A file that is not in the cache counts as an entry that was not found, whatever kept it from being fetched.
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError) and status is not None:
        return f"a file of it is gone; see {page}"
    if status is not None:
        return _explain_status(status, page)
    if _is_offline(error):
        return "the cache does not have all of it, and HF_HUB_OFFLINE is set; run once without it"
    return f"{_endpoint()} does not answer ({_root(error)}), and the cache does not have all of it; check the network"


def _explain_status(status: int, page: str) -> str:
    from huggingface_hub import get_token

    if status in (401, 403):
        if get_token() is None:
            return f"the Hub wants to know who asks ({status}); set HF_TOKEN, or run hf auth login; see {page}"
        return f"the Hub refuses the token in HF_TOKEN, or that of the last login ({status}); see {page}"
    if status == 429:
        return (
            f"{_endpoint()} has had too many requests from here (429); wait some minutes and run the same command "
            "again, which goes on from there; with HF_TOKEN more are allowed"
        )
    return f"{_endpoint()} answers {status}; {'try again later' if status in PASSING else f'see {page}'}"


def cache_folder() -> str:
    """Where the client keeps what it fetches."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _status(error: BaseException) -> int | None:
    """The status of an answer that was an error, which the client may have wrapped in another one."""
    seen: BaseException | None = error
    while seen is not None:
        response: Any = getattr(seen, "response", None)
        if response is not None:
            return int(response.status_code)
        seen = seen.__cause__
    return None


def is_offline() -> bool:
    """Whether the user does not want the Hub to be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_offline(error: BaseException) -> bool:
    return is_offline() and _status(error) is None


def _is_of_disk(error: BaseException) -> bool:
    """Whether an error is of the file system and not of the network, whose errors may be `OSError`s as well."""
    return isinstance(error, OSError) and error.errno in DISK and _status(error) is None


def _root(error: BaseException) -> str:
    """What lies at the bottom, shortly: the client wraps it several times."""
    seen = error
    while seen.__cause__ is not None:
        seen = seen.__cause__
    text = " ".join(str(seen).split()) or type(seen).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."
