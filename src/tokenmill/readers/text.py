"""Plain text: a document per line, per piece between separators, or per file.

Blank lines are no documents, and a line end may be CR LF. Between separators every piece is
a document as it is, an empty one too; only an empty piece after the last separator is not,
since files end with one more often than not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.batch import PackedTexts, Reject, TextBatch
from tokenmill.compression import DamagedInput
from tokenmill.errors import UsageError
from tokenmill.files import open_stream
from tokenmill.readers.base import ReadOptions, Stream
from tokenmill.readers.blocks import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    byte_ranges,
    overlaps_itself,
    read_documents,
    read_file_range,
)
from tokenmill.readers.diagnosis import Refusal
from tokenmill.readers.packing import is_utf8
from tokenmill.remote.paths import InputPath

__all__ = ["TextReader"]


class TextReader:
    """Reads plain UTF-8 text."""

    def __init__(self, options: ReadOptions) -> None:
        if options.separator is not None and options.whole_files:
            raise UsageError("--separator and --whole-files exclude each other")
        if options.record_keys:
            raise UsageError(f"plain text has no field {options.record_keys[0]!r}; supervised data is JSON or Parquet")
        if options.separator == "":
            raise UsageError("--separator is empty; expected at least one character")
        self._lines = options.separator is None
        self._whole = options.whole_files
        self._max_text = options.max_document_bytes
        self._packs = options.packed
        self._num_kept = len(options.keep_keys)
        self._cut_at = b"\n" if options.separator is None else options.separator.encode()
        self.splittable = not self._whole and not overlaps_itself(self._cut_at)
        self.delimiter = b"" if self._whole else self._cut_at

    @property
    def _max_piece(self) -> int:
        """Room for a byte order mark and a carriage return beside the text."""
        return self._max_text + len(BYTE_ORDER_MARK) + 1

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Ranges of bytes, or all of them where a file is read front to back."""
        return byte_ranges(path, task_bytes) if self.splittable else [(0, path.stat().st_size)]

    def read_range(self, path: InputPath, start: int, stop: int) -> Iterator[TextBatch]:
        """The documents of a plain file that start in `[start, stop)`."""
        if self.splittable:
            yield from read_file_range(
                path, start, stop, delimiter=self._cut_at, max_bytes=self._max_piece, decode=self._decode
            )
            return
        assert start == 0
        with open_stream(path, "none") as stream:
            yield from self.read_stream(stream)

    def adapt(self, stream: Stream) -> Stream:
        """The stream itself."""
        return stream

    def read_stream(self, stream: Stream, *, position: int = 0) -> Iterator[TextBatch]:
        """All documents of a stream."""
        if self._whole:
            return self._read_whole(stream)
        return read_documents(stream, position, delimiter=self._cut_at, max_bytes=self._max_piece, decode=self._decode)

    def _decode(self, data: bytes | bytearray, num_bytes: int, position: int, line: int) -> TextBatch:
        pieces: list[bytes | bytearray] = [*data[:num_bytes].split(self._cut_at)]
        positions = np.zeros(len(pieces), np.int64)
        np.cumsum([len(piece) + len(self._cut_at) for piece in pieces[:-1]], out=positions[1:])
        positions += position
        if position == 0:
            pieces[0] = pieces[0].removeprefix(BYTE_ORDER_MARK)
        if not pieces[-1]:
            pieces.pop()
        num_lines = len(pieces)
        lines = np.arange(line, line + num_lines) if self._cut_at == b"\n" else np.full(num_lines, -1)
        wanted = list(range(num_lines))
        if self._lines:
            pieces = [piece.removesuffix(b"\r") for piece in pieces]
            wanted = [index for index, piece in enumerate(pieces) if piece.strip()]
            pieces = [pieces[index] for index in wanted]
        longest = max(map(len, pieces), default=0)
        if self._packs and longest <= self._max_text and is_utf8(memoryview(data)[:num_bytes]):
            packed = PackedTexts(PackedTexts.SEPARATOR.join(pieces), len(pieces), longest)
            batch = TextBatch(packed, positions[wanted], self._kept(len(pieces)), lines=lines[wanted])
        else:
            batch = self._decode_pieces(pieces, positions[wanted], lines[wanted])
        batch.num_lines = num_lines
        return batch

    def _decode_pieces(
        self,
        pieces: Sequence[bytes | bytearray],
        positions: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
    ) -> TextBatch:
        rejects: list[Reject] = []
        if max(map(len, pieces), default=0) <= self._max_text:
            try:
                texts = [str(piece, "utf-8") for piece in pieces]
                return TextBatch(texts, positions, self._kept(len(texts)), lines=lines)
            except UnicodeDecodeError:
                pass
        texts, good = [], []
        for index, piece in enumerate(pieces):
            document = _decode_piece(piece, self._max_text)
            if isinstance(document, Refusal):
                rejects.append(Reject(int(positions[index]), int(lines[index]), document.reason, document.detail))
            else:
                texts.append(document)
                good.append(index)
        return TextBatch(texts, positions[good], self._kept(len(texts)), rejects, lines=lines[good])

    def _read_whole(self, stream: Stream) -> Iterator[TextBatch]:
        held, num_bytes = bytearray(), 0
        refusal: Refusal | None = None
        try:
            while data := stream.read(BLOCK_BYTES):
                num_bytes += len(data)
                if num_bytes <= self._max_piece + BLOCK_BYTES:
                    held += data
        except DamagedInput as damage:
            refusal = Refusal("damaged", damage.reason)
        if num_bytes > len(held):
            refusal = refusal or _too_long(num_bytes, self._max_text)
        document = refusal or _decode_piece(held.removeprefix(BYTE_ORDER_MARK), self._max_text)
        if isinstance(document, Refusal):
            rejects, texts = [Reject(0, 0, document.reason, document.detail)], []
        else:
            rejects, texts = [], [document]
        zero = np.zeros(len(texts), np.int64)
        yield TextBatch(texts, zero, self._kept(len(texts)), rejects, 1, num_bytes, lines=zero)

    def _kept(self, num_documents: int) -> list[tuple[Any, ...]] | None:
        """Plain text has no fields, so each kept one is empty."""
        return [(None,) * self._num_kept] * num_documents if self._num_kept else None


def _decode_piece(piece: bytes | bytearray, max_text: int) -> str | Refusal:
    if len(piece) > max_text:
        return _too_long(len(piece), max_text)
    try:
        return str(piece, "utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        return Refusal("invalid-utf8", f"byte {error.start} of the document (0x{bad:02x}) is not UTF-8")


def _too_long(num_bytes: int, max_text: int) -> Refusal:
    return Refusal("too-long", f"the text has {num_bytes:,} bytes; --max-document-bytes is {max_text:,}")
