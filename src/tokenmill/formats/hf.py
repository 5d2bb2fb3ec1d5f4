"""Folders for `datasets.load_from_disk`: Arrow streams, `dataset_info.json` and `state.json`.

One split is a `Dataset`, several are a `DatasetDict`. The files are those of `save_to_disk`, written without the
datasets package; the feature has the name that all its versions know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.formats._arrow_tables import Limits, Tables, limit_tokens, table_schema
from tokenmill.formats._table_blocks import COLUMNS, IDS
from tokenmill.formats._token_blocks import BLOCK_TOKENS
from tokenmill.formats.base import SplitSource

__all__ = ["HfDataset"]

BATCH_ROWS = 1000


class HfDataset(Tables):
    """Files of Arrow record batches of at most 1,000 rows, which datasets maps into memory."""

    is_folder = True
    file_name = "data-{number}-of-{count}.arrow"
    file_bytes = 500_000_000
    """The size that `save_to_disk` aims at."""

    def limits(self, split: SplitSource) -> Limits:
        """Return the limits of a batch, and those of a file."""
        file_tokens = limit_tokens(split, self.file_bytes)
        return Limits(BATCH_ROWS, limit_tokens(split, 4 * BLOCK_TOKENS), file_tokens=file_tokens)

    @contextmanager
    def open_file(self, split: SplitSource, path: Path) -> Iterator[Callable[[Any], None]]:
        """Write a stream of record batches."""
        import pyarrow as pa

        schema = table_schema(split, {"huggingface": json.dumps({"info": {"features": _features(split)}})})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            yield lambda batch: stream.write_batch(batch.replace_schema_metadata(schema.metadata))

    def read_file(self, path: Path) -> Iterator[Any]:
        """Read the record batches."""
        import pyarrow as pa

        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
            yield from stream

    def write_index(self, split: SplitSource, folder: Path, files: list[Path]) -> None:
        """Write the JSON files."""
        info = {"citation": "", "description": "", "features": _features(split), "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": path.name} for path in files],
            "_fingerprint": split.documents.fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split.name,
        }
        (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
        (folder / "state.json").write_text(json.dumps(state, indent=2))
        if len(split.names) > 1:
            (folder.parent / "dataset_dict.json").write_text(json.dumps({"splits": list(split.names)}))


def _features(split: SplitSource) -> dict[str, Any]:
    """Describe the columns as datasets does."""
    kinds = {IDS: "<i4", **{name: COLUMNS[name][0] for name in split.rows.columns}}
    return {
        name: {"feature": {"dtype": np.dtype(kind).name, "_type": "Value"}, "_type": "Sequence"}
        for name, kind in kinds.items()
    }
