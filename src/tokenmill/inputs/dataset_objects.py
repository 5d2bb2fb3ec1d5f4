"""`Dataset` objects of Hugging Face, DataFrames and other rows in memory, written to Parquet files for a run to read.

Workers read spans of files. An object in memory, a chain of transformations or a generator has no files, and may yield
its documents only once. So the columns that a run needs are written to files beside the store first, and removed when
the store is finished. This costs another pass over the documents, and disk space for their compressed text during the
run. The library's own `to_parquet` writes one file, fails if a generator changes a type, and cannot name a bad row.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.arrow_types import find_type, holds_text
from tokenmill.checksum import hash_rest
from tokenmill.display import Display, Preparation
from tokenmill.errors import DataError, StoreError, UsageError
from tokenmill.file_lock import is_same_file, try_lock
from tokenmill.files import sync_directory, write_durably
from tokenmill.inputs._peek import only_text_column
from tokenmill.inputs.row_objects import HeldRows, hold_rows

__all__ = ["DatasetRows", "find_dataset", "find_text_key", "staged"]

KINDS = {"Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"}
BATCH_ROWS = 256
GROUP_BYTES = 4 << 20
"""Size of a row group, the smallest part of a file that a worker can be given."""
FILE_BYTES = 1 << 30
SHOW_SECONDS = 0.25
COMPLETE = ".complete.json"
FILE_NAME = re.compile(r"rows-(\d{12})\.parquet")
"""Contains the number of the first row, which turns a row of a file into a row of the dataset."""
ROW = re.compile(r"row (\d+)")
SURROGATE = re.compile("[\ud800-\udfff]")


class DatasetRows(msgspec.Struct, frozen=True, kw_only=True):
    """The columns and rows of a dataset that a run needs."""

    keys: list[str]
    """Fields that make a document; at least one of them must exist."""
    kept: list[str]
    limit: int | None

    def columns(self, names: Sequence[str]) -> list[str]:
        """The columns of the dataset that hold these fields; refuses fields that no column has."""
        keys = (*self.keys, *self.kept)
        found = [name for name in names if any(_is_in(key, name) for key in keys)]
        if not any(_is_in(key, name) for key in self.keys for name in found):
            raise UsageError(f"the dataset has no column {self.keys[0]!r}; {_advise(names)}")
        for key in self.kept:
            if not any(_is_in(key, name) for name in found):
                raise UsageError(f"the dataset has no column {key!r} to keep; it has {_quoted(names)}")
        return found

    def check(self, schema: Any) -> None:
        """Refuse columns whose types cannot become documents, before all rows are written."""
        import pyarrow.types as types

        for key in self.kept:
            if find_type(schema, key) is None:
                raise UsageError(f"column {key.partition('.')[0]!r} of the dataset has no field {key!r} to keep")
        kind = find_type(schema, self.keys[0])
        # Several fields may be of any type, and so may messages, which are a list of objects.
        if len(self.keys) > 1 or kind is None or (types.is_list(kind) and types.is_struct(kind.value_type)):
            return
        if not holds_text(kind):
            raise UsageError(
                f"column {self.keys[0]!r} of the dataset has type {kind}, and texts are strings; name another with "
                "text_key=..., or convert it with map"
            )


def _is_in(key: str, column: str) -> bool:
    """Whether a field is a column or lies inside one."""
    return key == column or key.startswith(f"{column}.")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "no columns"


def _advise(names: Sequence[str]) -> str:
    if "messages" in names:
        return f"it has {_quoted(names)}: pass messages_key='messages' for conversations, or text_key=..."
    return f"it has {_quoted(names)}" + (": pass text_key=..." if names else "")


def find_dataset(value: Any) -> Any:
    """A dataset of Hugging Face, or other rows in memory; None for anything else. Does not import the libraries."""
    if any(kind.__module__.startswith("datasets.") and kind.__name__ in KINDS for kind in type(value).__mro__):
        return value
    return hold_rows(value)


def find_text_key(dataset: Any) -> str | None:
    """The column that holds the text by default: `text`, or the only column of strings."""
    features = getattr(dataset, "features", None) or {}
    return only_text_column({name: str(getattr(feature, "dtype", "")) for name, feature in features.items()})


@contextmanager
def staged(dataset: Any, out: Path, rows: DatasetRows, display: Display) -> Iterator[Path]:
    """Write the documents to a folder of Parquet files, and remove it after the run.

    A run that fails leaves the folder, and the next attempt uses it if it holds all of the same dataset.
    """
    if isinstance(dataset, dict):
        kind, splits = type(dataset).__name__, _quoted(list(dataset))
        raise UsageError(f"the dataset is a set of splits, {kind}; pass one of them: {splits}")
    folder = out.absolute().with_name(f".{out.absolute().name}.inputs")
    with _locked(folder, out):
        # The library's hash of the rows covers the code of a function that makes them, but not the data that it reads.
        fingerprint = None if _is_transformed(dataset) else getattr(dataset, "_fingerprint", None)
        mark = {"dataset": fingerprint, "wanted": msgspec.to_builtins(rows)}
        if fingerprint is None or _read_mark(folder) != mark:
            _write(dataset, folder, rows, display)
            with _writing(folder):
                write_durably(folder / COMPLETE, msgspec.json.encode(mark))
        try:
            yield folder
        except DataError as error:
            raise _in_dataset(error, folder) from None
        shutil.rmtree(folder)


def _is_transformed(dataset: Any) -> bool:
    """Whether a function makes the rows when they are read."""
    return bool((getattr(dataset, "format", None) or {}).get("type") == "custom")


def _in_dataset(error: DataError, folder: Path) -> DataError:
    """An error in a file of the folder, as an error in the dataset that was written to it."""
    file, row = FILE_NAME.search(error.path), ROW.fullmatch(error.place or "")
    if file is None:
        return error
    place = f"row {int(file[1]) + int(row[1])}" if row is not None else None
    stays = f"; the rows stay in {folder} for another attempt"
    return DataError("the dataset", error.reason + stays, place)


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """Lock the folder: a second run would replace the files of the first."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not try_lock(descriptor) or not is_same_file(descriptor, folder):
            raise StoreError(f"{out} is in use by another run; wait for it, or choose another directory")
        yield
    finally:
        os.close(descriptor)


