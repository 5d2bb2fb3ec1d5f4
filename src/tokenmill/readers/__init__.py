"""Readers by name, and the format of an input.

Content decides before the name does. Parquet files have a magic number. Files are searched for JSON, because arrays,
JSON lines and concatenated objects are stored under each other's suffixes and under `.txt`. A file whose format is
still unknown is an error; nothing is guessed.
"""

from __future__ import annotations

from contextlib import suppress
from json import JSONDecoder
from shlex import quote

import msgspec

from tokenmill.compression import DamagedInput
from tokenmill.errors import DataError, UsageError
from tokenmill.files import InputStream, detect_compression
from tokenmill.readers.base import DelimitedReader, Reader, ReadOptions
from tokenmill.readers.json import JsonReader
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.readers.parquet import ParquetReader
from tokenmill.readers.text import MarkdownReader, TextReader
from tokenmill.remote.paths import InputPath

__all__ = [
    "MARKDOWN",
    "READERS",
    "DelimitedReader",
    "ReadOptions",
    "Reader",
    "delimited_reader_for",
    "detect_format",
    "format_by_name",
    "is_one_document",
    "reader_for",
]

MARKDOWN = "markdown"
READERS: dict[str, type[Reader]] = {
    "json": JsonReader,
    "jsonl": JsonlReader,
    MARKDOWN: MarkdownReader,
    "parquet": ParquetReader,
    "text": TextReader,
}

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".md": MARKDOWN,
}
_COMPRESSION_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")
_FORMATS_BY_CONTENT = {
    "json": {"lines": "jsonl", "mixed": "jsonl"},
    "jsonl": {"array": "json"},
    "text": {"lines": "jsonl"},
    MARKDOWN: {"lines": "jsonl"},
    None: {"lines": "jsonl", "mixed": "jsonl", "cut": "jsonl", "array": "json", "values": "json"},
}
"""For the format of each suffix: which results of `_look_at_json` mean another format."""
_HEAD_BYTES = 64 << 10
_ENCODINGS = {
    "UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
    "UTF-16": (b"\xff\xfe", b"\xfe\xff"),
}
"""The byte order marks of texts that are not UTF-8."""
_TABLES = {".csv": ("CSV", ""), ".tsv": ("TSV", ", sep='\\t'")}


def reader_for(format: str, options: ReadOptions) -> Reader:
    """Create the reader of a format."""
    if format not in READERS:
        raise UsageError(f"format {format!r} is not known; expected one of {', '.join(READERS)}")
    return READERS[format](options)


def is_one_document(format: str, options: ReadOptions) -> bool:
    """Whether the whole content of a file is a single document, which no two tasks can share."""
    return options.whole_files or format == MARKDOWN


def delimited_reader_for(format: str, options: ReadOptions) -> DelimitedReader:
    """Create the reader of a format that can be read as a stream, which is every format except Parquet."""
    reader = READERS[format](options)
    assert isinstance(reader, DelimitedReader)
    return reader


def detect_format(path: InputPath, head: bytes, options: ReadOptions) -> str:
    """Return the format of a file that starts with `head`, which may be compressed."""
    compression = detect_compression(head, str(path))
    if compression != "none":
        head = _decompressed_head(path, compression)
    if head.startswith(b"PAR1"):
        return "parquet"
    _refuse_others(path, head)
    named = format_by_name(path)
    if options.whole_files or options.separator is not None:
        if named not in (None, "text", MARKDOWN):
            flag = "--whole-files" if options.whole_files else "--separator"
            raise DataError(str(path), f"{flag} is for plain text, and this is {named}; pass --format text to allow it")
        return "text"
    format = _FORMATS_BY_CONTENT[named].get(_look_at_json(head), named)
    if format is not None or not head:
        return format or "text"
    known = ", ".join(("parquet", *sorted(suffix[1:] for suffix in _SUFFIXES)))
    raise DataError(
        str(path), f"its format is not known (known suffixes: {known}). Pass --format json|jsonl|parquet|text"
    )


def format_by_name(path: InputPath) -> str | None:
    """Return the format that the suffix of a file stands for, or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSION_SUFFIXES:
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _refuse_others(path: InputPath, head: bytes) -> None:
    """Name what people take for text, and say what to do with it."""
    name = str(path).rpartition("/")[2]
    encoding = next((found for found, marks in _ENCODINGS.items() if head.startswith(marks)), None)
    if encoding is not None:
        convert = f"iconv -f {encoding} -t UTF-8 {quote(name)} > NEW"
        raise DataError(str(path), f"is {encoding} text, and UTF-8 is read. Convert it: {convert}")
    kind = next((_TABLES[suffix] for suffix in map(str.lower, path.suffixes) if suffix in _TABLES), None)
    if kind is not None:
        convert = f"tokenmill.tokenize(pandas.read_csv({name!r}{kind[1]}), ...)"
        raise DataError(str(path), f"is {kind[0]}, which is not read. Write it as JSON lines or Parquet, or: {convert}")


def _decompressed_head(path: InputPath, compression: str) -> bytes:
    head = b""
    with InputStream(path, compression) as stream, suppress(DamagedInput):
        while len(head) < _HEAD_BYTES and (data := stream.read(_HEAD_BYTES - len(head))):
            head += data
    return head


def _look_at_json(head: bytes) -> str:
    """Classify the JSON at the start of a file.

    `lines` are one object each; `mixed` has other lines too; `cut` is the start of one line; `array` is an array of
    objects; `values` are objects over several lines or several on one line; `none` is anything else.
    """
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        inside = head[1:].lstrip()
        return "array" if inside.startswith(b"{") and not _has_object_after_line(head) else "none"
    if not head.startswith(b"{"):
        return "none"
    position = 0
    for line in head.splitlines(keepends=True):
        kind = _classify_line(line)
        if kind == "cut" and position + len(line) == len(head) and not line.endswith(b"\n"):
            return "lines" if position else "cut"
        if kind != "whole":
            spread = line.startswith(b"{") and _is_spread(head[position:])
            return "values" if spread else "mixed" if position else "none"
        position += len(line)
    return "lines"


def _classify_line(line: bytes) -> str:
    """Return `whole` for a blank line or a JSON object, `cut` for the start of an object, or `none`."""
    if not line.strip():
        return "whole"
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "cut" if "truncated" in str(error) else "none"
    return "whole"


def _is_spread(data: bytes) -> bool:
    """Whether the object that begins here continues on the next line, or is followed by another on its line."""
    if _classify_line(data) in ("whole", "cut"):
        return True
    text = data.decode("utf-8", "replace")
    try:
        _, end = JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return text[end:].lstrip().startswith("{")


def _has_object_after_line(head: bytes) -> bool:
    """Whether the second line is a record, so that an array on the first line is a bad record of JSON lines."""
    _, _, rest = head.partition(b"\n")
    return _classify_line(rest.partition(b"\n")[0]) == "whole" and rest.lstrip().startswith(b"{")
