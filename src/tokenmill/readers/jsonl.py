"""JSON lines: one object per line, decoded a block at a time by a typed decoder.

Only the wanted fields are built, at 700 MB/s; a block in which anything is wrong is decoded
again line by line, so a bad line costs itself and nothing else. msgspec reads values, not
lines, so a block also has to be shown to hold exactly one object per line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.batch import PackedTexts, Reject, TextBatch
from tokenmill.readers.base import ReadOptions, Stream
from tokenmill.readers.blocks import BYTE_ORDER_MARK, byte_ranges, read_documents, read_file_range
from tokenmill.readers.diagnosis import Refusal, read_again, read_record_again
from tokenmill.readers.fields import as_kept, find_value, split_key
from tokenmill.readers.packing import find_all, is_utf8, pack
from tokenmill.remote.paths import InputPath

__all__ = ["JsonlReader"]

WHITESPACE = b" \t\r\n"
BLOCKS_SKIPPED = 15
"""Blocks that are not tried after one whose texts cannot be had as bytes."""
_REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class JsonlReader:
    """Reads one JSON object per line; blank lines are skipped."""

    splittable = True
    delimiter = b"\n"

    def __init__(self, options: ReadOptions) -> None:
        self._fields = _RecordFields(options) if options.record_keys else _Fields(options)
        self._packed = _PackedFields(options) if options.packed and not options.record_keys else None
        self._max_text = options.max_document_bytes
        # JSON spends at most two bytes per byte of text unless it escapes plain letters.
        self._max_line = 2 * options.max_document_bytes + (64 << 10)

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Ranges of bytes."""
        return byte_ranges(path, task_bytes)

    def read_range(self, path: InputPath, start: int, stop: int) -> Iterator[TextBatch]:
        """The documents of a plain file whose lines start in `[start, stop)`."""
        return read_file_range(
            path, start, stop, delimiter=self.delimiter, max_bytes=self._max_line, decode=self._decode
        )

    def adapt(self, stream: Stream) -> Stream:
        """The stream itself."""
        return stream

    def read_stream(self, stream: Stream, *, position: int = 0) -> Iterator[TextBatch]:
        """All documents of a stream."""
        return read_documents(stream, position, delimiter=self.delimiter, max_bytes=self._max_line, decode=self._decode)

    def _decode(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch:
        if position == 0 and data.startswith(BYTE_ORDER_MARK):
            data = b"   " + data[3:]
        starts, stops = _find_lines(data, num_bytes)
        if len(starts):
            filled, uniform = _check_lines(data, starts, stops)
            if uniform and int((stops - starts).max()) <= self._max_text:
                decoded = self._decode_block(memoryview(data)[:num_bytes], len(filled))
                if decoded is not None:
                    documents, kept = decoded
                    lines = np.arange(line, line + len(starts))
                    if len(filled) < len(starts):
                        lines = lines[np.searchsorted(starts, filled)]
                    return self._batch(documents, filled + position, kept, [], len(starts), lines)
        return self._decode_apart(data, starts, stops, position, line)

    def _decode_block(
        self, data: memoryview, num_records: int
    ) -> tuple[Sequence[Any], list[tuple[Any, ...]] | None] | None:
        packed = self._packed.decode_packed(data, num_records) if self._packed is not None else None
        return packed or self._fields.decode_block(data, num_records)

    def _decode_apart(
        self,
        data: bytes | bytearray,
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
        position: int,
        line: int,
    ) -> TextBatch:
        """Decode each line by itself, because something in the block is not as it should be."""
        documents: list[Any] = []
        positions: list[int] = []
        lines: list[int] = []
        kept: list[tuple[Any, ...]] = []
        rejects: list[Reject] = []
        for index, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            record = data[start:stop]
            if not record.strip(WHITESPACE):
                continue
            document = self._decode_one(record)
            if isinstance(document, Refusal):
                rejects.append(Reject(position + start, line + index, document.reason, document.detail))
                continue
            documents.append(document[0])
            positions.append(position + start)
            lines.append(line + index)
            kept.append(document[1])
        return self._batch(
            documents,
            np.array(positions, np.int64),
            kept if self._fields.keep_parts else None,
            rejects,
            len(starts),
            np.array(lines, np.int64),
        )

    def _batch(
        self,
        documents: Sequence[Any],
        positions: npt.NDArray[np.int64],
        kept: list[tuple[Any, ...]] | None,
        rejects: list[Reject],
        num_lines: int,
        lines: npt.NDArray[np.int64],
    ) -> TextBatch:
        if not self._fields.are_records:
            return TextBatch(documents, positions, kept, rejects, num_lines, lines=lines)
        return TextBatch([], positions, kept, rejects, num_lines, records=list(documents), lines=lines)

    def _decode_one(self, record: bytes | bytearray) -> tuple[Any, tuple[Any, ...]] | Refusal:
        if len(record) > self._max_line:
            return Refusal("too-long", f"{len(record):,} bytes in one document, more than --max-document-bytes allows")
        document = self._fields.decode_one(record)
        if isinstance(document, Refusal) or len(record) <= self._max_text or self._fields.are_records:
            return document
        num_bytes = len(document[0].encode())
        if num_bytes > self._max_text:
            return Refusal("too-long", f"the text has {num_bytes:,} bytes; --max-document-bytes is {self._max_text:,}")
        return document


class _RecordFields:
    """A decoder of several fields as they are; one that is missing is None."""

    are_records = True

    def __init__(self, options: ReadOptions) -> None:
        self.keep_parts = tuple(map(split_key, options.keep_keys))
        self._parts = tuple(map(split_key, options.record_keys))
        self._names = [parts[0] for parts in self._parts] if all(len(parts) == 1 for parts in self._parts) else None
        self._decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])

    def decode_block(self, data: memoryview, num_records: int) -> tuple[list[Any], list[tuple[Any, ...]] | None] | None:
        """The documents of `num_records` lines, None if there is anything wrong with one of them."""
        try:
            records = self._decoder.decode_lines(data)
        except _REFUSALS:
            return None
        if len(records) != num_records:
            return None
        return [self._values(record) for record in records], list(map(self._kept, records)) if self.keep_parts else None

    def decode_one(self, data: bytes | bytearray) -> tuple[Any, tuple[Any, ...]] | Refusal:
        """The document of one line, or what is wrong with it."""
        try:
            record = self._decoder.decode(data)
        except _REFUSALS:
            return read_record_again(data)
        return self._values(record), self._kept(record)

    def _values(self, record: dict[str, Any]) -> tuple[Any, ...]:
        if self._names is not None:
            return tuple([record.get(name) for name in self._names])
        return tuple([find_value(record, parts) for parts in self._parts])

    def _kept(self, record: dict[str, Any]) -> tuple[str | None, ...]:
        return tuple(as_kept(find_value(record, parts)) for parts in self.keep_parts)


