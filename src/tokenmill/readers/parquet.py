"""Parquet: a text column, read row group by row group in small batches.

Spans count rows. A plan cuts a file between row groups, because only there can reading start without decoding what
comes before. pyarrow is imported when a file is opened: it takes longer to import than the rest of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from tokenmill.arguments import show
from tokenmill.arrow_types import as_text, column_path, find_type, holds_bytes, holds_strings, holds_text, is_utf8
from tokenmill.errors import DataError
from tokenmill.readers import _arrow_memory as memory
from tokenmill.readers._blocks import exceeds_memory
from tokenmill.readers.base import NO_LIMIT, ExceedsMemory, Reader, ReadOptions, as_kept, split_key
from tokenmill.remote.paths import InputPath, RemotePath
from tokenmill.text_batch import PackedTexts, Refusal, Reject, TextBatch, too_long

__all__ = ["ParquetReader"]

BATCH_BYTES = 1 << 20
"""Text per batch, estimated from the average row."""
MOST_BATCH_ROWS = 8192
MOST_EXPANDED_BYTES = 32 << 20
"""If all rows of a batch were the longest text of the dictionary."""
FEW_BATCH_ROWS = 64
"""Rows per batch after one that did not fit the memory."""
RESCUE_BATCH_ROWS = 1
"""Rows per batch in front of a damaged page: one by one, so that none is lost. It takes 4 microseconds per row."""
NOT_UTF8 = object()
"""Stands for a value that is not UTF-8."""


class ParquetReader(Reader):
    """Reads rows of Parquet files; the text is a column of strings or bytes, or such a field of a struct column."""

    counts_rows = True
    unit = "row"
    splittable = True

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._keys = options.record_keys or (options.text_key,)
        for key in (options.text_key, *options.record_keys, *options.keep_keys):
            split_key(key)

    def count_documents(self, path: InputPath) -> int:
        """Count the rows, each of which is a document or a reject; 1 for a file without a footer, which is a reject."""
        try:
            with _open(path) as file:
                return int(file.metadata.num_rows)
        except DataError:
            return 1

    def plan(self, path: InputPath, task_bytes: int) -> list[tuple[int, int]]:
        """Divide a file into spans of consecutive row groups with `task_bytes` of uncompressed text each."""
        with _open(path) as file:
            self._check_documents(path, file.schema_arrow)
            self._check_kept(path, file.schema_arrow)
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

    def read_range(self, path: InputPath, start: int, stop: int | None) -> Iterator[TextBatch]:
        """Read the rows `start` to `stop`.

        A damaged page is one reject for its row and the rest of its row group; pyarrow cannot skip a page. The other
        row groups are read. If there is no footer or no column of texts, one reject stands for all rows.
        """
        if self._options.memory_bytes < NO_LIMIT:
            memory.use_system_allocator()
        try:
            file = _open(path)
        except _NoFooter as error:
            yield self._reject(Reject(start, -1, "damaged", error.reason))
            return
        with file:
            num_rows = file.metadata.num_rows
            stop = num_rows if stop is None else min(stop, num_rows)
            try:
                self._check_documents(path, file.schema_arrow)
            except DataError as error:
                reason = "no-text-column" if num_rows else "damaged"
                yield self._reject(Reject(start, -1, reason, error.reason, max(1, stop - start)))
                return
            self._check_kept(path, file.schema_arrow)
            for group in _row_groups(file.metadata):
                if group.start < stop and start < group.stop:
                    yield from self._read_group(path, file, group, start, stop)

    def _read_group(self, path: InputPath, file: Any, group: _RowGroup, start: int, stop: int) -> Iterator[TextBatch]:
        """Read the rows of a row group that are in `[start, stop)`, or those before its first damaged page.

        The place of the damage does not depend on `start`, so every reader of the group finds the same rows.
        """
        row, stop = max(group.start, start), min(group.stop, stop)
        most_rows, damage = MOST_BATCH_ROWS, ""
        while most_rows:
            try:
                for rows in self._iter_rows(path, file, group, row, stop, most_rows):
                    yield self._to_batch(rows, row, row - start)
                    row += len(rows)
                if row >= stop:
                    return
                damage = "there are fewer rows than the footer says"
            except MemoryError:
                if most_rows == RESCUE_BATCH_ROWS:
                    raise _exceeds_memory(row) from None
                most_rows = FEW_BATCH_ROWS if most_rows > FEW_BATCH_ROWS else RESCUE_BATCH_ROWS
                continue
            except _arrow_errors() as error:
                damage = _first_sentence(error)
            most_rows = RESCUE_BATCH_ROWS if most_rows > RESCUE_BATCH_ROWS else 0
        detail = f"damaged Parquet data after row {row}: {damage}"
        yield self._reject(Reject(row, row - start, "damaged", detail, stop - row), stop - row)

    def _reject(self, reject: Reject, num_lines: int = 0) -> TextBatch:
        return TextBatch([], np.zeros(0, np.int64), [] if self._options.keep_keys else None, [reject], num_lines)

    def _check_documents(self, path: InputPath, schema: Any) -> None:
        """Raise `DataError` if the columns of a file cannot give documents."""
        if self._options.record_keys:
            if all(find_type(schema, key) is None for key in self._keys):
                names = ", ".join(map(repr, schema.names))
                raise DataError(str(path), f"no column {self._keys[0]!r}; the columns are {names}")
            return
        wanted = self._options.text_key
        kind = find_type(schema, wanted)
        if kind is None:
            raise DataError(str(path), f"no column {wanted!r}; {_advise(schema)}")
        if not holds_text(kind):
            raise DataError(str(path), f"column {wanted!r} has type {kind}, not string; {_advise(schema)}")

    def _check_kept(self, path: InputPath, schema: Any) -> None:
        for key in self._options.keep_keys:
            if find_type(schema, key) is None:
                names = ", ".join(map(repr, schema.names))
                raise DataError(str(path), f"no column {key!r} to keep; the columns are {names}")

    def _text_bytes(self, group: Any) -> int:
        columns = (group.column(index) for index in range(group.num_columns))
        inside = tuple(f"{key}." for key in self._keys)
        wanted = (c for c in columns if c.path_in_schema in self._keys or c.path_in_schema.startswith(inside))
        return sum(int(c.total_uncompressed_size) for c in wanted)

    def _iter_rows(
        self, path: InputPath, file: Any, group: _RowGroup, start: int, stop: int, most_rows: int
    ) -> Iterator[Any]:
        """Yield record batches of about `BATCH_BYTES` of text with exactly the rows of a group in `[start, stop)`."""
        keys = (*self._keys, *self._options.keep_keys)
        columns = [key for key in keys if find_type(file.schema_arrow, key) is not None]
        text_bytes = self._text_bytes(file.metadata.row_group(group.number))
        most_rows = min(most_rows, max(1, BATCH_BYTES * (group.stop - group.start) // max(1, text_bytes)))
        row = group.start
        limit = memory.AllocationLimit(self._options.memory_bytes)
        if most_rows * text_bytes > MOST_EXPANDED_BYTES:
            with limit():
                longest = _longest_shared(path, file.metadata, group.number, columns)
            most_rows = min(most_rows, max(1, MOST_EXPANDED_BYTES // max(1, longest)))
        batches = file.iter_batches(most_rows, row_groups=[group.number], columns=columns, use_threads=False)
        while True:
            with limit():
                batch = next(batches, None)
                if batch is None:
                    return
                batch = memory.without_dictionaries(batch)
            from_row, to_row = max(row, start), min(row + len(batch), stop)
            if from_row < to_row:
                yield from memory.halve(batch.slice(from_row - row, to_row - from_row))
            row += len(batch)
            if row >= stop:
                return

    def _to_batch(self, rows: Any, position: int, line: int) -> TextBatch:
        options = self._options
        texts: Sequence[str] = []
        refusals: dict[int, Refusal] = {}
        records = None
        if options.record_keys:
            num_bytes, size = rows.nbytes, sum(map(memory.expanded_bytes, rows.columns))
            if len(rows) == 1 and size > options.max_document_bytes:
                return self._reject(Reject(position, line, *too_long(size, options.max_document_bytes)), 1)
            if size > options.memory_bytes:
                raise exceeds_memory(size, position + 1, "row")
            records = self._columns(rows, options.record_keys, refusals)
        else:
            column = as_text(_column(rows, options.text_key))
            num_bytes = column.nbytes
            packed = _pack(column, options.max_document_bytes) if options.packed else None
            if packed is not None:
                texts = packed
            else:
                texts = values = _to_values(column)
                checked = (_refuse(value, options.text_key, options.max_document_bytes) for value in values)
                refusals = {i: refusal for i, refusal in enumerate(checked) if refusal}
        kept = self._columns(rows, options.keep_keys, refusals) if options.keep_keys else None
        good = np.arange(len(rows))
        if refusals:
            good = np.setdiff1d(good, list(refusals))
            texts = [texts[i] for i in good.tolist()] if records is None else texts
            records = [records[i] for i in good.tolist()] if records is not None else None
            kept = [kept[i] for i in good.tolist()] if kept is not None else None
        return TextBatch(
            texts,
            good + position,
            [tuple(map(as_kept, row)) for row in kept] if kept is not None else None,
            [Reject(position + i, line + i, *refusals[i]) for i in sorted(refusals)],
            num_lines=len(rows),
            num_bytes=num_bytes,
            records=records,
            lines=good + line,
        )

    def _columns(self, rows: Any, keys: tuple[str, ...], refusals: dict[int, Refusal]) -> list[tuple[Any, ...]]:
        """Return the values of several fields of each row, None where one is missing; refuse text that is not UTF-8."""
        columns = []
        for key in keys:
            values: list[Any] = [None] * len(rows)
            if find_type(rows.schema, key) is not None:
                values = _to_values(_plain(as_text(_column(rows, key))))
            for i, value in enumerate(values):
                if value is NOT_UTF8:
                    refusals.setdefault(i, _not_utf8(key))
            columns.append(values)
        return list(zip(*columns, strict=True))


def _longest_shared(path: InputPath, metadata: Any, group: int, columns: list[str]) -> int:
    """Return the size of the longest text that the rows of a group refer to in a dictionary; each may be used often."""
    import pyarrow as pa
    import pyarrow.compute as pc

    with _open(path, metadata=metadata, read_dictionary=columns) as file:
        first = next(file.iter_batches(1, row_groups=[group], columns=columns, use_threads=False), None)
    shared = [c.dictionary for c in first.columns if isinstance(c, pa.DictionaryArray)] if first is not None else []
    lengths = [pc.max(pc.binary_length(values)).as_py() for values in shared if holds_text(values.type)]
    return max((length for length in lengths if length), default=0)


def _exceeds_memory(row: int) -> ExceedsMemory:
    return ExceedsMemory(
        f"the pages of row {row + 1:,} do not fit the memory of a worker; raise --memory, lower --workers, or write "
        "the file again with smaller pages"
    )


class _RowGroup(NamedTuple):
    number: int
    start: int
    stop: int
    """The rows `start` to `stop` of the file."""


def _row_groups(metadata: Any) -> Iterator[_RowGroup]:
    stop = 0
    for number in range(metadata.num_row_groups):
        start, stop = stop, stop + metadata.row_group(number).num_rows
        yield _RowGroup(number, start, stop)


class _NoFooter(DataError):
    """A file that pyarrow cannot open as Parquet."""


def _open(path: InputPath, **options: Any) -> Any:
    import pyarrow.parquet as pq

    try:
        # With a buffer, column chunks are read in pieces, and memory does not grow with the size of row groups.
        source = path.open() if isinstance(path, RemotePath) else path
        return pq.ParquetFile(
            source, pre_buffer=False, buffer_size=BATCH_BYTES, page_checksum_verification=True, **options
        )
    except FileNotFoundError:
        raise DataError(str(path), "cannot be opened: no such file") from None
    except UnicodeDecodeError as error:
        name = bytes(error.object)
        raise _NoFooter(str(path), f"a column has a name that is not UTF-8: {show(name)}; rename the column") from None
    except _arrow_errors() as error:
        raise _NoFooter(str(path), f"damaged, or not a Parquet file: {_first_sentence(error)}") from None


def _arrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError)


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0][:120]


def _columns_of(schema: Any, is_wanted: Callable[[Any], bool], prefix: str = "") -> list[str]:
    """Return the columns, and the fields of struct columns, of a wanted type."""
    import pyarrow.types as types

    found = []
    for field in schema:
        if types.is_struct(field.type):
            found += _columns_of(field.type, is_wanted, f"{prefix}{field.name}.")
        elif is_wanted(field.type):
            found.append(prefix + field.name)
    return found


def _advise(schema: Any) -> str:
    import pyarrow.types as types

    kind, names = "strings", _columns_of(schema, holds_strings)
    if not names:
        kind, names = "bytes", _columns_of(schema, holds_bytes)
    lists = [field.name for field in schema if types.is_list(field.type) and types.is_struct(field.type.value_type)]
    lists, only = list(filter(str.isprintable, lists)), len(names) == 1 and names[0].isprintable()
    messages = f"--messages-key {quote(lists[0])} for conversations" if lists else ""
    if not names:
        return "the file has no column of strings" + (f". Pass {messages}" if messages else "")
    shown = ", ".join(map(repr, names[:8]))
    advice = f"--text-key {quote(names[0]) if only else 'NAME'}"
    return f"columns of {kind}: {shown}. Pass {advice}{f' or {messages}' if messages else ''}"


def _column(rows: Any, key: str) -> Any:
    import pyarrow.compute as pc

    parts = column_path(rows.schema, key)
    column = rows.column(parts[0])
    for name in parts[1:]:
        column = pc.struct_field(column, name)
    return column


def _pack(column: Any, longest: int) -> PackedTexts | None:
    """Pack a column of texts; return None if one of them is missing, too long or not UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    if column.null_count or not len(column) or not (types.is_string(column.type) or types.is_large_string(column.type)):
        return None
    most = pc.max(pc.binary_length(column)).as_py()
    if most > longest or not is_utf8(column):
        return None
    kind = pa.large_binary()
    together = pa.LargeListArray.from_arrays([0, len(column)], column.cast(kind))
    return PackedTexts(pc.binary_join(together, pa.scalar(PackedTexts.SEPARATOR, kind))[0].as_py(), len(column), most)


def _plain(column: Any) -> Any:
    """Convert times to text, because Python has no type for nanoseconds."""
    import pyarrow as pa
    import pyarrow.types as types

    return column.cast(pa.string()) if types.is_temporal(column.type) else column


def _to_values(column: Any) -> list[Any]:
    """Convert a column to Python values, with `NOT_UTF8` for one with text that is not UTF-8."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        return [_to_value(value) for value in column]


def _to_value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return NOT_UTF8


def _not_utf8(key: str) -> Refusal:
    return Refusal("invalid-utf8", f"column {key!r} holds bytes that are not UTF-8")


def _refuse(value: Any, key: str, longest: int) -> Refusal | None:
    """Explain why a value of the text column is not a document, or return None."""
    if value is None:
        return Refusal("null-text", f"column {key!r} is null")
    if value is NOT_UTF8:
        return _not_utf8(key)
    if len(value) * 4 > longest and len(value.encode()) > longest:
        return too_long(len(value.encode()), longest)
    return None
