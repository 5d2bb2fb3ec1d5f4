"""Requests to an object store: obstore makes them, and this module retries them for up to two minutes.

obstore retries by itself for a second or two. Longer waits are ours, for three reasons: its retries run inside one
native call that Ctrl-C does not interrupt; it does not retry a listing or a deletion whose body breaks off; and it
accepts a body that is shorter than the range that was asked for. Here no caller ever gets fewer bytes than it wanted.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.remote.object_request import SCHEMES, ObjectRequest, describe_endpoint
from tokenmill.remote.remote_errors import (
    AccessDenied,
    AlreadyThere,
    ChangedObject,
    NoSuchObject,
    RemoteError,
    ServerUnreachable,
    TruncatedAnswer,
    explain,
    explain_configuration,
    is_transient,
)

__all__ = ["PART_BYTES", "mark_reachable", "perform", "reachable"]

CLIENT_OPTIONS = {"timeout", "connect_timeout", "allow_http", "allow_invalid_certificates", "proxy_url", "user_agent"}
"""Options of a connection that the environment may set: `AWS_TIMEOUT=5s`, `AWS_ALLOW_HTTP=true` and so on."""
RETRY_SECONDS = 120.0
OBSTORE_RETRIES = 5
"""Retries of obstore: a second or two, after which an address without a server is reported."""
MAX_TRUNCATED = 6
"""Truncated answers until a request fails: such an answer is complete for its server, and may never change."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
CREATE_ATTEMPTS = 6
KEYS_PER_DELETE = 1000
PART_BYTES = 16 << 20
"""Bytes of one part of an upload; S3 allows 10,000 parts, so 160 GB."""

reachable: set[str] = set()
"""The servers that have answered, and are waited for during an outage. An unknown one likely has a wrong address."""

ObjectTuple = tuple[str, int, str | None]
"""Key, size and ETag."""
ResultT = TypeVar("ResultT")


def mark_reachable(scheme: str) -> None:
    """Note that the server for a scheme has answered, so that requests wait for it from now on."""
    reachable.add(describe_endpoint(scheme))


def perform(request: ObjectRequest) -> Any:
    """Perform a request in this process.

    A head gives key, size and ETag, a list gives many of these, and a read gives bytes and an ETag.
    """
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise MissingDependencyError(f"{request.scheme}://{request.bucket}", "s3") from None
    return _ACTIONS[request.do](request)


def _store(request: ObjectRequest) -> Any:
    prefix = f"{SCHEMES[request.scheme]}_"
    environment = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefix)))
    return _open(request.scheme, request.bucket, environment)


