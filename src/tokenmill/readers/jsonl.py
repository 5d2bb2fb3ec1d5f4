"""JSON lines: one object per line, a block of lines at a time.

For an engine that takes packed texts, `_line_scanner.c` decodes a block in one pass. Lines that it does not understand,
and everything if it was not compiled, are decoded with msgspec, which builds only the requested fields. If anything in
a block is wrong, each of its lines is decoded on its own, so that a bad line does not affect others. msgspec decodes
values and does not care about lines, so the reader also checks that each line is exactly one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokenmill.readers._blocks import (
    BYTE_ORDER_MARK,
    LARGEST_BLOCK,
    Places,
    find_filled_lines,
    find_lines,
    line_scanner,
    skipped_as_too_long,
)
from tokenmill.readers._json_errors import explain_record, read_again
from tokenmill.readers.base import DelimitedReader, ReadOptions, as_kept, find_value, split_key
from tokenmill.text_batch import PackedTexts, Refusal, Reject, TextBatch, too_long

__all__ = ["JsonlReader"]

WHITESPACE = b" \t\r\n"
MOST_SCANNED = 32
"""Fields that the scanner looks for, and the depth to which their names may lead."""
_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_Kept = tuple["str | None", ...]
_Decoded = tuple[Places, Sequence[Any], "list[_Kept] | None", dict[int, Refusal]]
"""The numbers of the lines that are documents, these documents, their kept values, and refusals by line number."""


class JsonlReader(DelimitedReader):
    """Reads one JSON object per line and skips blank lines."""

    splittable = True

    def __init__(self, options: ReadOptions) -> None:
        self._has_records = bool(options.record_keys)
        self._fields = _RecordFields(options) if self._has_records else _TextFields(options)
        self._scanner = (
            _Scanner(options) if options.packed and not self._has_records and _Scanner.can(options) else None
        )
        self._max_text = options.max_document_bytes
        # JSON spends at most two bytes per byte of text unless it escapes plain letters.
        self.memory_bytes = options.memory_bytes
        self.max_bytes = 2 * options.max_document_bytes + (64 << 10)

    def decode(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch:
        """Decode all lines at once, or each on its own if something in the block is wrong."""
        if position == 0 and data.startswith(BYTE_ORDER_MARK):
            data = b"   " + data[3:]
        if self._scanner is not None and (scanned := self._scan(data, num_bytes, position, line)) is not None:
            return scanned
        starts, stops, numbers, num_lines = find_lines(data, num_bytes, WHITESPACE)
        block = self._decode_block(memoryview(data)[:num_bytes], starts, stops) if len(starts) else None
        if block is None and len(starts) == num_lines and (filled := find_filled_lines(data, num_bytes, WHITESPACE)):
            starts, stops, numbers, num_lines = filled
            block = self._decode_block(memoryview(data)[:num_bytes], starts, stops) if len(starts) else None
        good, documents, kept, refusals = block or self._decode_lines(data, starts, stops)
        rejects = [
            Reject(position + int(starts[index]), line + int(numbers[index]), *why) for index, why in refusals.items()
        ]
        texts, records = ([], list(documents)) if self._has_records else (documents, None)
        lines = numbers[good] + line
        return TextBatch(texts, starts[good] + position, kept, rejects, num_lines, records=records, lines=lines)

    def _scan(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch | None:
        """Decode all lines in one pass; return None if there are documents among those that the scanner leaves."""
        assert self._scanner is not None
        if num_bytes > LARGEST_BLOCK:
            return None
        found = self._scanner.scan(data, num_bytes, self._max_text, self.max_bytes)
        rejects = []
        for start, stop, number in found.odd.tolist():
            document = self._decode_one(data[start:stop])
            if not isinstance(document, Refusal):
                return None
            rejects.append(Reject(position + start, line + number, *document))
        return TextBatch(
            found.texts,
            found.starts + position,
            found.kept,
            rejects,
            found.num_lines,
            lines=found.numbers + line,
        )

    def _decode_block(self, data: memoryview, starts: Places, stops: Places) -> _Decoded | None:
        good, is_uniform = _check_lines(data, starts, stops)
        if not is_uniform or int((stops - starts).max()) > self._max_text:
            return None
        decoded = self._fields.decode_block(data, len(good))
        return (good, *decoded, {}) if decoded is not None else None

    def _decode_lines(self, data: bytes | bytearray, starts: Places, stops: Places) -> _Decoded:
        good: list[int] = []
        documents: list[Any] = []
        kept: list[_Kept] = []
        refusals: dict[int, Refusal] = {}
        for index, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            record = data[start:stop]
            if not record.strip(WHITESPACE):
                continue
            document = self._decode_one(record)
            if isinstance(document, Refusal):
                refusals[index] = document
            else:
                good.append(index)
                documents.append(document[0])
                kept.append(document[1])
        return np.array(good, np.int64), documents, kept if self._fields.keep_parts else None, refusals

    def _decode_one(self, record: bytes | bytearray) -> tuple[Any, _Kept] | Refusal:
        if len(record) > self.max_bytes:
            return skipped_as_too_long(len(record))
        document = self._fields.decode_one(record)
        if isinstance(document, Refusal) or len(record) <= self._max_text or self._has_records:
            return document
        num_bytes = len(document[0].encode())
        return too_long(num_bytes, self._max_text) if num_bytes > self._max_text else document


class _RecordFields:
    """Decodes objects and picks several fields of each; a missing field is None."""

    def __init__(self, options: ReadOptions) -> None:
        self.keep_parts = tuple(map(split_key, options.keep_keys))
        self._parts = tuple(map(split_key, options.record_keys))
        self._nothing = (None,) * len(self._parts)
        self._needed = [number for number, key in enumerate(options.record_keys) if key in options.needed_keys]
        self._names = [parts[0] for parts in self._parts] if all(len(parts) == 1 for parts in self._parts) else None
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, Any])

    def decode_block(self, data: memoryview, num_records: int) -> tuple[Sequence[Any], list[_Kept] | None] | None:
        """Return the documents of `num_records` lines and their kept values, or None if anything is wrong."""
        try:
            records = self._decoder.decode_lines(data)
        except _REFUSALS:
            return None
        documents = self._documents(records) if len(records) == num_records else None
        if documents is None:
            return None
        return documents, [self._kept(record) for record in records] if self.keep_parts else None

    def decode_one(self, data: bytes | bytearray) -> tuple[Any, _Kept] | Refusal:
        """Return the document of one line and its kept values, or why there is none."""
        try:
            record = self._decoder.decode(data)
        except _REFUSALS:
            return self._read_again(data)
        documents = self._documents([record])
        return self._read_again(data) if documents is None else (documents[0], self._kept(record))

    def _documents(self, records: list[Any]) -> Sequence[Any] | None:
        """Return the document of each record, or None if one of them has none."""
        if self._names is not None:
            documents = [tuple([record.get(name) for name in self._names]) for record in records]
        else:
            documents = [tuple([find_value(record, parts) for parts in self._parts]) for record in records]
        if self._nothing in documents:
            return None
        lacks = any(document[number] is None for document in documents for number in self._needed)
        return None if lacks else documents

    def _kept(self, record: Any) -> _Kept:
        return tuple(as_kept(find_value(record, parts)) for parts in self.keep_parts)

    def _read_again(self, data: bytes | bytearray) -> tuple[Any, _Kept] | Refusal:
        return explain_record(data, self._parts, [self._parts[number] for number in self._needed])


class _TextFields(_RecordFields):
    """Decodes the text and the kept fields, and skips all others without building them."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._text_parts = split_key(options.text_key)
        top = self._text_parts[0]
        kept_tops = {parts[0] for parts in self.keep_parts if parts != self._text_parts}
        kind: Any = Any
        if top not in kept_tops:
            kind = str
            for name in reversed(self._text_parts[1:]):
                kind = msgspec.defstruct("Nested", [("inner", kind)], rename={"inner": name}, gc=False)
        self._typed = kind is not Any
        names = {"text": top} | {f"kept{n}": name for n, name in enumerate(sorted(kept_tops - {top}))}
        fields: list[Any] = [("text", kind), *((name, Any, None) for name in names if name != "text")]
        # JSON has no reference cycles, so the garbage collector need not track the records.
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Record", fields, rename=names, gc=False))
        self._text_of = attrgetter("text" + ".inner" * (len(self._text_parts) - 1) if self._typed else "text")
        field_of = {name: field for field, name in names.items()}
        self._kept_of = [
            (self._text_of, ())
            if self._typed and parts == self._text_parts
            else (attrgetter(field_of[parts[0]]), parts[1:])
            for parts in self.keep_parts
        ]

    def _documents(self, records: list[Any]) -> Sequence[Any] | None:
        texts = list(map(self._text_of, records))
        if not self._typed:
            texts = [find_value(text, self._text_parts[1:]) for text in texts]
            if not all(type(text) is str for text in texts):
                return None
        return texts

    def _kept(self, record: Any) -> _Kept:
        return tuple(as_kept(find_value(value_of(record), parts)) for value_of, parts in self._kept_of)

    def _read_again(self, data: bytes | bytearray) -> tuple[Any, _Kept] | Refusal:
        return read_again(data, self._text_parts, self.keep_parts)


