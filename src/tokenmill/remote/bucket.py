"""Objects of one bucket by name. A bucket is its URL: it can be pickled, and holds no connection of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tokenmill.errors import UsageError
from tokenmill.remote.client import SCHEMES, ChangedObject, NoSuchObject, Request
from tokenmill.remote.courier import carry_out

__all__ = ["PIECE_BYTES", "Bucket", "ObjectInfo", "is_remote", "split_url"]

PIECE_BYTES = 16 << 20
"""Bytes of one request of a large download: 60 requests for a gigabyte, and none takes longer than it may."""
PIECES_AT_ONCE = 4


class ObjectInfo(NamedTuple):
    """One object; `etag` changes whenever its content does."""

    key: str
    num_bytes: int
    etag: str | None


def is_remote(path: object) -> bool:
    """Whether a path is the URL of an object store."""
    scheme, separator, _ = path.partition("://") if isinstance(path, str) else ("", "", "")
    return bool(separator) and scheme in SCHEMES


def split_url(url: str) -> tuple[Bucket, str]:
    """The bucket of a URL, and the name of the object or the folder in it."""
    scheme, _, rest = url.partition("://")
    name, _, key = rest.partition("/")
    parts = key.strip("/").split("/") if key.strip("/") else []
    if scheme not in SCHEMES or not name or not {"", ".", ".."}.isdisjoint(parts) or "\0" in url:
        known = " or ".join(f"{known}://BUCKET/PATH" for known in SCHEMES)
        raise UsageError(f"{url} is not the URL of an object; expected {known}")
    return Bucket(scheme, name), "/".join(parts)


class Bucket(NamedTuple):
    """A bucket, or a container as Azure calls it."""

    scheme: str
    name: str

    def url(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.scheme}://{self.name}/{key}"

    def head(self, key: str) -> ObjectInfo:
        """How large an object is, and its ETag."""
        return ObjectInfo(*carry_out(self._ask("head", key)))

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            self.head(key)
        except NoSuchObject:
            return False
        return True

    def list(self, folder: str) -> list[ObjectInfo]:
        """All objects below a folder, in the order of their names."""
        return sorted(ObjectInfo(*found) for found in carry_out(self._ask("list", folder)))

    def read(self, key: str) -> bytes:
        """A whole small object."""
        return bytes(carry_out(self._ask("read", key))[0])

    def read_range(self, info: ObjectInfo, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to `stop` of the very object that was looked at: all of them, or an error."""
        return self.read_part(info, start, stop)[0]

    def read_part(self, info: ObjectInfo, start: int, stop: int) -> tuple[memoryview, str | None]:
        """The same with the object's ETag, for objects of which only the size is known yet."""
        if stop <= start:
            return memoryview(b""), info.etag
        request = Request(
            do="read",
            scheme=self.scheme,
            bucket=self.name,
            key=info.key,
            start=start,
            stop=stop,
            etag=info.etag,
            num_bytes=info.num_bytes,
        )
        data, etag = carry_out(request)
        if info.etag is not None and etag is not None and etag != info.etag:
            raise ChangedObject(f"{self.url(info.key)} was replaced while it was being read")
        return memoryview(data), etag

    def download(self, info: ObjectInfo, path: Path, advance: Callable[[int], None] = lambda _: None) -> None:
        """Write an object to a local file, several pieces at once; `advance` is told the bytes of each."""
        if info.etag is None:
            info = self.head(info.key)._replace(num_bytes=info.num_bytes)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

        def fetch(start: int) -> None:
            data = self.read_range(info, start, min(start + PIECE_BYTES, info.num_bytes))
            advance(len(data))
            while len(data):
                written = os.pwrite(descriptor, data, start)
                data, start = data[written:], start + written

        try:
            os.ftruncate(descriptor, info.num_bytes)
            starts = range(0, info.num_bytes, PIECE_BYTES)
            if len(starts) <= 1:
                for start in starts:
                    fetch(start)
            else:
                with ThreadPoolExecutor(min(PIECES_AT_ONCE, len(starts))) as pool:
                    for _ in pool.map(fetch, starts):
                        pass
        finally:
            os.close(descriptor)

    def put(self, key: str, data: bytes) -> None:
        """Write an object, or replace it; nobody sees a part of it."""
        carry_out(Request(do="put", scheme=self.scheme, bucket=self.name, key=key, data=data))

    def upload(self, key: str, path: Path) -> None:
        """Write a whole local file as an object; nobody sees a part of it."""
        carry_out(Request(do="upload", scheme=self.scheme, bucket=self.name, key=key, path=str(path)))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that is not there; False if it is, with the same bytes; `AlreadyThere` if with others.

        Of several processes that create one at once, a single one succeeds.
        """
        created: bool = carry_out(Request(do="create", scheme=self.scheme, bucket=self.name, key=key, data=data))
        return created

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are none."""
        carry_out(Request(do="delete", scheme=self.scheme, bucket=self.name, keys=list(keys)))

    def _ask(self, do: str, key: str) -> Request:
        return Request(do=do, scheme=self.scheme, bucket=self.name, key=key)