class _Fields:
    """A decoder made for the wanted fields, which skips all others without building them."""

    are_records = False

    def __init__(self, options: ReadOptions, text_kind: Any = str) -> None:
        self.text_parts = split_key(options.text_key)
        self.keep_parts = tuple(map(split_key, options.keep_keys))
        top = self.text_parts[0]
        kept_tops = {parts[0] for parts in self.keep_parts if parts != self.text_parts}
        kind: Any = Any
        if top not in kept_tops:
            kind = text_kind
            for name in reversed(self.text_parts[1:]):
                kind = msgspec.defstruct("Nested", [("inner", kind)], rename={"inner": name}, gc=False)
        self._typed = kind is not Any
        names = {"text": top} | {f"kept{n}": name for n, name in enumerate(sorted(kept_tops - {top}))}
        fields: list[Any] = [("text", kind), *((name, Any, None) for name in names if name != "text")]
        # No cycle can come out of JSON, so the collector need not look at these.
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Record", fields, rename=names, gc=False))
        self._text_of = attrgetter("text" + ".inner" * (len(self.text_parts) - 1) if self._typed else "text")
        field_of = {name: field for field, name in names.items()}
        self._kept_of = [
            (self._text_of, ()) if parts == self.text_parts else (attrgetter(field_of[parts[0]]), parts[1:])
            for parts in self.keep_parts
        ]

    def decode_block(self, data: memoryview, num_records: int) -> tuple[list[str], list[tuple[Any, ...]] | None] | None:
        """The documents of `num_records` lines, None if there is anything wrong with one of them."""
        try:
            records = self._decoder.decode_lines(data)
        except _REFUSALS:
            return None
        texts = self._texts(records)
        if len(records) != num_records or texts is None:
            return None
        return texts, [self._kept(record) for record in records] if self.keep_parts else None

    def decode_one(self, data: bytes | bytearray) -> tuple[str, tuple[Any, ...]] | Refusal:
        """The document of one line, or what is wrong with it."""
        try:
            record = self._decoder.decode(data)
        except _REFUSALS:
            return read_again(data, self.text_parts, self.keep_parts)
        texts = self._texts([record])
        return read_again(data, self.text_parts, self.keep_parts) if texts is None else (texts[0], self._kept(record))

    def _texts(self, records: list[Any]) -> list[str] | None:
        texts = list(map(self._text_of, records))
        if not self._typed:
            texts = [find_value(text, self.text_parts[1:]) for text in texts]
            if not all(type(text) is str for text in texts):
                return None
        return texts

    def _kept(self, record: Any) -> tuple[str | None, ...]:
        return tuple(as_kept(find_value(value_of(record), parts)) for value_of, parts in self._kept_of)


