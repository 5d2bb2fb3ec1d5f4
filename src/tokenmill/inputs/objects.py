"""Objects of a bucket: `s3://`, `gs://` and `az://` URLs of one object, of a folder, or with wildcards.

They are read where they are, by range. A manifest calls them by bucket and name, which is the same on every machine.
"""

from __future__ import annotations

import glob
import re

from tokenmill.errors import UsageError
from tokenmill.inputs.base import ALL, Expansion, Extent, Input
from tokenmill.progress import Display
from tokenmill.remote.bucket import Bucket, split_url

__all__ = ["expand"]


def expand(item: str, display: Display, extent: Extent = ALL) -> Expansion:
    """The objects of one URL. Folders are read recursively and sorted, without hidden names, as on a disk."""
    if glob.has_magic(item.partition("://")[2].partition("/")[0]):
        raise UsageError(f"input {item}: the name of a bucket has no wildcards; put them behind it")
    bucket, key = split_url(item)
    # Names of objects may have any character, those of wildcards too: what is there under this very name is meant.
    if key and not item.endswith("/") and bucket.exists(key):
        return Expansion([_input(bucket, key)], True)
    if glob.has_magic(key):
        folder = key[: re.search(r"[*?\[]", key).start()].rpartition("/")[0]  # type: ignore[union-attr]
        pattern = re.compile(_translate(key))
        keys = [name for name in _names(bucket, folder) if pattern.fullmatch(name)]
        if not keys:
            raise UsageError(f"no object matches {item}")
    else:
        keys = _names(bucket, key)
        if not keys:
            raise UsageError(f"input {item} does not exist: there is no such object, and none below that name")
    return Expansion([_input(bucket, name) for name in keys], False)


def _names(bucket: Bucket, folder: str) -> list[str]:
    """All objects below a folder, without those that have a part which begins with a dot."""
    below = len(folder) + 1 if folder else 0
    found = (info.key for info in bucket.list(folder) if not info.key.endswith("/"))
    return sorted(key for key in found if not any(part.startswith(".") for part in key[below:].split("/")))


def _input(bucket: Bucket, key: str) -> Input:
    return Input(bucket.url(key), name=f"{bucket.name}/{key}")


def _translate(pattern: str) -> str:
    """A glob as a regular expression: `*` stays inside a folder, `**/` goes through all below one."""
    pieces = re.split(r"(\*\*/|\*|\?|\[!?\]?[^\]]*\])", pattern)
    known = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known.get(piece) or _translate_piece(piece) for piece in pieces)


def _translate_piece(piece: str) -> str:
    if len(piece) > 2 and piece.startswith("[") and piece.endswith("]"):
        inner = piece[1:-1].replace("\\", "\\\\")
        return f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner.replace('^', chr(92) + '^')}]"
    return re.escape(piece)
