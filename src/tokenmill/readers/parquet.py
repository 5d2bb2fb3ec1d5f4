"""Parquet: a text column, read row group by row group in small batches.

Spans count rows and are made of whole row groups, the only places where reading can start
without decoding what comes before. pyarrow is imported when a file is opened, since it takes
longer to load than the rest of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenmill.batch import PackedTexts, Reject, TextBatch
from tokenmill.errors import DataError
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.fields import as_kept, split_key
from tokenmill.readers.packing import is_utf8
from tokenmill.remote.paths import InputPath, RemotePath
from tokenmill.schemas import find_type

__all__ = ["ParquetReader"]

BATCH_BYTES = 1 << 20
"""Text per batch, as far as the average row foretells it."""
MOST_BATCH_ROWS = 8192
RESCUE_BATCH_ROWS = 16
"""Rows per batch next to a damaged page: at most this many sound rows are lost with it."""


class ParquetReader:
    """Reads rows of Parquet files; the text is a string column, or a string field of a struct column."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        for key in (options.text_key, *options.record_keys, *options.keep_keys):
            split_key(key)

    def num_rows(self, path: InputPath) -> int:
        """How many rows a file has."""
        with _open(path) as file:
            return int(file.metadata.num_rows)

    def count_documents(self, path: InputPath) -> int:
        """One for each row, whatever it holds; one for a file without a footer, which is a reject."""
        try:
            return self.num_rows(path)
        except DataError:
            return 1

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Spans of rows: consecutive row groups until their text takes `task_bytes` uncompressed."""
        with _open(path) as file:
            self._check_columns(path, file.schema_arrow)
            spans: list[tuple[int, int]] = []
            start = stop = num_bytes = 0
            for group in range(file.metadata.num_row_groups):
                group_bytes = self._text_bytes(file.metadata.row_group(group))
                if stop > start and num_bytes + group_bytes > task_bytes:
                    spans.append((start, stop))
                    start, num_bytes = stop, 0
                stop += file.metadata.row_group(group).num_rows
                num_bytes += group_bytes
            return [*spans, (start, stop)] if stop > start else spans

    def read_range(self, path: InputPath, start: int, stop: int) -> Iterator[TextBatch]:
        """The documents of rows `start` to `stop`; a damaged page ends them with one reject for all rows left.

        How far rows next to the damage are rescued follows from their row group alone, so that whoever reads the
        group again, from wherever, finds the same rows.
        """
        row = start
        damage = ""
        with _open(path) as file:
            self._check_columns(path, file.schema_arrow)
            stop = min(stop, file.metadata.num_rows)
            for most_rows in (MOST_BATCH_ROWS, RESCUE_BATCH_ROWS):
                try:
                    for rows in self._iter_rows(file, row, stop, most_rows):
                        yield self._to_texts(path, rows, row, row - start)
                        row += len(rows)
                    if row >= stop:
                        return
                    damage = "there are fewer rows than the footer says"
                except _arrow_errors() as error:
                    damage = _first_sentence(error)
        detail = f"damaged Parquet data after row {row}: {damage}"
        reject = Reject(row, row - start, "damaged", detail, stop - row)
        yield TextBatch([], np.zeros(0, np.int64), [] if self._options.keep_keys else None, [reject], stop - row)

    def _check_columns(self, path: InputPath, schema: Any) -> None:
        """Refuse a file whose columns cannot give the text or the kept fields."""
        import pyarrow.types as types

        if self._options.record_keys:
            if not self._record_columns(schema):
                names = ", ".join(map(repr, schema.names))
                raise DataError(str(path), f"no column {self._options.record_keys[0]!r}; the columns are {names}")
            self._check_kept(path, schema)
            return
        wanted = self._options.text_key
        kind = _find_type(schema, wanted)
        if kind is None:
            raise DataError(str(path), f"no column {wanted!r}; {_advise(schema)}")
        value_kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (_is_string(value_kind) or types.is_null(value_kind)):
            raise DataError(str(path), f"column {wanted!r} has type {kind}, not string; {_advise(schema)}")
        self._check_kept(path, schema)

    def _check_kept(self, path: InputPath, schema: Any) -> None:
        for key in self._options.keep_keys:
            if _find_type(schema, key) is None:
                names = ", ".join(map(repr, schema.names))
                raise DataError(str(path), f"no column {key!r} to keep; the columns are {names}")

    def _record_columns(self, schema: Any) -> list[str]:
        """Those fields of a record that the file has."""
        return [key for key in self._options.record_keys if _find_type(schema, key) is not None]

    def _text_bytes(self, group: Any) -> int:
        columns = (group.column(index) for index in range(group.num_columns))
        keys = self._options.record_keys or (self._options.text_key,)
        inside = tuple(f"{key}." for key in keys)
        wanted = (c for c in columns if c.path_in_schema in keys or c.path_in_schema.startswith(inside))
        return sum(int(c.total_uncompressed_size) for c in wanted)

    def _batch_rows(self, group: Any) -> int:
        """How many rows of a group hold about `BATCH_BYTES` of text."""
        return max(1, BATCH_BYTES * int(group.num_rows) // max(1, self._text_bytes(group)))

    def _iter_rows(self, file: Any, start: int, stop: int, most_rows: int) -> Iterator[Any]:
        """Record batches of exactly the rows in `[start, stop)`."""
        documents = self._record_columns(file.schema_arrow) if self._options.record_keys else [self._options.text_key]
        columns = [*documents, *self._options.keep_keys]
        for group, first in _groups_between(file.metadata, start, stop):
            row = first
            batch_rows = min(most_rows, self._batch_rows(file.metadata.row_group(group)))
            for batch in file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False):
                from_row, to_row = max(row, start), min(row + len(batch), stop)
                if from_row < to_row:
                    yield batch.slice(from_row - row, to_row - from_row)
                row += len(batch)

    def _to_records(self, path: InputPath, rows: Any, position: int, line: int) -> TextBatch:
        nothing = [None] * len(rows)
        columns = [
            _plain(_column(rows, key)).to_pylist() if _find_type(rows.schema, key) is not None else nothing
            for key in self._options.record_keys
        ]
        everything = list(range(len(rows)))
        return TextBatch(
            [],
            np.arange(position, position + len(rows)),
            self._kept(path, rows, everything),
            num_lines=len(rows),
            num_bytes=rows.nbytes,
            records=list(zip(*columns, strict=True)),
            lines=np.arange(line, line + len(rows)),
        )

    def _to_texts(self, path: InputPath, rows: Any, position: int, line: int) -> TextBatch:
        if self._options.record_keys:
            return self._to_records(path, rows, position, line)
        column = _column(rows, self._options.text_key)
        packed = _pack(column, self._options.max_document_bytes) if self._options.packed else None
        if packed is not None:
            return TextBatch(
                packed,
                np.arange(position, position + len(rows)),
                self._kept(path, rows, list(range(len(rows)))),
                num_lines=len(rows),
                num_bytes=column.nbytes,
                lines=np.arange(line, line + len(rows)),
            )
        rejects: list[Reject] = []
        try:
            values = column.to_pylist()
        except UnicodeDecodeError:
            values = [_text_or_bytes(value) for value in column]
        longest = self._options.max_document_bytes
        good: list[int] = []
        for index, value in enumerate(values):
            refusal = _refuse(value, self._options.text_key, longest)
            if refusal is None:
                good.append(index)
            else:
                rejects.append(Reject(position + index, line + index, *refusal))
        texts = values if len(good) == len(values) else [values[index] for index in good]
        indexes = np.array(good, np.int64)
        return TextBatch(
            texts,
            indexes + position,
            self._kept(path, rows, good),
            rejects,
            num_lines=len(values),
            num_bytes=column.nbytes,
            lines=indexes + line,
        )

    def _kept(self, path: InputPath, rows: Any, good: list[int]) -> list[tuple[str | None, ...]] | None:
        if not self._options.keep_keys:
            return None
        columns = []
        for key in self._options.keep_keys:
            column = _column(rows, key)
            try:
                columns.append([as_kept(value) for value in _plain(column).to_pylist()])
            except UnicodeDecodeError:
                raise DataError(str(path), f"column {key!r} to keep holds text that is not UTF-8") from None
        return [tuple(column[index] for column in columns) for index in good]


def _open(path: InputPath) -> Any:
    import pyarrow.parquet as pq

    try:
        # A buffered column chunk is read in pieces, so memory does not follow the row group's size.
        source = path.open() if isinstance(path, RemotePath) else path
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=BATCH_BYTES, page_checksum_verification=True)
    except FileNotFoundError:
        raise DataError(str(path), "cannot be opened: no such file") from None
    except _arrow_errors() as error:
        raise DataError(str(path), f"damaged, or not a Parquet file: {_first_sentence(error)}") from None


def _arrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError)


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0][:120]


def _is_string(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view")


def _path(schema: Any, key: str) -> tuple[str, ...]:
    """The names that a key leads through; a column whose own name has dots comes first."""
    return (key,) if schema.get_field_index(key) >= 0 else split_key(key)


def _find_type(schema: Any, key: str) -> Any:
    return find_type(schema, _path(schema, key))


def _string_columns(schema: Any, prefix: str = "") -> list[str]:
    import pyarrow.types as types

    found = []
    for field in schema:
        if types.is_struct(field.type):
            found += _string_columns(field.type, f"{prefix}{field.name}.")
        elif _is_string(field.type.value_type if types.is_dictionary(field.type) else field.type):
            found.append(prefix + field.name)
    return found


def _advise(schema: Any) -> str:
    import pyarrow.types as types

    strings = _string_columns(schema)
    lists = [field.name for field in schema if types.is_list(field.type) and types.is_struct(field.type.value_type)]
    messages = f"--messages-key {lists[0]} for conversations" if lists else ""
    if not strings:
        return "the file has no column of strings" + (f". Pass {messages}" if messages else "")
    shown = ", ".join(map(repr, strings[:8]))
    advice = f"--text-key {strings[0] if len(strings) == 1 else 'NAME'}"
    return f"columns of strings: {shown}. Pass {advice}{f' or {messages}' if messages else ''}"


def _groups_between(metadata: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Row groups that hold rows of `[start, stop)`: number and first row."""
    first = 0
    for group in range(metadata.num_row_groups):
        last = first + metadata.row_group(group).num_rows
        if first < stop and start < last:
            yield group, first
        first = last


