"""Files: which ones a run reads, their decompressed bytes, and how results replace files.

`open_stream` hands over every byte that can be decompressed before it reports damage, because
a truncated download should cost its missing end and nothing before it. Compression is told
from the first bytes, never from the name.
"""

# Names stay strings while inputs are listed: `os.path` takes a tenth of the time of `Path` on 10,000 files.
# ruff: noqa: PTH100, PTH112, PTH116, PTH120, PTH207
from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from tokenmill.errors import DataError, UsageError

__all__ = [
    "Compression",
    "DamagedInput",
    "InputStream",
    "Stream",
    "changed_while_read",
    "detect_compression",
    "expand_inputs",
    "fingerprint",
    "open_stream",
    "relative_names",
    "sync_directory",
    "write_durably",
]

LARGEST_WINDOW_BYTES = 1 << 31
"""What `zstd --long=31` needs, the largest window the zstd program writes."""
WHOLE_FINGERPRINT_BYTES = 8 << 20
"""Files up to this size are fingerprinted whole."""


def expand_inputs(inputs: Sequence[str]) -> list[Path]:
    """The files that files, directories, globs and `@lists` stand for, in the order given.

    Directories are read recursively and sorted, without hidden files. A file that several
    globs or directories reach is read once, at its first place; one that is named twice is
    refused, because it cannot be told whether that is meant.
    """
    named: dict[str, bool] = {}
    paths: list[Path] = []
    for item in _with_lists(inputs):
        files, is_named = _expand(item)
        for file in files:
            key = os.path.abspath(file)
            if key not in named:
                named[key] = is_named
                paths.append(Path(_check_name(file)))
            elif is_named and named[key]:
                raise UsageError(f"input {file} is named twice; to repeat it, change its weight when loading")
            else:
                named[key] = named[key] or is_named
    if not paths:
        raise UsageError("no input files were given")
    return paths


def _with_lists(inputs: Iterable[str]) -> Iterator[str]:
    for item in inputs:
        if not item.startswith("@"):
            yield item
            continue
        try:
            lines = Path(item[1:]).read_text("utf-8-sig").splitlines()
        except OSError as error:
            raise UsageError(f"list of inputs {item[1:]} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"list of inputs {item[1:]} is not UTF-8 text with one path per line") from None
        paths = [line.strip() for line in lines if line.strip()]
        if not paths:
            raise UsageError(f"list of inputs {item[1:]} names no files")
        yield from paths


def _expand(item: str) -> tuple[list[str], bool]:
    """The files of one input, and whether it names its file rather than finding it."""
    try:
        mode = os.stat(item).st_mode
    except (OSError, ValueError):
        if not glob.has_magic(item):
            raise UsageError(f"input {item} does not exist") from None
        matches = sorted(glob.glob(item, recursive=True))
        files = [file for match in matches for file in (_walk(match) if os.path.isdir(match) else [match])]
        if not files:
            raise UsageError(f"no file matches {item}") from None
        return files, False
    if stat.S_ISDIR(mode):
        files = _walk(item)
        if not files:
            raise UsageError(f"directory {item} holds no files (hidden ones are not read)")
        return files, False
    if not stat.S_ISREG(mode):
        raise UsageError(f"input {item} is not a regular file; a run reads its inputs more than once")
    return [item], True


def _walk(folder: str) -> list[str]:
    """Files below a folder, sorted; links to folders are followed, each folder is entered once."""
    files: list[str] = []
    pending, entered = [folder], set()
    while pending:
        current = pending.pop()
        status = os.stat(current)
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        (pending if entry.is_dir() else files).append(entry.path)
        except OSError as error:
            raise UsageError(f"directory {current} cannot be read: {error.strerror}") from None
    return sorted(files)


def _check_name(file: str) -> str:
    try:
        file.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name of input {file!r} is not UTF-8; rename it") from None
    return file


def relative_names(paths: Sequence[Path]) -> list[str]:
    """Names below the common folder with forward slashes, so that a manifest holds no absolute path."""
    absolute = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(path) for path in absolute]) if absolute else ""
    skip = len(folder) if folder.endswith(os.sep) else len(folder) + 1
    return [path[skip:].replace(os.sep, "/") for path in absolute]


def open_stream(path: Path, compression: str, *, max_window_bytes: int = LARGEST_WINDOW_BYTES) -> InputStream:
    """The decompressed bytes of a file, members and frames joined.

    A zstd frame may ask for as much memory as its window; one above `max_window_bytes` counts
    as damage, with a reason that says so.
    """
    return InputStream(path, compression, max_window_bytes=max_window_bytes)


class InputStream:
    """A file's decompressed bytes; raises `DamagedInput` after the last one that is readable."""

    def __init__(self, path: Path, compression: str, *, max_window_bytes: int = LARGEST_WINDOW_BYTES) -> None:
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

    def __init__(self, path: Path, piece_bytes: int | None, *, single_bytes_from: int | None = None) -> None:
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


def fingerprint(path: Path) -> str:
    """A hash that tells two contents apart without reading all of a large file.

    xxh3-128 of the size (8 bytes, little endian), then the whole content up to 8 MiB; above
    that the first and last 64 KiB and 64 blocks of 64 KiB spread evenly between them.
    """
    import xxhash

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

    The name of the temporary file ends in `.tmp` and holds the process id: two processes that
    write the same file cannot publish each other's half.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
