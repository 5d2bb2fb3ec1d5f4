"""Rows that a Python program holds: a DataFrame, an Arrow table or a list of records, read like a `Dataset`.

A list of strings is a list of paths. Texts are passed with the name of their field, so there is nothing to guess.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from tokenmill.arguments import name_kind, show
from tokenmill.errors import UsageError

__all__ = ["HeldRows", "hold_rows", "name_items"]

ROWS = "a Dataset, a DataFrame, an Arrow table or a list of dicts"
PASS_RECORDS = 'to tokenize texts of this program, pass records: [{"text": "..."}, ...], a DataFrame or a Dataset'
PASS_LIST = 'pass records as a list: [{"text": "..."}, ...], and columns as a DataFrame or an Arrow table'
LONGEST_NAME = 255
"""Characters in the name of a file, on all file systems in use."""


def hold_rows(value: Any) -> HeldRows | None:
    """The rows of a table or of a list of dicts; None for anything else."""
    if isinstance(value, (list, tuple)):
        return HeldRows(value) if value and all(isinstance(record, dict) for record in value) else None
    is_table = hasattr(value, "column_names") or hasattr(value, "columns") or hasattr(value, "schema")
    return HeldRows(value) if is_table and hasattr(value, "__arrow_c_stream__") else None


def name_items(inputs: Any, refusal: str = "") -> list[str]:
    """The paths, globs and names that a program passes as inputs; `refusal` says why rows are none, if they never are.

    A text in place of a path is an error that says how texts are passed.
    """
    several = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(several, (list, tuple, set, frozenset, Iterator)):
        raise _no_path(inputs, refusal)
    names = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in several]
    for item in names:
        if not isinstance(item, str):
            raise _no_path(item, refusal)
        if not os.path.lexists(item) and _looks_like_text(item):
            raise UsageError(f"input {show(item)} is a text, and inputs are paths; {refusal or PASS_RECORDS}")
    return names


def _no_path(item: Any, refusal: str) -> UsageError:
    if hasattr(item, "__arrow_c_stream__") and not hasattr(item, "columns") and not hasattr(item, "column_names"):
        pass_others = refusal or "pass a DataFrame with a column of texts, or a list of paths"
        return UsageError(f"input {name_kind(item)} may be texts or paths; {pass_others}")
    if isinstance(item, dict):
        return UsageError(f"input {name_kind(item)} is no path; {refusal or PASS_LIST}")
    if hasattr(item, "column_names") or hasattr(item, "__arrow_c_stream__"):
        several = "rows are an input by themselves; join several, for example with datasets.concatenate_datasets"
        return UsageError(f"input {name_kind(item)}: {refusal or several}")
    return UsageError(f"input {name_kind(item)} is no path; expected paths{'' if refusal else ', or ' + ROWS}")


def _looks_like_text(item: str) -> bool:
    """Whether a string has a line end, a part that is too long for a name, or a space and nothing of a path."""
    if "\n" in item or any(len(part) > LONGEST_NAME for part in item.split("/")):
        return True
    return " " in item and not any(character in item for character in "/*?[@")


class HeldRows:
    """Rows in memory, with the attributes of a `Dataset` that writing them needs."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._is_records = isinstance(value, (list, tuple))
        self._library = type(value).__module__.partition(".")[0]

    def __len__(self) -> int:
        return len(self._value) if hasattr(self._value, "__len__") else self._table.num_rows

    @cached_property
    def _table(self) -> Any:
        """Any table but a DataFrame of pandas, whose columns are converted one by one."""
        import pyarrow as pa

        return pa.table(self._value)

    @cached_property
    def column_names(self) -> list[str]:
        """The names of all columns, or of the fields of any record."""
        if self._is_records:
            return [str(name) for name in dict.fromkeys(name for record in self._value for name in record)]
        names = list(self._value.columns) if self._library == "pandas" else self._table.column_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"the table has several columns named {twice!r}; rename them")
        return [name for name in names if isinstance(name, str)]

    @cached_property
    def features(self) -> dict[str, Any] | None:
        """The types of columns; None for records, which have values only."""
        if self._is_records:
            return None
        return {name: SimpleNamespace(dtype=str(self._type_of(name))) for name in self.column_names}

    def _type_of(self, name: str) -> Any:
        """The type of a column; of a column that cannot be converted, nothing is known."""
        try:
            return self._column(name).type
        except UsageError:
            return None

    def _column(self, name: str) -> Any:
        """A column as Arrow's."""
        import pyarrow as pa

        if self._library != "pandas":
            column = self._table.column(name)
            # Parquet files have no views, which polars exports.
            return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column
        try:
            return pa.Array.from_pandas(self._value[name])
        except (pa.ArrowException, TypeError, UnicodeEncodeError) as error:
            said = " ".join(str(error).split())
            raise UsageError(f"column {name!r} of the DataFrame has values that do not go together: {said}") from None

    def batches(self, columns: Sequence[str], num_rows: int) -> Iterator[Any]:
        """Yield some columns as Arrow tables of at most `num_rows`."""
        import pyarrow as pa

        table = pa.table({name: self._column(name) for name in columns})
        for start in range(0, table.num_rows, num_rows):
            yield table.slice(start, num_rows)

    def records(self, num_rows: int) -> Iterator[dict[str, list[Any]]]:
        """Yield at most `num_rows` records at a time, as columns; a field that a record lacks is None."""
        for start in range(0, len(self._value), num_rows):
            some = self._value[start : start + num_rows]
            yield {name: [record.get(name) for record in some] for name in self.column_names}
