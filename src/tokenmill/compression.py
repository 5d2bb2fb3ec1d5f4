"""Decompress gzip and zstd streams.

isal (600 MB/s of output) and zstandard (860 MB/s) were the fastest libraries on one thread. Both release the GIL.
Neither reports every kind of damage, so the classes here check what the libraries do not.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

__all__ = ["ByteStream", "DamagedInput", "Decompressor", "GzipMembers", "ZstdFrames", "lacks_checksum"]

COMPRESSED_READ_BYTES = 128 << 10
"""Compressed bytes per read. 64 to 512 KiB were equally fast; a small read leaves less to repeat after damage."""
MOST_OUTPUT_BYTES = 256 << 10
"""Decompressed bytes per read. malloc maps larger buffers again each time: 600 instead of 810 MB/s."""

FLAGS_AT, RESERVED_FLAGS = 3, 0xE0
"""RFC 1952 wants a member with one of these flags to be refused; isal does not heed them."""

LARGEST_WINDOW_BYTES = 1 << 31
"""The window of `zstd --long=31`, the largest that the zstd program writes. Decompressing takes as much memory."""


class ByteStream(Protocol):
    """A stream of bytes. A read returns up to `size` of them, and returns none only at the end."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes."""


class DamagedInput(Exception):
    """The stream cannot be read past this point; the caller already has every byte before it.

    `output_lost` is for the decompressors below: the call that failed had produced bytes before it failed.
    `num_documents` is how many documents the damage costs, as far as is known.
    """

    def __init__(self, reason: str, *, output_lost: bool = False, num_documents: int = 1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.output_lost = output_lost
        self.num_documents = num_documents


class Decompressor(ByteStream, Protocol):
    """Decompresses frames (of gzip: members), each with a checksum of its own; a read returns bytes of one frame."""

    frame_start: int
    """Where the current frame begins in the compressed bytes."""
    confirmed: int
    """How many of the returned bytes are in complete frames, whose checksums are right."""


class GzipMembers:
    """Decompresses gzip members one after another. Zeros between and after them are padding."""

    def __init__(self, source: ByteStream) -> None:
        from isal import igzip_lib

        self._source = source
        self._library: Any = igzip_lib
        self._member: Any = None
        self._pending = b""
        self._num_read = self._num_returned = 0
        self.frame_start = self.confirmed = 0

    def read(self, size: int, /) -> bytes:
        """Return up to `size` decompressed bytes of one member."""
        while True:
            if (self._member is None or self._member.eof) and not self._start_member():
                return b""
            data, self._pending = self._pending, b""
            if not data and self._member.needs_input:
                data = self._read_source()
                if not data:
                    raise DamagedInput("the gzip data ends in the middle of a member; the file is cut off")
            try:
                output: bytes = self._member.decompress(data, min(size, MOST_OUTPUT_BYTES))
            except self._library.error as error:
                reason = str(error).partition(" ")[2].partition(" ")[2]
                raise DamagedInput(f"the gzip data cannot be read: {reason.lower()}", output_lost=True) from None
            self._num_returned += len(output)
            if self._member.eof:
                self.confirmed = self._num_returned
            if output:
                return output

    def _start_member(self) -> bool:
        """Go to the next member; return False if there is none. There is always a first one, with nothing before it."""
        is_first = self._member is None
        rest: bytes = b"" if is_first else self._member.unused_data.lstrip(b"\0")
        while len(rest) < FLAGS_AT + 1:
            more = self._read_source()
            if not more:
                break
            rest = rest + more if is_first else (rest + more).lstrip(b"\0")
        self.frame_start = self._num_read - len(rest)
        if rest and not is_first and not rest.startswith(b"\x1f\x8b"):
            raise DamagedInput("the gzip data is followed by bytes that are not gzip")
        if len(rest) > FLAGS_AT and rest[FLAGS_AT] & RESERVED_FLAGS:
            raise DamagedInput("the gzip data cannot be read: a member has flags that no version of the format knows")
        self._member = self._library.IgzipDecompressor(self._library.DECOMP_GZIP)
        self._pending = rest
        return is_first or bool(rest)

    def _read_source(self) -> bytes:
        data = self._source.read(COMPRESSED_READ_BYTES)
        self._num_read += len(data)
        return data


class ZstdFrames:
    """Decompresses zstd frames one after another.

    zstandard's reader does not report a truncated input, and does not say where a frame ends. `_ZstdFrameSource` parses
    the headers of the bytes that it reads, so that each frame has a reader of its own and is known to be complete.
    """

    def __init__(self, source: ByteStream) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._source = _ZstdFrameSource(source)
        self._decompressor: Any = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
        self._frame: Any = None
        self._num_returned = 0
        self.frame_start = self.confirmed = 0

    def read(self, size: int, /) -> bytes:
        """Return up to `size` decompressed bytes of one compressed read."""
        while self._frame is not None or self._start_frame():
            try:
                # read1 returns the output of one compressed read, so a failing call loses as little as possible.
                data: bytes = self._frame.read1(min(size, MOST_OUTPUT_BYTES))
            except self._error as error:
                reason = str(error).rpartition(": ")[2].lower()
                if "too much memory" in reason:
                    reason = f"a frame needs a window above {LARGEST_WINDOW_BYTES >> 20} MiB; use a smaller --long"
                raise DamagedInput(f"the zstd data cannot be read: {reason}", output_lost=True) from None
            if data:
                self._num_returned += len(data)
                return data
            if not self._source.is_complete:
                raise DamagedInput("the zstd data ends in the middle of a frame; the file is cut off")
            self._frame, self.confirmed = None, self._num_returned
        return b""

    def _start_frame(self) -> bool:
        if not self._source.start_frame():
            return False
        self.frame_start = self._source.position
        self._frame = self._decompressor.stream_reader(self._source, COMPRESSED_READ_BYTES)
        return True


class _ZstdFrameSource:
    """The bytes of one frame after another, up to the end that the frame and block headers of RFC 8878 give."""

    def __init__(self, source: ByteStream) -> None:
        self._source = source
        self._held: bytes | memoryview = b""
        self._partial = b""
        self.is_complete = True
        self.position = 0
        """How many bytes of all frames were passed on."""

    def start_frame(self) -> bool:
        """Go to the next frame; return False if there is none."""
        self._held = self._held or self._source.read(COMPRESSED_READ_BYTES)
        self._partial = b""
        self._walk = _walk_frame()
        self._wanted = next(self._walk)
        self.is_complete = False
        return bool(self._held)

    def read(self, size: int, /) -> bytes | memoryview:
        """Return the next bytes of the frame, and none after its end.

        `_walk_frame` yields the number of bytes that it wants to read, or minus the number that it wants to skip.
        """
        if self.is_complete:
            return b""
        data = memoryview(self._held or self._source.read(size))
        offset = 0
        while offset < len(data) and not self.is_complete:
            step = min(abs(self._wanted) - len(self._partial), len(data) - offset)
            if self._wanted < 0:
                self._wanted += step
            else:
                self._partial += data[offset : offset + step]
            offset += step
            if self._wanted == len(self._partial):
                header, self._partial = self._partial, b""
                try:
                    self._wanted = self._walk.send(header)
                except StopIteration:
                    self.is_complete = True
        self._held = data[offset:]
        self.position += offset
        return data[:offset]


def _walk_frame() -> Generator[int, bytes, None]:
    magic = yield 4
    if magic[1:] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F:
        size = int.from_bytes((yield 4), "little")
        if size:
            yield -size
        return
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


def lacks_checksum(head: bytes) -> bool:
    """Whether a file that starts with `head` is zstd whose first frame has no checksum of its content."""
    while head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:
        head = head[8 + int.from_bytes(head[4:8], "little") :]
    return head[:4] == b"\x28\xb5\x2f\xfd" and len(head) > 4 and not head[4] >> 2 & 1
