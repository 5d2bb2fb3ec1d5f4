"""Decompress gzip and zstd streams.

isal (600 MB/s of output) and zstandard (860 MB/s) were the fastest libraries on one thread. Both release the GIL.
Neither reports every kind of damage, so the classes here check what the libraries do not.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

__all__ = ["ByteStream", "DamagedInput", "GzipMembers", "ZstdFrames"]

COMPRESSED_READ_BYTES = 128 << 10
"""Compressed bytes per read. 64 to 512 KiB were equally fast; a small read leaves less to repeat after damage."""
MOST_OUTPUT_BYTES = 256 << 10
"""Decompressed bytes per read. malloc maps larger buffers anew each time: 600 instead of 810 MB/s."""

LARGEST_WINDOW_BYTES = 1 << 31
"""The window of `zstd --long=31`, the largest that the zstd program writes. Decompressing takes as much memory."""


class ByteStream(Protocol):
    """Bytes in order. A read returns up to `size` bytes, and none only at the end."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes."""


class DamagedInput(Exception):
    """A stream cannot be read any further; the caller already has every byte before this point.

    `output_lost` is for the decompressors below: the call that failed had produced bytes before it failed.
    """

    def __init__(self, reason: str, *, output_lost: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.output_lost = output_lost


class GzipMembers:
    """Decompresses gzip members one after another. Zeros between and after them are padding."""

    def __init__(self, source: ByteStream) -> None:
        from isal import igzip_lib

        self._source = source
        self._library: Any = igzip_lib
        self._member = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
        self._pending = b""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` decompressed bytes of one member."""
        while True:
            if self._member.eof and not self._start_member():
                return b""
            data, self._pending = self._pending, b""
            if not data and self._member.needs_input:
                data = self._source.read(COMPRESSED_READ_BYTES)
                if not data:
                    raise DamagedInput("the gzip data ends in the middle of a member; the file is cut off")
            try:
                output: bytes = self._member.decompress(data, min(size, MOST_OUTPUT_BYTES))
            except self._library.error as error:
                reason = str(error).partition(" ")[2].partition(" ")[2]
                raise DamagedInput(f"the gzip data cannot be read: {reason.lower()}", output_lost=True) from None
            if output:
                return output

    def _start_member(self) -> bool:
        rest = self._member.unused_data.lstrip(b"\0")
        while len(rest) < 2:
            more = self._source.read(COMPRESSED_READ_BYTES)
            if not more:
                break
            rest = (rest + more).lstrip(b"\0")
        if rest and not rest.startswith(b"\x1f\x8b"):
            raise DamagedInput("the gzip data is followed by bytes that are not gzip")
        self._member = self._library.IgzipDecompressor(self._library.DECOMP_GZIP)
        self._pending = rest
        return bool(rest)


class ZstdFrames:
    """Decompresses zstd frames one after another.

    zstandard's reader does not report a truncated input. `_ZstdHeaders` parses the frame and block headers of the
    bytes that it reads, to know whether the last frame was complete.
    """

    def __init__(self, source: ByteStream) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._headers = _ZstdHeaders(source)
        decompressor: Any = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
        self._reader = decompressor.stream_reader(self._headers, COMPRESSED_READ_BYTES, read_across_frames=True)

    def read(self, size: int, /) -> bytes:
        """Return up to `size` decompressed bytes of one compressed read."""
        try:
            # read1 returns the output of one compressed read, so a failing call loses as little as possible.
            data: bytes = self._reader.read1(min(size, MOST_OUTPUT_BYTES))
        except self._error as error:
            reason = str(error).rpartition(": ")[2].lower()
            if "too much memory" in reason:
                reason = f"a frame needs a window above {LARGEST_WINDOW_BYTES >> 20} MiB; use a smaller --long"
            raise DamagedInput(f"the zstd data cannot be read: {reason}", output_lost=True) from None
        if not data and not self._headers.between_frames:
            raise DamagedInput("the zstd data ends in the middle of a frame; the file is cut off")
        return data


class _ZstdHeaders:
    """Passes on the bytes of a source, and parses the frame and block headers of RFC 8878 in them."""

    def __init__(self, source: ByteStream) -> None:
        self._source = source
        self.between_frames = True
        self._partial = b""
        self._walk = self._steps()
        self._wanted = next(self._walk)

    def read(self, size: int, /) -> bytes:
        """Return the next bytes.

        `_steps` yields the number of bytes that it wants to read, or minus the number that it wants to skip.
        """
        data = self._source.read(size)
        offset = 0
        while offset < len(data):
            step = min(abs(self._wanted) - len(self._partial), len(data) - offset)
            if self._wanted < 0:
                self._wanted += step
            else:
                self._partial += data[offset : offset + step]
            offset += step
            if self._wanted == len(self._partial):
                header, self._partial = self._partial, b""
                self._wanted = self._walk.send(header)
            self.between_frames &= not self._partial
        return data

    def _steps(self) -> Generator[int, bytes, None]:
        while True:
            self.between_frames = True
            magic = yield 4
            self.between_frames = False
            if magic[1:] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F:
                size = int.from_bytes((yield 4), "little")
                if size:
                    yield -size
                continue
            while magic != b"\x28\xb5\x2f\xfd":
                yield -(1 << 40)
            descriptor = (yield 1)[0]
            single, checksum, dictionary = descriptor >> 5 & 1, descriptor >> 2 & 1, descriptor & 3
            content = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
            rest = (0 if single else 1) + (0, 1, 2, 4)[dictionary] + content
            if rest:
                yield -rest
            last = 0
            while not last:
                block = int.from_bytes((yield 3), "little")
                last, kind, size = block & 1, block >> 1 & 3, block >> 3
                size = 1 if kind == 1 else size
                if size:
                    yield -size
            if checksum:
                yield -4