def _column(rows: Any, key: str) -> Any:
    import pyarrow.compute as pc

    parts = _path(rows.schema, key)
    column = rows.column(parts[0])
    for name in parts[1:]:
        column = pc.struct_field(column, name)
    return column


def _pack(column: Any, longest: int) -> PackedTexts | None:
    """A column of texts in one buffer, None if one of them is missing, too long or not UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    if column.null_count or not len(column) or not (types.is_string(column.type) or types.is_large_string(column.type)):
        return None
    most = pc.max(pc.binary_length(column)).as_py()
    if most > longest or not is_utf8(column):
        return None
    kind = pa.large_binary()
    edges = pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(np.array([0, len(column)]))])
    together = pa.LargeListArray.from_arrays(edges, column.cast(kind))
    return PackedTexts(pc.binary_join(together, pa.scalar(PackedTexts.SEPARATOR, kind))[0].as_py(), len(column), most)


def _plain(column: Any) -> Any:
    """Times as text, since a nanosecond has no Python value."""
    import pyarrow as pa
    import pyarrow.types as types

    return column.cast(pa.string()) if types.is_temporal(column.type) else column


def _text_or_bytes(value: Any) -> str | bytes | None:
    try:
        return value.as_py()  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        return bytes(error.object)


def _refuse(value: str | bytes | None, key: str, longest: int) -> tuple[str, str] | None:
    """Why a value of the text column is not a document: reason and detail."""
    if value is None:
        return "null-text", f"column {key!r} is null"
    if isinstance(value, bytes):
        return "invalid-utf8", f"column {key!r} holds bytes that are not UTF-8"
    if len(value) * 4 > longest and len(value.encode()) > longest:
        return "too-long", f"the text has {len(value.encode()):,} bytes; --max-document-bytes is {longest:,}"
    return None
