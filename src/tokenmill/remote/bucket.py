"""Objects of one bucket by name. A `Bucket` is only a URL: it holds no connection and can be pickled."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenmill.errors import UsageError
from tokenmill.remote._fork_proxy import send
from tokenmill.remote.object_request import SCHEMES, ObjectInfo, ObjectRequest
from tokenmill.remote.remote_errors import ChangedObject, NoSuchObject

__all__ = ["PIECE_BYTES", "Bucket", "ObjectInfo", "split_url"]

PIECE_BYTES = 16 << 20
"""Bytes of one request of a large download: 60 requests for a gigabyte, each well below the time-out."""
MAX_PIECES_AT_ONCE = 4


def split_url(url: str) -> tuple[Bucket, str]:
    """Split a URL into its bucket and the name of the object or folder in it."""
    scheme, _, rest = url.partition("://")
    name, _, key = rest.partition("/")
    parts = key.strip("/").split("/") if key.strip("/") else []
    if scheme not in SCHEMES or not name or not {"", ".", ".."}.isdisjoint(parts) or "\0" in url:
        known = " or ".join(f"{known}://BUCKET/PATH" for known in SCHEMES)
        raise UsageError(f"{url} is not the URL of an object; expected {known}")
    return Bucket(scheme, name), "/".join(parts)


class Bucket(NamedTuple):
    """A bucket, which Azure calls a container."""

    scheme: str
    name: str

    def url(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.scheme}://{self.name}/{key}"

    def head(self, key: str) -> ObjectInfo:
        """The size and the ETag of an object."""
        return cast("ObjectInfo", self._send("head", key))

    def exists(self, key: str) -> bool:
        """Whether an object exists."""
        try:
            self.head(key)
        except NoSuchObject:
            return False
        return True

    def list(self, folder: str) -> list[ObjectInfo]:
        """All objects below a folder, sorted by name."""
        return sorted(self._send("list", folder))

    def read(self, key: str) -> bytes:
        """Read a whole small object."""
        return bytes(self._send("read", key)[0])

    def read_range(self, info: ObjectInfo, start: int, stop: int) -> memoryview:
        """Read all bytes from `start` up to `stop`; the object must have the size and the ETag of `info`."""
        return self.read_range_and_etag(info, start, stop)[0]

    def read_range_and_etag(self, info: ObjectInfo, start: int, stop: int) -> tuple[memoryview, str | None]:
        """Read a range and the object's ETag, for an object of which only the size is known."""
        if stop <= start:
            return memoryview(b""), info.etag
        data, etag = self._send("read", info.key, start=start, stop=stop, etag=info.etag, num_bytes=info.num_bytes)
        if info.etag is not None and etag is not None and etag != info.etag:
            raise ChangedObject(f"{self.url(info.key)} was replaced while it was being read")
        return memoryview(data), etag

    def download(self, info: ObjectInfo, path: Path) -> None:
        """Write an object to a local file, several pieces at once."""
        if info.etag is None:
            info = self.head(info.key)._replace(num_bytes=info.num_bytes)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

        def fetch(start: int) -> None:
            data = self.read_range(info, start, min(start + PIECE_BYTES, info.num_bytes))
            while len(data):
                written = os.pwrite(descriptor, data, start)
                data, start = data[written:], start + written

        try:
            os.ftruncate(descriptor, info.num_bytes)
            starts = range(0, info.num_bytes, PIECE_BYTES)
            if len(starts) <= 1:
                # Not in a ThreadPoolExecutor: the interpreter joins its threads at exit.
                list(map(fetch, starts))
            else:
                with ThreadPoolExecutor(MAX_PIECES_AT_ONCE) as pool:
                    list(pool.map(fetch, starts))
        finally:
            os.close(descriptor)

    def put(self, key: str, data: bytes) -> None:
        """Write or replace an object atomically."""
        self._send("put", key, data=data)

    def upload(self, key: str, path: Path) -> None:
        """Write a local file as an object, atomically."""
        self._send("upload", key, path=str(path))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that does not exist yet; if several processes create it at once, one succeeds.

        False if it exists with the same bytes; raises `AlreadyThere` if it exists with others.
        """
        created: bool = self._send("create", key, data=data)
        return created

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; some may not exist."""
        self._send("delete", keys=[*keys])

    def _send(self, do: str, key: str = "", **fields: Any) -> Any:
        return send(ObjectRequest(do=do, scheme=self.scheme, bucket=self.name, key=key, **fields))
