"""Objects of a bucket: `s3://`, `gs://` and `az://` URLs of one object, of a folder, or with wildcards.

A run reads objects by range and does not copy them. A manifest names them by bucket and key, which are the same on
every machine.
"""

from __future__ import annotations

import glob
import re

from tokenmill.display import Display
from tokenmill.errors import UsageError
from tokenmill.inputs._glob import translate
from tokenmill.inputs.base import Expansion, Extent, Input
from tokenmill.remote.bucket import Bucket, split_url

__all__ = ["expand"]


def expand(item: str, display: Display, extent: Extent) -> Expansion:
    """List the objects of one URL. Folders are read recursively and sorted, without hidden names, as on a disk."""
    if glob.has_magic(item.partition("://")[2].partition("/")[0]):
        raise UsageError(f"input {item}: the name of a bucket has no wildcards; put them after it")
    bucket, key = split_url(item)
    # A key may contain the characters of a glob, so the object of that name comes first.
    if key and not item.endswith("/") and bucket.exists(key):
        return Expansion([_input(bucket, key)], True)
    if glob.has_magic(key):
        folder = re.split(r"[*?\[]", key)[0].rpartition("/")[0]
        keys = list(filter(translate(key).fullmatch, _list_keys(bucket, folder)))
        if not keys:
            raise UsageError(f"no object matches {item}")
    else:
        keys = _list_keys(bucket, key)
        if not keys:
            raise UsageError(f"input {item} does not exist: there is no such object, and none below that name")
        return Expansion([_input(bucket, key, folder=item.rstrip("/")) for key in keys], False)
    return Expansion([_input(bucket, key) for key in keys], False)


def _list_keys(bucket: Bucket, folder: str) -> list[str]:
    """The keys below a folder, without those that have a part which begins with a dot."""
    below = len(folder) + 1 if folder else 0
    found = (info.key for info in bucket.list(folder) if not info.key.endswith("/"))
    return sorted(key for key in found if not any(part.startswith(".") for part in key[below:].split("/")))


def _input(bucket: Bucket, key: str, folder: str | None = None) -> Input:
    return Input(bucket.url(key), name=f"{bucket.name}/{key}", folder=folder)
