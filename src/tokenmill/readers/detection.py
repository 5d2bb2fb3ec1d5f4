"""Which format an input has.

Content decides before the name does: Parquet announces itself, and files are looked into for
JSON, because arrays, JSON lines and objects in a row go by each other's names and by `.txt`.
What is still unknown is refused rather than guessed.
"""

from __future__ import annotations

from json import JSONDecoder

import msgspec

from tokenmill.errors import DataError
from tokenmill.files import DamagedInput, detect_compression, open_stream
from tokenmill.readers.base import ReadOptions
from tokenmill.remote.paths import InputPath

__all__ = ["detect_format", "format_by_name"]

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_COMPRESSION_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")
_FORMATS_OF_JSON = {"lines": "jsonl", "mixed": "jsonl", "cut": "jsonl", "array": "json", "values": "json"}
HEAD_BYTES = 64 << 10


def detect_format(path: InputPath, head: bytes, options: ReadOptions) -> str:
    """The format of a file that starts with `head`, which may be compressed."""
    compression = detect_compression(head, str(path))
    if compression != "none":
        head = _decompressed_head(path, compression)
    if head.startswith(b"PAR1"):
        return "parquet"
    named = format_by_name(path)
    if options.whole_files or options.separator is not None:
        if named not in (None, "text"):
            flag = "--whole-files" if options.whole_files else "--separator"
            raise DataError(
                str(path), f"{flag} is for plain text, and this is {named}. Pass --format text to read it so"
            )
        return "text"
    found = _look_at_json(head)
    if named == "json":
        return "jsonl" if found in ("lines", "mixed") else "json"
    if named == "jsonl":
        return "json" if found == "array" else "jsonl"
    if named == "text":
        return "jsonl" if found == "lines" else "text"
    if found in _FORMATS_OF_JSON:
        return _FORMATS_OF_JSON[found]
    if not head:
        return "text"
    known = ", ".join(("parquet", *sorted(suffix[1:] for suffix in _SUFFIXES)))
    raise DataError(
        str(path), f"its format is not known (names that are: {known}). Pass --format json|jsonl|parquet|text"
    )


def format_by_name(path: InputPath) -> str | None:
    """What a file's name says of its format, as far as it says anything."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSION_SUFFIXES:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _decompressed_head(path: InputPath, compression: str) -> bytes:
    head = b""
    with open_stream(path, compression) as stream:
        try:
            while len(head) < HEAD_BYTES and (data := stream.read(HEAD_BYTES - len(head))):
                head += data
        except DamagedInput:
            pass
    return head


def _look_at_json(head: bytes) -> str:
    """What JSON a file's first bytes are.

    `lines` of one object each, `mixed` with other lines; the start of a line that is `cut` off; an `array` of objects;
    `values` over several lines, or several on one; or `none` of these.
    """
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        inside = head[1:].lstrip()
        return "array" if inside.startswith(b"{") and not _has_object_after_line(head) else "none"
    if not head.startswith(b"{"):
        return "none"
    position = 0
    for line in head.splitlines(keepends=True):
        kind = _judge_line(line)
        if kind == "cut" and position + len(line) == len(head) and not line.endswith(b"\n"):
            return "lines" if position else "cut"
        if kind != "whole":
            spread = line.startswith(b"{") and _is_spread(head[position:])
            return "values" if spread else "mixed" if position else "none"
        position += len(line)
    return "lines"


def _judge_line(line: bytes) -> str:
    """Whether a line is blank or a `whole` JSON object, one that was `cut` off, or `none`."""
    if not line.strip():
        return "whole"
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "cut" if "truncated" in str(error) else "none"
    return "whole"


def _is_spread(data: bytes) -> bool:
    """Whether a value begins here that does not end with its line, or is not alone on it."""
    if _judge_line(data) in ("whole", "cut"):
        return True
    text = data.decode("utf-8", "replace")
    try:
        _, end = JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return text[end:].lstrip().startswith("{")


def _has_object_after_line(head: bytes) -> bool:
    """Whether the second line is a record, so that the first one, an array, is a bad record among JSON lines."""
    _, _, rest = head.partition(b"\n")
    return _judge_line(rest.partition(b"\n")[0]) == "whole" and rest.lstrip().startswith(b"{")
