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
from typing import Any

import msgspec

from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.remote.object_request import SCHEMES, ObjectInfo, ObjectRequest, describe_endpoint
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
"""Attempts after which a truncated answer is an error: the server may always send the same bytes."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
CREATE_ATTEMPTS = 6
KEYS_PER_DELETE = 1000
PART_BYTES = 16 << 20
"""Bytes of one part of an upload; S3 allows 10,000 parts, so 160 GB."""

reachable: set[str] = set()
"""The servers that have answered, and are waited for during an outage. An unknown one likely has a wrong address."""


def mark_reachable(scheme: str) -> None:
    """Note that the server for a scheme has answered, so that requests wait for it from now on."""
    reachable.add(describe_endpoint(scheme))


def perform(request: ObjectRequest) -> Any:
    """Perform a request in this process: a list gives many `ObjectInfo`s, and a read gives bytes and an ETag."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise MissingDependencyError(f"{request.scheme}://{request.bucket}", "s3") from None
    if request.do == "create":
        return _create(request)
    if request.do == "delete":
        return _delete(request)
    return _retry(request)


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


def _head(obstore: Any, store: Any, request: ObjectRequest) -> ObjectInfo:
    meta = obstore.head(store, request.key)
    return ObjectInfo(request.key, meta["size"], meta["e_tag"])


def _list(obstore: Any, store: Any, request: ObjectRequest) -> list[ObjectInfo]:
    stream = obstore.list(store, request.key or None, chunk_size=1000)
    return [ObjectInfo(meta["path"], meta["size"], meta["e_tag"]) for chunk in stream for meta in chunk]


def _read(obstore: Any, store: Any, request: ObjectRequest) -> tuple[memoryview, str | None]:
    """Read all bytes of a range, and the ETag of the object."""
    options: Any = {"range": (request.start, request.stop)} if request.stop else {}
    if request.etag is not None:
        options["if_match"] = request.etag
    result = obstore.get(store, request.key, options=options)
    size = result.meta["size"]
    if request.num_bytes is not None and size != request.num_bytes:
        wrong = f"{request.url} has {size:,} bytes and not {request.num_bytes:,}"
        raise ChangedObject(f"{wrong}; it was replaced or cut off")
    data = memoryview(result.bytes())
    wanted = min(request.stop, size) - request.start if request.stop else size
    if len(data) != wanted:
        raise TruncatedAnswer(f"{request.url} cannot be read: {len(data):,} bytes came instead of {wanted:,}")
    return data, result.meta["e_tag"]


def _put(obstore: Any, store: Any, request: ObjectRequest, **options: Any) -> None:
    obstore.put(store, request.key, Path(request.path) if request.path else request.data, **options)


_ATTEMPTS: dict[str, Callable[[Any, Any, ObjectRequest], Any]] = {
    "head": _head,
    "list": _list,
    "read": _read,
    "put": _put,
    # The object appears when all parts have arrived, and a retry starts from the first.
    "upload": partial(_put, chunk_size=PART_BYTES, max_concurrency=4),
    "create": partial(_put, mode="create"),
    "delete": lambda obstore, store, request: obstore.delete(store, request.keys),
}


def _create(request: ObjectRequest) -> bool:
    """Write an object that must not exist; False if it exists with the same bytes.

    If the answer to our own request was lost after the object was written, the retry finds it there.
    """
    for _ in range(CREATE_ATTEMPTS):
        try:
            _retry(request)
            return True
        except AlreadyThere as error:
            try:
                existing, _ = _retry(msgspec.structs.replace(request, do="read"))
            except NoSuchObject:
                continue  # another process has removed it in the meantime
            if existing != request.data:
                raise error from None
            return False
    raise RemoteError(f"{request.url} is created and removed again by other runs; let one run end before the next")


def _delete(request: ObjectRequest) -> None:
    for first in range(0, len(request.keys), KEYS_PER_DELETE):
        keys = request.keys[first : first + KEYS_PER_DELETE]
        try:
            _retry(msgspec.structs.replace(request, keys=keys))
        except NoSuchObject:
            # Some stores refuse all keys because of one that does not exist.
            for key in keys if len(keys) > 1 else ():
                _delete(msgspec.structs.replace(request, keys=[key]))


def _retry(request: ObjectRequest) -> Any:
    """Perform a request, retry it while its error may pass, and raise other errors of obstore as ours."""
    import obstore
    from obstore.exceptions import BaseError

    started = time.monotonic()
    for attempt in itertools.count(1):
        try:
            result = _ATTEMPTS[request.do](obstore, _store(request), request)
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