class _PackedFields(_Fields):
    """Texts as bytes: their JSON strings are joined, and the escapes of all of them undone at once."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options, msgspec.Raw)
        # A text that is also kept has to be a string.
        self._is_possible = self._typed and self.text_parts not in self.keep_parts
        self._skip = 0

    def decode_packed(
        self, data: memoryview, num_records: int
    ) -> tuple[PackedTexts, list[tuple[Any, ...]] | None] | None:
        """The documents of `num_records` lines, None if there is anything wrong or out of the ordinary."""
        if self._skip or not self._is_possible or not num_records:
            self._skip = max(0, self._skip - 1)
            return None
        try:
            records = self._decoder.decode_lines(data)
        except _REFUSALS:
            return None
        packed = pack(list(map(self._text_of, records))) if len(records) == num_records and is_utf8(data) else None
        if packed is None:
            # What one block has, such as non-ASCII letters as escapes, the next ones mostly have too.
            self._skip = BLOCKS_SKIPPED
            return None
        return packed, [self._kept(record) for record in records] if self.keep_parts else None


def _find_lines(data: bytes | bytearray, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where lines start and stop, without their line ends, in the first `stop` bytes."""
    if data.count(b"\n", 0, min(stop, 8192)) > 16:
        stops = np.flatnonzero(np.frombuffer(data, np.uint8, stop) == 10)
    else:
        # 8 GB/s against 4 GB/s, as long as lines are longer than about 500 bytes.
        stops = np.array(find_all(data, b"\n", stop), np.int64)
    if stop and not data.endswith(b"\n", 0, stop):
        stops = np.append(stops, stop)
    starts = np.zeros(len(stops), np.int64)
    starts[1:] = stops[:-1] + 1
    return starts, stops


def _check_lines(
    data: bytes | bytearray, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], bool]:
    """The starts of lines that are not empty, and whether each of these runs from `{` to `}`.

    Inside one JSON value no `{` follows a `}` but for white space, so every line of such a
    block starts a value; with as many values as lines, each line is exactly one.
    """
    codes = np.frombuffer(data, np.uint8)
    last = stops - 1
    last = last - (codes[last] == 13)
    filled = last >= starts
    if not filled.all():
        starts, last = starts[filled], last[filled]
    return starts, bool((codes[starts] == 123).all() and (codes[last] == 125).all())
