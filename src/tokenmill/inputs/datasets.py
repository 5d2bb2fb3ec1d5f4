"""`Dataset` and `IterableDataset` objects of Hugging Face, written down as Parquet files that a run can read.

Workers read spans of files; an object in memory, a chain of transformations or a generator has none, and may give its
documents only once. So the fields that are needed go to files beside the store first, in bounded memory, and are
removed when the store is finished. What this costs: the documents are read once more, and their compressed text is on
the disk during the run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import StoreError, UsageError
from tokenmill.files import sync_directory, write_durably
from tokenmill.inputs.columns import only_text_column
from tokenmill.progress import Display, Preparation

__all__ = ["Wanted", "find_text_key", "is_dataset", "staged"]

KINDS = {"Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"}
BATCH_ROWS = 256
GROUP_BYTES = 4 << 20
"""Of text in a row group, the smallest part of a file that a worker can be given."""
FILE_BYTES = 1 << 30
SHOW_SECONDS = 0.25
COMPLETE = ".complete.json"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What of a dataset is to be written down."""

    keys: list[str]
    """Fields that make a document; at least one of them has to be there."""
    kept: list[str]
    limit: int | None

    def columns(self, names: Sequence[str]) -> list[str]:
        """The columns of a dataset that hold these fields."""
        keys = (*self.keys, *self.kept)
        found = [name for name in names if any(key == name or key.startswith(f"{name}.") for key in keys)]
        if not any(key == name or key.startswith(f"{name}.") for key in self.keys for name in found):
            have = ", ".join(map(repr, names))
            raise UsageError(f"the dataset has no column {self.keys[0]!r}; it has {have}: pass text_key=...")
        return found


def is_dataset(value: Any) -> bool:
    """Whether a value is such an object, without importing the library that makes them."""
    return any(kind.__module__.startswith("datasets.") and kind.__name__ in KINDS for kind in type(value).__mro__)


def find_text_key(dataset: Any) -> str | None:
    """The column that holds the text where nobody has said so: `text`, or the only one of strings."""
    features = getattr(dataset, "features", None) or {}
    return only_text_column({name: str(getattr(feature, "dtype", "")) for name, feature in features.items()})


@contextmanager
def staged(dataset: Any, out: Path, wanted: Wanted, display: Display) -> Iterator[Path]:
    """A folder with the documents as Parquet files, for as long as a run takes.

    A run that fails leaves it for the next attempt; it is used again if it holds all of the same dataset.
    """
    if isinstance(dataset, dict):
        names = ", ".join(map(repr, dataset))
        raise UsageError(f"a {type(dataset).__name__} has several splits; pass one of them: {names}")
    folder = out.absolute().with_name(f".{out.absolute().name}.inputs")
    with _alone(folder, out):
        mark = {"dataset": getattr(dataset, "_fingerprint", None), "wanted": msgspec.to_builtins(wanted)}
        if mark["dataset"] is None or _read_mark(folder) != mark:
            _write(dataset, folder, wanted, display)
            with _writing(folder):
                write_durably(folder / COMPLETE, msgspec.json.encode(mark))
        yield folder
        shutil.rmtree(folder)


