"""One request to an object store: obstore makes it; here it is tried again, and what went wrong is said in a sentence.

obstore tries again for a second or two, and only what fails before the first byte of an answer. Here anything that may
pass by itself is tried for two minutes: a busy server, one that has gone away, a body that breaks off. A body that is
shorter than what was asked for is noticed: no caller ever sees fewer bytes than it wanted.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError

__all__ = [
    "SCHEMES",
    "AlreadyThere",
    "ChangedObject",
    "NoSuchObject",
    "Refused",
    "RemoteError",
    "Request",
    "Unreachable",
    "count_requests",
    "describe_endpoint",
    "perform",
    "reached",
]

SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""What URLs begin with, and what the environment variables of that store begin with."""
_ENDPOINT_NAMES = ("ENDPOINT_URL_S3", "ENDPOINT_URL", "STORAGE_ENDPOINT", "ENDPOINT", "BASE_URL")
CLIENT_OPTIONS = {"timeout", "connect_timeout", "allow_http", "allow_invalid_certificates", "proxy_url", "user_agent"}
"""How a connection is made: `AWS_TIMEOUT=5s`, `AWS_ALLOW_HTTP=true` and so on."""
PATIENCE_SECONDS = 120.0
"""How long a request is tried again."""
QUICK_RETRIES = 5
"""What obstore does by itself, in a second or two; so long also takes a server that was never there."""
SHORT_ANSWERS = 6
"""A body that is too short is an answer like any other, and will not get longer for ever."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
CREATES = 6
PART_BYTES = 16 << 20
"""Bytes of one part of an upload; S3 allows 10,000 parts, so 160 GB."""


class RemoteError(TokenmillError):
    """An object store that cannot be reached, or that refuses."""


class NoSuchObject(RemoteError):
    """There is no object of this name."""


class ChangedObject(RemoteError):
    """An object is not the one that it was when it was first looked at."""


class AlreadyThere(RemoteError):
    """An object that was to be created exists."""


class Refused(RemoteError):
    """An answer that stays the same when the request is made again: no access, no credentials."""


class Unreachable(RemoteError):
    """There is no server, or none that answers."""


class _ShortAnswer(RemoteError):
    """A body that says itself that it has fewer bytes than were asked for."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one bucket. `do` is one of head, list, read, put, upload, create, delete."""

    do: str
    scheme: str
    bucket: str
    key: str = ""
    keys: list[str] = []
    start: int = 0
    stop: int = 0
    etag: str | None = None
    """The object must still be this one."""
    num_bytes: int | None = None
    """How large the whole object must be."""
    data: bytes = b""
    path: str = ""
    """A local file to upload."""

    @property
    def url(self) -> str:
        """The object or the bucket, as a user writes it."""
        return f"{self.scheme}://{self.bucket}/{self.key}"


reached: set[str] = set()
"""The servers that have answered. They are waited for; one that never has is likely not the one that was meant."""
_counts: dict[str, int] = {}
_count_lock = threading.Lock()


def count_requests() -> dict[str, int]:
    """How many requests this process has made of each kind, and how many `bytes` they brought."""
    with _count_lock:
        return dict(_counts)


def count(kind: str, num_bytes: int = 0) -> None:
    """Add one request to the counts."""
    with _count_lock:
        _counts[kind] = _counts.get(kind, 0) + 1
        _counts["bytes"] = _counts.get("bytes", 0) + num_bytes


def perform(request: Request) -> Any:
    """Carry out a request in this process.

    A head gives key, size and ETag, a list gives many of these, and a read gives bytes and an ETag.
    """
    count(request.do)
    return _ACTIONS[request.do](request)


