"""Plain text: a document per line, per piece between separators, or per file. A Markdown file is one document.

Blank lines are not documents, and a line may end with CR LF. With a separator every piece is a document, even an empty
one, except an empty piece after the last separator, because most files end with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from tokenmill.arrow_types import is_utf8
from tokenmill.compression import ByteStream, DamagedInput
from tokenmill.errors import UsageError
from tokenmill.readers._blocks import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    LARGEST_BLOCK,
    Places,
    exceeds_memory,
    find_filled_lines,
    line_scanner,
    overlaps_itself,
)
from tokenmill.readers.base import DelimitedReader, ReadOptions
from tokenmill.text_batch import PackedTexts, Refusal, Reject, TextBatch, too_long

__all__ = ["MarkdownReader", "TextReader"]

WHITESPACE = b" \t\n\v\f\r"
Piece = bytes | bytearray


class TextReader(DelimitedReader):
    """Reads plain UTF-8 text."""

    def __init__(self, options: ReadOptions) -> None:
        if options.separator is not None and options.whole_files:
            raise UsageError("--separator and --whole-files exclude each other; pass one of them")
        if options.record_keys:
            raise UsageError(f"plain text has no field {options.record_keys[0]!r}; supervised data is JSON or Parquet")
        if options.separator == "":
            raise UsageError("--separator is empty; expected at least one character")
        self._lines = options.separator is None
        self._max_text = options.max_document_bytes
        # Room for a byte order mark and a carriage return beside the text.
        self.memory_bytes = options.memory_bytes
        self.max_bytes = self._max_text + len(BYTE_ORDER_MARK) + 1
        self._packs = options.packed
        self._is_scanned = self._packs and self._lines and not options.whole_files and line_scanner is not None
        self._num_kept = len(options.keep_keys)
        if options.whole_files:
            self.delimiter = b""
        elif options.separator is not None:
            self.delimiter = options.separator.encode()
        self.splittable = not options.whole_files and not overlaps_itself(self.delimiter)

    def read_stream(self, stream: ByteStream, *, position: int = 0) -> Iterator[TextBatch]:
        """Read all documents of a stream."""
        return super().read_stream(stream, position=position) if self.delimiter else self._read_whole(stream)

    def decode(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch:
        """Decode all documents at once, or each on its own if one of them is refused."""
        mark = BYTE_ORDER_MARK if position == 0 and data.startswith(BYTE_ORDER_MARK) else b""
        if self._is_scanned and not mark and (scanned := self._scan(data, num_bytes, position, line)) is not None:
            return scanned
        pieces, starts, numbers, num_lines = self._cut(data, num_bytes, mark)
        positions = starts + position
        lines = numbers + line if self.delimiter == b"\n" else np.full(len(pieces), -1)
        if self._lines:
            pieces = [piece.removesuffix(b"\r") for piece in pieces]
            wanted = [index for index, piece in enumerate(pieces) if piece.strip()]
            pieces = [pieces[index] for index in wanted]
            positions, lines = positions[wanted], lines[wanted]
        longest = max(map(len, pieces), default=0)
        if longest <= self._max_text:
            whole: Sequence[str]
            with suppress(UnicodeDecodeError):
                if self._packs and is_utf8(memoryview(data)[:num_bytes]):
                    whole = PackedTexts(PackedTexts.SEPARATOR.join(pieces), len(pieces), longest)
                else:
                    whole = [str(piece, "utf-8") for piece in pieces]
                return TextBatch(whole, positions, self._kept(len(whole)), num_lines=num_lines, lines=lines)
        texts, good, rejects = [], [], []
        for index, piece in enumerate(pieces):
            document = _decode_piece(piece, self._max_text)
            if isinstance(document, Refusal):
                rejects.append(Reject(int(positions[index]), int(lines[index]), *document))
            else:
                texts.append(document)
                good.append(index)
        return TextBatch(texts, positions[good], self._kept(len(texts)), rejects, num_lines, lines=lines[good])

    def _scan(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch | None:
        """Pack all lines in one pass; return None if one of them is refused."""
        found = line_scanner.scan_text(data, num_bytes, self._max_text) if num_bytes <= LARGEST_BLOCK else None
        if found is None:
            return None
        texts, longest, leads, num_lines, documents = found
        starts, numbers = np.frombuffer(documents, np.int64).reshape(-1, 2).T
        packed = PackedTexts(texts, len(starts), longest, leads)
        kept = self._kept(len(starts))
        return TextBatch(packed, starts + position, kept, num_lines=num_lines, lines=numbers + line)

    def _cut(self, data: bytes | bytearray, num_bytes: int, mark: bytes) -> tuple[list[Piece], Places, Places, int]:
        """Return the pieces (blank lines may be left out), their starts and numbers, and the number of all pieces.

        `mark` is a prefix that is not text.
        """
        pieces: list[Piece]
        if self._lines and (filled := find_filled_lines(data, num_bytes, WHITESPACE)):
            starts, stops, numbers, num_lines = filled
            pieces = [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            if len(starts) and not starts[0]:
                pieces[0] = pieces[0].removeprefix(mark)
            return pieces, starts, numbers, num_lines
        pieces = [*data[:num_bytes].split(self.delimiter)]
        starts = np.zeros(len(pieces), np.int64)
        np.cumsum([len(piece) + len(self.delimiter) for piece in pieces[:-1]], out=starts[1:])
        pieces[0] = pieces[0].removeprefix(mark)
        if not pieces[-1]:
            pieces.pop()
        return pieces, starts[: len(pieces)], np.arange(len(pieces)), len(pieces)

    def _read_whole(self, stream: ByteStream) -> Iterator[TextBatch]:
        held, num_bytes = bytearray(), 0
        refusal: Refusal | None = None
        try:
            while data := stream.read(BLOCK_BYTES):
                num_bytes += len(data)
                if num_bytes <= min(self.max_bytes, self.memory_bytes) + BLOCK_BYTES:
                    held += data
        except DamagedInput as damage:
            refusal = Refusal("damaged", damage.reason, damage.num_documents)
        if num_bytes > len(held):
            if refusal is None and num_bytes <= self.max_bytes:
                raise exceeds_memory(num_bytes, 0)
            refusal = refusal or too_long(num_bytes, self._max_text)
        document = refusal or _decode_piece(held.removeprefix(BYTE_ORDER_MARK), self._max_text)
        texts = [] if isinstance(document, Refusal) else [document]
        rejects = [Reject(0, 0, *document)] if isinstance(document, Refusal) else []
        zero = np.zeros(len(texts), np.int64)
        yield TextBatch(texts, zero, self._kept(len(texts)), rejects, 1, num_bytes, lines=zero)

    def _kept(self, num_documents: int) -> list[tuple[Any, ...]] | None:
        """Plain text has no fields, so every kept value is None."""
        return [(None,) * self._num_kept] * num_documents if self._num_kept else None


class MarkdownReader(TextReader):
    """Reads a Markdown file, whose lines are no documents: a paragraph has many of them."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(msgspec.structs.replace(options, whole_files=True, separator=None))


def _decode_piece(piece: bytes | bytearray, max_text: int) -> str | Refusal:
    if len(piece) > max_text:
        return too_long(len(piece), max_text)
    try:
        return str(piece, "utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        return Refusal("invalid-utf8", f"byte {error.start} of the document (0x{bad:02x}) is not UTF-8")