class _Scanned(NamedTuple):
    """The documents of a block, with the starts and numbers of their lines, and the lines that were left."""

    texts: PackedTexts
    starts: Places
    numbers: Places
    kept: list[_Kept] | None
    num_lines: int
    odd: Places


class _Scanner:
    """Calls `scan_json` and gives its numbers names."""

    def __init__(self, options: ReadOptions) -> None:
        paths = [split_key(key) for key in (options.text_key, *options.keep_keys)]
        self._paths = tuple(tuple(name.encode() for name in path) for path in paths)

    @staticmethod
    def can(options: ReadOptions) -> bool:
        """Whether the scanner was compiled, and looks for this many fields as deep as they are."""
        keys = (options.text_key, *options.keep_keys)
        return line_scanner is not None and max(len(keys), *(len(split_key(key)) for key in keys)) <= MOST_SCANNED

    def scan(self, data: bytes | bytearray, num_bytes: int, most_bytes: int, most_line_bytes: int) -> _Scanned:
        """Decode the first `num_bytes`; longer texts and lines are left."""
        found = line_scanner.scan_json(data, num_bytes, self._paths, most_bytes, most_line_bytes)
        texts, longest, leads, num_lines, documents, odd = found
        rows = np.frombuffer(documents, np.int64).reshape(-1, 2 * len(self._paths))
        kept = None
        if len(self._paths) > 1:
            kept = [
                tuple(_kept_value(data, *span) for span in zip(row[::2], row[1::2], strict=True))
                for row in rows[:, 2:].tolist()
            ]
        left = np.frombuffer(odd, np.int64).reshape(-1, 3)
        packed = PackedTexts(texts, len(rows), longest, leads)
        return _Scanned(packed, rows[:, 0], rows[:, 1], kept, num_lines, left)


def _kept_value(data: bytes | bytearray, start: int, stop: int) -> str | None:
    return as_kept(msgspec.json.decode(data[start:stop])) if start >= 0 else None


def _check_lines(data: memoryview, starts: Places, stops: Places) -> tuple[Places, bool]:
    """Return the numbers of lines that are not empty, and whether each of them begins with `{` and ends with `}`.

    Inside one JSON value, `{` never follows `}` with only white space between them. So every such line starts a new
    value, and if a block has as many values as lines, each line is exactly one value.
    """
    codes = np.frombuffer(data, np.uint8)
    last = stops - 1
    last = last - (codes[last] == 13)
    filled = np.flatnonzero(last >= starts)
    return filled, bool((codes[starts[filled]] == 123).all() and (codes[last[filled]] == 125).all())