def describe_endpoint(scheme: str) -> str:
    """The server that URLs of a scheme lead to, as the environment names it."""
    prefix = SCHEMES[scheme]
    names = (f"{prefix}_{name}" for name in _ENDPOINT_NAMES)
    known = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return known or {"s3": "AWS S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}[scheme]


@lru_cache(maxsize=64)
def _open(scheme: str, bucket: str, environment: tuple[tuple[str, str], ...]) -> Any:
    """The store of a bucket; what the environment says is a part of the key, so that a change of it is seen."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise MissingDependencyError(f"{scheme}://{bucket}", "s3") from None
    # obstore reads the environment, but not for what is passed here.
    options: dict[str, Any] = {"timeout": "60s", "connect_timeout": "10s"}
    if describe_endpoint(scheme).startswith("http://"):
        options["allow_http"] = True
    for name, value in environment:
        option = name.partition("_")[2].lower()
        if option in CLIENT_OPTIONS:
            options[option] = value.lower() in ("1", "true", "yes") if option.startswith("allow_") else value
    retries: Any = {
        "max_retries": QUICK_RETRIES,
        "retry_timeout": timedelta(seconds=PATIENCE_SECONDS),
        "backoff": {"init_backoff": timedelta(seconds=FIRST_PAUSE_SECONDS), "max_backoff": timedelta(seconds=5)},
    }
    try:
        return from_url(f"{scheme}://{bucket}", client_options=options, retry_config=retries)  # type: ignore[call-overload]
    except (BaseError, ValueError) as error:
        if "Account must be specified" in str(error):
            raise UsageError(f"{scheme}://{bucket} needs the name of an account: set {_ACCOUNT}") from None
        raise UsageError(f"{scheme}://{bucket} cannot be used: {_first_line(error)}") from None


def _store(request: Request) -> Any:
    prefix = f"{SCHEMES[request.scheme]}_"
    told = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefix)))
    return _open(request.scheme, request.bucket, told)


def _head(request: Request) -> tuple[str, int, str | None]:
    import obstore

    meta = _patiently(request, lambda: obstore.head(_store(request), request.key))
    return request.key, meta["size"], meta["e_tag"]


def _list(request: Request) -> list[tuple[str, int, str | None]]:
    import obstore

    def collect() -> list[tuple[str, int, str | None]]:
        stream = obstore.list(_store(request), request.key or None, chunk_size=1000)
        return [(meta["path"], meta["size"], meta["e_tag"]) for chunk in stream for meta in chunk]

    return _patiently(request, collect)


def _read(request: Request) -> tuple[memoryview, str | None]:
    """The bytes of a range, all of them, and the ETag of the object that they are of."""
    import obstore

    options: Any = {"range": (request.start, request.stop)} if request.stop else {}
    if request.etag is not None:
        options["if_match"] = request.etag

    def get() -> tuple[memoryview, str | None]:
        result = obstore.get(_store(request), request.key, options=options)
        size = result.meta["size"]
        _check_size(request, size)
        data = memoryview(result.bytes())
        wanted = min(request.stop, size) - request.start if request.stop else size
        if len(data) != wanted:
            raise _ShortAnswer(f"{request.url} cannot be read: {len(data):,} bytes came instead of {wanted:,}")
        count("answers", len(data))
        return data, result.meta["e_tag"]

    return _patiently(request, get)


def _check_size(request: Request, size: int) -> None:
    if request.num_bytes is not None and size != request.num_bytes:
        raise ChangedObject(
            f"{request.url} has {size:,} bytes and not {request.num_bytes:,}; it was replaced or cut off"
        )


def _put(request: Request) -> None:
    import obstore

    _patiently(request, lambda: obstore.put(_store(request), request.key, request.data))


def _upload(request: Request) -> None:
    import obstore

    def upload() -> None:
        obstore.put(_store(request), request.key, Path(request.path), chunk_size=PART_BYTES, max_concurrency=4)

    # An upload in parts that fails is begun anew as a whole: nobody sees half of an object.
    _patiently(request, upload)


def _create(request: Request) -> bool:
    """Write an object that must not exist; False if it exists with the same bytes, which may well be our own doing.

    An answer can get lost after the object was written, and trying again then finds it there.
    """
    import obstore

    for _ in range(CREATES):
        try:
            _patiently(request, partial(obstore.put, _store(request), request.key, request.data, mode="create"))
            return True
        except AlreadyThere as error:
            try:
                there, _ = _read(msgspec.structs.replace(request, do="read", stop=0))
            except NoSuchObject:
                # Whoever made it has removed it again.
                continue
            if bytes(there) != request.data:
                raise error from None
            return False
    raise RemoteError(f"{request.url} is made and removed by others all the time; let one run end before the next")


def _delete(request: Request) -> None:
    import obstore

    for first in range(0, len(request.keys), 1000):
        some = request.keys[first : first + 1000]
        try:
            _patiently(request, partial(obstore.delete, _store(request), some))
        except NoSuchObject:
            if len(some) > 1:
                for key in some:
                    _delete(msgspec.structs.replace(request, keys=[key]))


_ACTIONS: dict[str, Callable[[Request], Any]] = {
    "head": _head,
    "list": _list,
    "read": _read,
    "put": _put,
    "upload": _upload,
    "create": _create,
    "delete": _delete,
}

ResultT = TypeVar("ResultT")


def _patiently(request: Request, call: Callable[[], ResultT]) -> ResultT:
    """Make a call, with what obstore raises in our words; what may pass by itself is tried again for two minutes."""
    from obstore.exceptions import BaseError

    started = time.monotonic()
    for attempt in itertools.count(1):
        try:
            result = call()
            reached.add(describe_endpoint(request.scheme))
            return result
        except FileNotFoundError as error:
            reached.add(describe_endpoint(request.scheme))
            raise _not_found(request, str(error)) from None
        except ValueError as error:
            raise UsageError(f"{request.url} is not the name of an object: {_first_line(error)}") from None
        except _ShortAnswer as error:
            if attempt == SHORT_ANSWERS:
                raise RemoteError(f"{error}, {attempt} times; try again later") from None
        except BaseError as error:
            said = _explain(request, error)
            if type(said) is RemoteError:
                reached.add(describe_endpoint(request.scheme))
            if not _may_pass(request, said, str(error)):
                raise said from None
            if time.monotonic() - started > PATIENCE_SECONDS:
                tried = f"tried for {time.monotonic() - started:.0f} s"
                raise type(said)(f"{said}; {tried}, try again later") from None
        count(f"{request.do} again")
        _pause(attempt)
    raise AssertionError("not reached")


def _may_pass(request: Request, said: RemoteError, message: str) -> bool:
    """Whether asking again is of use: the server is busy, or gone for a while.

    One that never answered and takes no connection is not waited for, because its address is likely wrong. A child of
    another process waits: whoever started it has reached the server.
    """
    if isinstance(said, Unreachable):
        is_known = describe_endpoint(request.scheme) in reached or multiprocessing.parent_process() is not None
        return is_known or not any(kind in message for kind in _NOT_THERE)
    return type(said) is RemoteError and not any(f"status code: {code}" in message for code in _REFUSALS)


def _not_found(request: Request, message: str) -> RemoteError:
    if "NoSuchBucket" in message or "ContainerNotFound" in message:
        where = describe_endpoint(request.scheme)
        return NoSuchObject(
            f"{request.scheme}://{request.bucket} does not exist at {where}; check the URL's first part"
        )
    return NoSuchObject(f"{request.url} does not exist")


def _explain(request: Request, error: Exception) -> RemoteError:
    """What an error of obstore means to a user."""
    from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError, UnauthenticatedError

    message, names = str(error), _KEYS[request.scheme]
    if isinstance(error, AlreadyExistsError):
        return AlreadyThere(f"{request.url} exists already, with other content")
    if isinstance(error, PreconditionError):
        if request.do == "create":
            return AlreadyThere(f"{request.url} exists already, with other content")
        return ChangedObject(f"{request.url} was replaced while it was being read")
    if "status code: 416" in message:
        return ChangedObject(f"{request.url} ends before byte {request.start:,}; it was replaced or cut off")
    if "404" in message and ("NoSuchBucket" in message or "ContainerNotFound" in message):
        return _not_found(request, message)
    if any(sign in message for sign in _ASKED_MACHINE):
        public = f"; for a public bucket set {SCHEMES[request.scheme]}_SKIP_SIGNATURE=true"
        return Refused(f"{request.url} needs credentials, and there are none: set {names}{public}")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or " 403 " in message or " 401 " in message:
        allowed = "what they allow" if " and " in names else "what it allows"
        return Refused(f"access to {request.url} was denied; check {names}, and {allowed}")
    if "error sending request" in message or "error trying to connect" in message:
        where, name = describe_endpoint(request.scheme), _ENDPOINTS[request.scheme]
        return Unreachable(f"{request.url}: {where} cannot be reached or does not answer; check {name}")
    if status := re.search(r"status code: (\d+) ([^:\n]*)", message):
        code, reason = status[1], "busy" if status[1] in _BUSY else status[2].strip()
        return RemoteError(f"{request.url}: the server answers {code} ({reason})")
    if "response body error" in message:
        return RemoteError(f"{request.url}: the answers break off")
    return RemoteError(f"{request.url}: {_first_line(error)}")


_ASKED_MACHINE = ("/latest/api/token", "/latest/meta-data", "169.254.169.254", "metadata.google")
"""Without keys in the environment, the machine is asked for those of its role."""
_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT",
    "az": f"{_ACCOUNT} and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
_NOT_THERE = ("kind: Connect", "kind: Timeout")
"""What obstore says where there was no connection at all; of one that broke, it says `kind: Request`."""
_BUSY = ("429", "503")
_REFUSALS = ("400", "401", "403", "404", "405", "409", "411", "416", "501")
"""Answers of a server that it will not."""


def _first_line(error: BaseException) -> str:
    """The start of what obstore says, which goes on with what it looks like inside."""
    line = str(error).partition("\n")[0].partition(": <?xml")[0]
    return re.sub(r"^Generic \w+ error: ", "", line).strip()[:200]


def _pause(attempt: int) -> None:
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
    time.sleep(random.uniform(0, longest))