@contextmanager
def _alone(folder: Path, out: Path) -> Iterator[None]:
    """One run at a time: a second one would take the files away from the first."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _try_lock(descriptor) or not folder.is_dir():
            raise StoreError(f"{out} is in use by another run; wait for it, or choose another directory")
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_mark(folder: Path) -> Any:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / COMPLETE).read_bytes())
    return None


def _write(dataset: Any, folder: Path, wanted: Wanted, display: Display) -> None:
    """Write all rows, or leave nothing."""
    for path in folder.iterdir():
        path.unlink()
    try:
        _Writer(folder, wanted, display).write(dataset)
    except BaseException:
        shutil.rmtree(folder)
        raise
    finally:
        display.close()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A full disk, told apart from what may go wrong while rows are made."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from None


class _Writer:
    """Writes batches of rows to files: a new one when the last is large enough, or when columns change their types."""

    def __init__(self, folder: Path, wanted: Wanted, display: Display) -> None:
        self._folder = folder
        self._wanted = wanted
        self._display = display
        self._started = time.monotonic()
        self._shown = 0.0
        self._num_rows = 0
        self._group: list[Any] = []
        self._group_bytes = 0
        self._file: Any = None
        self._path = folder
        self._file_bytes = 0

    def write(self, dataset: Any) -> None:
        total = self._count(dataset)
        self._display.say(f"dataset    is written to {self._folder} first, and removed at the end")
        for table in _tables(dataset, self._wanted):
            left = None if self._wanted.limit is None else self._wanted.limit - self._num_rows
            self._add(table if left is None else table.slice(0, left))
            self._show(total)
            if left is not None and table.num_rows >= left:
                break
        self._end_file()
        if not self._num_rows:
            raise UsageError("the dataset has no rows")
        self._show(self._num_rows, is_last=True)
        sync_directory(self._folder)

    def _count(self, dataset: Any) -> int:
        """How many rows there will be; 0 where only reading them tells."""
        total = len(dataset) if hasattr(dataset, "__len__") else 0
        return min(total, self._wanted.limit or total)

    def _add(self, table: Any) -> None:
        if self._group and not self._group[0].schema.equals(table.schema):
            self._end_file()
        self._group.append(table)
        self._group_bytes += table.nbytes
        self._num_rows += table.num_rows
        if self._group_bytes >= GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._group:
            return
        table = pa.concat_tables(self._group)
        with _writing(self._folder):
            if self._file is None:
                # Named by its first row, so that a row of a file is a row of the dataset.
                self._path = self._folder / f"rows-{self._num_rows - table.num_rows:012d}.parquet"
                self._file = pq.ParquetWriter(self._path, table.schema, compression="zstd", compression_level=1)
            self._file.write_table(table, row_group_size=table.num_rows)
        self._file_bytes += self._group_bytes
        self._group, self._group_bytes = [], 0
        if self._file_bytes >= FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        self._end_group()
        if self._file is not None:
            with _writing(self._folder):
                self._file.close()
                _settle(self._path)
        self._file, self._file_bytes = None, 0

    def _show(self, total: int, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if now - self._shown < SHOW_SECONDS and not is_last:
            return
        self._shown = now
        moment = Preparation(
            action="writing",
            what=f"to {self._folder}",
            unit="rows",
            seconds=now - self._started,
            total=total,
            done=self._num_rows,
        )
        self._display.update(moment)


def _tables(dataset: Any, wanted: Wanted) -> Iterator[Any]:
    """The rows of a dataset as Arrow tables of the wanted columns."""
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        # What a transformation makes of rows is known only when it has made it.
        yield from (_to_table(rows, wanted) for rows in dataset.iter(BATCH_ROWS))
    elif dataset.features is None:
        yield from (_to_table(rows, wanted) for rows in dataset.with_format(None).iter(BATCH_ROWS))
    else:
        chosen = dataset.select_columns(wanted.columns(dataset.column_names)).with_format("arrow")
        yield from (table.replace_schema_metadata(None) for table in chosen.iter(BATCH_ROWS))


def _to_table(rows: Any, wanted: Wanted) -> Any:
    """Columns of Python values as a table."""
    import pyarrow as pa

    columns = {}
    for name in wanted.columns(list(rows)):
        try:
            columns[name] = pa.array(list(rows[name]))
        except (pa.ArrowException, TypeError) as error:
            said = " ".join(str(error).split())
            raise UsageError(f"column {name!r} of the dataset has values that do not go together: {said}") from None
    return pa.table(columns)


def _settle(path: Path) -> None:
    """Make a file durable, and give it a time of modification that its content decides.

    A dataset that is written down again for a resumed run then gives files that count as untouched, if they are equal.
    """
    import xxhash

    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while data := file.read(1 << 20):
            digest.update(data)
        os.fsync(file.fileno())
    stamp = digest.intdigest() >> 4
    os.utime(path, ns=(stamp, stamp))