def _read_mark(folder: Path) -> Any:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / COMPLETE).read_bytes())
    return None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Report errors of the disk in a sentence; errors of the user's code pass unchanged."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from None


def _write(dataset: Any, folder: Path, rows: DatasetRows, display: Display) -> None:
    """Write all rows; remove the folder if that fails."""
    for path in folder.iterdir():
        path.unlink()
    display.say(f"dataset    is written to {folder} first, which is removed at the end")
    # 0 if the number of rows is unknown until they are read.
    total = len(dataset) if hasattr(dataset, "__len__") else 0
    total = min(total, rows.limit or total)
    started, shown = time.monotonic(), 0.0

    def show(num_rows: int, *, is_last: bool = False) -> None:
        nonlocal shown
        now = time.monotonic()
        if is_last or now - shown >= SHOW_SECONDS:
            shown = now
            moment = Preparation(
                action="writing",
                what=f"to {folder}",
                unit="rows",
                seconds=now - started,
                total=num_rows if is_last else total,
                done=num_rows,
            )
            display.update(moment)

    try:
        num_rows = _write_files(_row_groups(dataset, rows, show), folder)
        if not num_rows:
            raise UsageError("the dataset has no rows")
        show(num_rows, is_last=True)
        sync_directory(folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    finally:
        display.close()


def _write_files(groups: Iterator[Any], folder: Path) -> int:
    """Write row groups to files, and start another file when one is large enough or when a column changes its type."""
    import pyarrow.parquet as pq

    file: Any = None
    path = folder
    num_rows = file_bytes = 0
    for group in groups:
        with _writing(folder):
            if file is not None and (file_bytes >= FILE_BYTES or not file.schema.equals(group.schema)):
                file.close()
                _make_durable(path)
                file = None
            if file is None:
                path = folder / f"rows-{num_rows:012d}.parquet"
                file = pq.ParquetWriter(path, group.schema, compression="zstd", compression_level=1)
                file_bytes = 0
            file.write_table(group, row_group_size=group.num_rows)
        num_rows += group.num_rows
        file_bytes += group.nbytes
    if file is not None:
        with _writing(folder):
            file.close()
            _make_durable(path)
    return num_rows


def _row_groups(dataset: Any, rows: DatasetRows, show: Callable[[int], None]) -> Iterator[Any]:
    """Yield the rows, up to the limit, in tables of `GROUP_BYTES` that have one schema each."""
    import pyarrow as pa

    group: list[Any] = []
    num_rows = group_bytes = 0
    for table in _tables(dataset, rows):
        if group and (group_bytes >= GROUP_BYTES or not group[0].schema.equals(table.schema)):
            yield pa.concat_tables(group)
            group, group_bytes = [], 0
        if not group:
            rows.check(table.schema)
        group.append(table if rows.limit is None else table.slice(0, rows.limit - num_rows))
        group_bytes += group[-1].nbytes
        num_rows += group[-1].num_rows
        show(num_rows)
        if num_rows == rows.limit:
            break
    if group:
        yield pa.concat_tables(group)


def _tables(dataset: Any, rows: DatasetRows) -> Iterator[Any]:
    """Yield the rows of a dataset as Arrow tables of the columns that are needed."""
    if isinstance(dataset, HeldRows) and dataset.features is not None:
        yield from dataset.batches(rows.columns(dataset.column_names), BATCH_ROWS)
    elif _is_transformed(dataset) or dataset.features is None:
        first = 0
        for batch in _python_batches(dataset):
            table = _to_table(batch, rows, first)
            yield table
            first += table.num_rows
    else:
        chosen = dataset.select_columns(rows.columns(dataset.column_names)).with_format("arrow")
        yield from (table.replace_schema_metadata(None) for table in chosen.iter(BATCH_ROWS))


def _python_batches(dataset: Any) -> Iterator[Any]:
    """Yield rows as columns of Python values."""
    if isinstance(dataset, HeldRows):
        return dataset.records(BATCH_ROWS)
    # The columns that a function returns are known only after it was called.
    source = dataset if _is_transformed(dataset) else dataset.with_format(None)
    found: Iterator[Any] = source.iter(BATCH_ROWS)
    return found


def _to_table(batch: Any, rows: DatasetRows, first: int) -> Any:
    """Convert columns of Python values; `first` is the number of their first row."""
    import pyarrow as pa

    columns = {}
    for name in rows.columns(list(batch)):
        values = list(batch[name])
        try:
            columns[name] = pa.array(values)
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            row = first + 1 + next((number for number, value in enumerate(values) if not _is_unicode(value)), 0)
            raise UsageError(
                f"column {name!r} of the dataset has the lone surrogate \\u{code:04x} in row {row}, which UTF-8 cannot "
                "hold; replace it"
            ) from None
        except (pa.ArrowException, TypeError) as error:
            said = " ".join(str(error).split())
            raise UsageError(
                f"column {name!r} of the dataset has values in rows {first + 1} to {first + len(values)} that do not "
                f"go together: {said}"
            ) from None
    return pa.table(columns)


def _is_unicode(value: Any) -> bool:
    """Whether all strings of a value can be encoded as UTF-8."""
    if isinstance(value, dict):
        return all(map(_is_unicode, value)) and all(map(_is_unicode, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_unicode, value))
    return not isinstance(value, str) or SURROGATE.search(value) is None


def _make_durable(path: Path) -> None:
    """Make a file durable, and derive its time of modification from its content.

    If a resumed run writes the dataset again, equal files then count as unchanged.
    """
    with path.open("rb", buffering=0) as file:
        _, digest = hash_rest(file)
        os.fsync(file.fileno())
    stamp = digest.intdigest() >> 4
    os.utime(path, ns=(stamp, stamp))