@lru_cache(maxsize=64)
def _open(scheme: str, bucket: str, environment: tuple[tuple[str, str], ...]) -> Any:
    """Open a bucket. The environment is a part of the key, so that a change of it takes effect."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    # obstore reads the environment too, but not for options that are passed here.
    options: dict[str, Any] = {"timeout": "60s", "connect_timeout": "10s"}
    if describe_endpoint(scheme).startswith("http://"):
        options["allow_http"] = True
    for name, value in environment:
        option = name.partition("_")[2].lower()
        if option in CLIENT_OPTIONS:
            options[option] = value.lower() in ("1", "true", "yes") if option.startswith("allow_") else value
    seconds = partial(timedelta, 0)
    backoff = {"init_backoff": seconds(FIRST_PAUSE_SECONDS), "max_backoff": seconds(LONGEST_PAUSE_SECONDS)}
    retries = {"max_retries": OBSTORE_RETRIES, "retry_timeout": seconds(RETRY_SECONDS), "backoff": backoff}
    settings: Any = {"client_options": options, "retry_config": retries}
    try:
        return from_url(f"{scheme}://{bucket}", **settings)
    except (BaseError, ValueError) as error:
        raise explain_configuration(f"{scheme}://{bucket}", error) from None


def _head(request: ObjectRequest) -> ObjectTuple:
    import obstore

    meta = _retry(request, lambda: obstore.head(_store(request), request.key))
    return request.key, meta["size"], meta["e_tag"]


def _list(request: ObjectRequest) -> list[ObjectTuple]:
    import obstore

    def collect() -> list[ObjectTuple]:
        stream = obstore.list(_store(request), request.key or None, chunk_size=1000)
        return [(meta["path"], meta["size"], meta["e_tag"]) for chunk in stream for meta in chunk]

    return _retry(request, collect)


def _read(request: ObjectRequest) -> tuple[memoryview, str | None]:
    """Read all bytes of a range, and the ETag of the object."""
    import obstore

    options: Any = {"range": (request.start, request.stop)} if request.stop else {}
    if request.etag is not None:
        options["if_match"] = request.etag

    def get() -> tuple[memoryview, str | None]:
        result = obstore.get(_store(request), request.key, options=options)
        size = result.meta["size"]
        if request.num_bytes is not None and size != request.num_bytes:
            wrong = f"{request.url} has {size:,} bytes and not {request.num_bytes:,}"
            raise ChangedObject(f"{wrong}; it was replaced or cut off")
        data = memoryview(result.bytes())
        wanted = min(request.stop, size) - request.start if request.stop else size
        if len(data) != wanted:
            raise TruncatedAnswer(f"{request.url} cannot be read: {len(data):,} bytes came instead of {wanted:,}")
        return data, result.meta["e_tag"]

    return _retry(request, get)


def _put(request: ObjectRequest) -> None:
    import obstore

    _retry(request, lambda: obstore.put(_store(request), request.key, request.data))


def _upload(request: ObjectRequest) -> None:
    """Upload a file in parts. A retry starts from the first part; the object appears when all parts have arrived."""
    import obstore

    put = partial(obstore.put, chunk_size=PART_BYTES, max_concurrency=4)
    _retry(request, lambda: put(_store(request), request.key, Path(request.path)))


def _create(request: ObjectRequest) -> bool:
    """Write an object that must not exist; False if it exists with the same bytes.

    The answer to our own request may get lost after the object was written, so that a retry finds it.
    """
    import obstore

    for _ in range(CREATE_ATTEMPTS):
        try:
            _retry(request, lambda: obstore.put(_store(request), request.key, request.data, mode="create"))
            return True
        except AlreadyThere as error:
            try:
                existing, _ = _read(msgspec.structs.replace(request, do="read", stop=0))
            except NoSuchObject:
                continue  # another process has removed it since
            if existing != request.data:
                raise error from None
            return False
    raise RemoteError(f"{request.url} is created and removed again by other runs; let one run end before the next")


def _delete(request: ObjectRequest) -> None:
    import obstore

    for first in range(0, len(request.keys), KEYS_PER_DELETE):
        keys = request.keys[first : first + KEYS_PER_DELETE]
        try:
            _retry(request, partial(obstore.delete, _store(request), keys))
        except NoSuchObject:
            # Some stores refuse all keys because of one that does not exist.
            for key in keys if len(keys) > 1 else ():
                _delete(msgspec.structs.replace(request, keys=[key]))


_ACTIONS: dict[str, Callable[[ObjectRequest], Any]] = {
    "head": _head,
    "list": _list,
    "read": _read,
    "put": _put,
    "upload": _upload,
    "create": _create,
    "delete": _delete,
}


def _retry(request: ObjectRequest, call: Callable[[], ResultT]) -> ResultT:
    """Make a call, retry it while its error may pass, and raise other errors of obstore as ours."""
    from obstore.exceptions import BaseError

    started = time.monotonic()
    for attempt in itertools.count(1):
        try:
            result = call()
        except TruncatedAnswer as error:
            if attempt == MAX_TRUNCATED:
                raise RemoteError(f"{error}, {attempt} times; try again later") from None
        except (BaseError, FileNotFoundError, ValueError) as error:
            failure = explain(request, error)
            if not isinstance(failure, (ServerUnreachable, AccessDenied, UsageError)):
                mark_reachable(request.scheme)
            # A child process waits for any server: its parent has reached it.
            is_known = describe_endpoint(request.scheme) in reachable or multiprocessing.parent_process() is not None
            if not is_transient(failure, str(error), is_known=is_known):
                raise failure from None
            seconds = time.monotonic() - started
            if seconds > RETRY_SECONDS:
                raise type(failure)(f"{failure}; tried for {seconds:.0f} s, try again later") from None
        else:
            mark_reachable(request.scheme)
            return result
        time.sleep(random.uniform(0, min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)))
    raise AssertionError("not reached")
