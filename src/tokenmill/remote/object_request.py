"""A request to an object store, and the server that it goes to."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

__all__ = ["SCHEMES", "ObjectInfo", "ObjectRequest", "describe_endpoint"]

SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""The schemes of URLs, each with the prefix of its environment variables."""
_ENDPOINT_NAMES = ("ENDPOINT_URL_S3", "ENDPOINT_URL", "STORAGE_ENDPOINT", "ENDPOINT", "BASE_URL")


class ObjectInfo(NamedTuple):
    """One object; its `etag` changes with its content."""

    key: str
    num_bytes: int
    etag: str | None


class ObjectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to one bucket. `do` is one of head, list, read, put, upload, create, delete."""

    do: str
    scheme: str
    bucket: str
    key: str = ""
    keys: list[str] = []
    start: int = 0
    stop: int = 0
    etag: str | None = None
    """The ETag that the object must still have."""
    num_bytes: int | None = None
    """The size that the whole object must have."""
    data: bytes = b""
    path: str = ""
    """A local file to upload."""

    @property
    def url(self) -> str:
        """The object or the bucket, as a user writes it."""
        return f"{self.scheme}://{self.bucket}/{self.key}"


def describe_endpoint(scheme: str) -> str:
    """The server for URLs of a scheme, as the environment names it."""
    names = (f"{SCHEMES[scheme]}_{name}" for name in _ENDPOINT_NAMES)
    known = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return known or {"s3": "AWS S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}[scheme]
