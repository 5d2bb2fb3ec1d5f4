"""Files: their decompressed bytes, how their content is told apart, and how results replace files.

`open_stream` hands over every byte that can be decompressed before it reports damage, because
a truncated download should cost its missing end and nothing before it. Compression is told
from the first bytes, never from the name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tokenmill.compression import (
    COMPRESSED_READ_BYTES,
    Compression,
    DamagedInput,
    GzipMembers,
    Stream,
    ZstdFrames,
    detect_compression,
)
from tokenmill.errors import DataError
from tokenmill.remote.paths import InputPath, RemotePath

__all__ = [
    "Compression",
    "DamagedInput",
    "InputStream",
    "Stream",
    "changed_while_read",
    "create_durably",
    "detect_compression",
    "fingerprint",
    "open_stream",
    "sync_directory",
    "write_durably",
]

LARGEST_WINDOW_BYTES = 1 << 31
"""What `zstd --long=31` needs, the largest window the zstd program writes."""
WHOLE_FINGERPRINT_BYTES = 8 << 20
"""Files up to this size are fingerprinted whole."""


def open_stream(path: InputPath, compression: str, *, max_window_bytes: int = LARGEST_WINDOW_BYTES) -> InputStream:
    """The decompressed bytes of a file, members and frames joined.

    A zstd frame may ask for as much memory as its window; one above `max_window_bytes` counts
    as damage, with a reason that says so.
    """
    return InputStream(path, compression, max_window_bytes=max_window_bytes)


class InputStream:
    """A file's decompressed bytes; raises `DamagedInput` after the last one that is readable."""

    def __init__(self, path: InputPath, compression: str, *, max_window_bytes: int = LARGEST_WINDOW_BYTES) -> None:
        makers: dict[str, Callable[[_Source], Stream]] = {
            "none": lambda source: source,
            "gzip": GzipMembers,
            "zstd": lambda source: ZstdFrames(source, max_window_bytes),
        }
        self._path = path
        self._decompress = makers[compression]
        self._source = _Source(path, COMPRESSED_READ_BYTES if compression != "none" else None)
        self._decompressed = self._decompress(self._source)
        self._num_delivered = 0
        self._damage: str | None = None
        self._rescued = b""
        self.step_back = self._source.step_back if compression == "none" else None
        """Have the last bytes handed over again; only a plain file can."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; `b""` at the end."""
        if self._damage is None:
            try:
                data = self._decompressed.read(size)
                self._num_delivered += len(data)
                return data
            except DamagedInput as damage:
                self._damage = damage.reason
                self._rescued = self._rescue() if damage.output_lost else b""
        if not self._rescued:
            raise DamagedInput(self._damage)
        data, self._rescued = self._rescued[:size], self._rescued[size:]
        return data

    @property
    def consumed(self) -> int:
        """How many bytes of the file itself have been read."""
        return self._source.offset

    def _rescue(self) -> bytes:
        """What the failed call could have given: decompress again, the last piece byte by byte.

        A decompressor that fails keeps what it made in that call, so the call has to be cut
        into calls small enough that the failing one has nothing to give.
        """
        num_known, pieces = self._num_delivered, []
        with _Source(self._path, COMPRESSED_READ_BYTES, single_bytes_from=self._source.last_start) as source:
            again = self._decompress(source)
            try:
                while piece := again.read(min(num_known, 1 << 20) or 1 << 20):
                    if num_known:
                        num_known -= len(piece)
                    else:
                        pieces.append(piece)
            except DamagedInput:
                pass
        return b"".join(pieces)

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> InputStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Source:
    """A file's own bytes, in pieces of one size, from some offset on one byte at a time."""

    def __init__(self, path: InputPath, piece_bytes: int | None, *, single_bytes_from: int | None = None) -> None:
        self._path = path
        self._piece_bytes = piece_bytes
        self._single_bytes_from = single_bytes_from
        self.offset = 0
        self.last_start = 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(str(path), f"cannot be opened: {error.strerror}") from None

    def read(self, size: int = -1, /) -> bytes:
        if self._piece_bytes is not None:
            size = self._piece_bytes
        if self._single_bytes_from is not None:
            size = max(1, min(size, self._single_bytes_from - self.offset))
        try:
            data = self._file.read(size)
        except OSError as error:
            raise DataError(str(self._path), f"cannot be read at byte {self.offset}: {error.strerror}") from None
        if data:
            self.last_start = self.offset
            self.offset += len(data)
        return data

    def step_back(self, num_bytes: int) -> None:
        self.offset = self._file.seek(-num_bytes, os.SEEK_CUR)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fingerprint(path: InputPath) -> str:
    """A hash that tells two contents apart without reading all of a large file.

    xxh3-128 of the size (8 bytes, little endian), then the whole content up to 8 MiB; above
    that the first and last 64 KiB and 64 blocks of 64 KiB spread evenly between them. Of an object in a bucket it is
    the ETag.
    """
    import xxhash

    if isinstance(path, RemotePath):
        return path.fingerprint()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
        if size <= WHOLE_FINGERPRINT_BYTES:
            spans = [(0, size)]
        else:
            block = 64 << 10
            room = size - 3 * block
            spans = [(0, block), *((block + room * index // 63, block) for index in range(64)), (size - block, block)]
        for offset, length in spans:
            file.seek(offset)
            while length and (data := file.read(min(length, 1 << 20))):
                digest.update(data)
                length -= len(data)
    return digest.hexdigest()


def changed_while_read(num_bytes: int, num_expected: int) -> str:
    """What to say of an input that is not what it was when the run began."""
    sizes = f"{num_bytes:,} bytes, and {num_expected:,} when the run began"
    if num_bytes == num_expected:
        sizes = f"other content in the same {num_bytes:,} bytes than when the run began"
    return f"changed while it was read: {sizes}; run again with --overwrite"


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file so that after a crash it holds either all of `data` or what it held before.

    The name of the temporary file ends in `.tmp` and is nobody else's: two processes that write the
    same file, on this machine or another, cannot publish each other's half.
    """
    temporary = _write_beside(path, data)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def create_durably(path: Path, data: bytes) -> bool:
    """Write a file that is not there yet, whole from its first instant on; False where another may have been faster.

    Of several processes that do so at once, one succeeds. Where the file system has no links, the last one does, and
    nobody is told so: all have to read what is there.
    """
    temporary = _write_beside(path, data)
    try:
        try:
            os.link(temporary, path)
            is_first = True
        except FileExistsError:
            return False
        except OSError:
            if not path.exists():
                temporary.replace(path)
            is_first = False
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return is_first


def _write_beside(path: Path, data: bytes) -> Path:
    """A durable file with the data, under a temporary name in the same directory."""
    # Process ids are no help: in containers that share a disk, they are all the same.
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
