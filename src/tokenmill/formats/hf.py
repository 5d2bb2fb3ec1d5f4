"""Folders for `datasets.load_from_disk`: Arrow streams, `dataset_info.json` and `state.json`.

One split is a `Dataset`, several are a `DatasetDict`. The files are those of `save_to_disk`, written without the
datasets package; the feature has the name that all its versions know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.formats._row_files import COLUMN, RowFile, RowFiles, row_batch, row_blocks, row_schema
from tokenmill.formats.base import Array, SplitSource

__all__ = ["HfDataset"]

BATCH_ROWS = 1000
FEATURES = {COLUMN: {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}}


class HfDataset(RowFiles):
    """Files of Arrow record batches, which datasets maps into memory."""

    is_folder = True
    file_name = "data-{number:05d}-of-{count:05d}.arrow"
    file_bytes = 500_000_000
    """The size that `save_to_disk` aims at."""

    def write_file(self, split: SplitSource, file: RowFile) -> None:
        """Write record batches of at most 1,000 rows."""
        import pyarrow as pa

        schema = row_schema({"huggingface": json.dumps({"info": {"features": FEATURES}})})
        with pa.OSFile(str(file.path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for rows in row_blocks(split, np.int32, file.first, file.last):
                for start in range(0, len(rows), BATCH_ROWS):
                    stream.write_batch(row_batch(rows[start : start + BATCH_ROWS], schema))

    def read_file(self, split: SplitSource, file: RowFile) -> Iterator[Array]:
        """Read the values of the lists."""
        import pyarrow as pa

        with pa.OSFile(str(file.path)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                yield batch.column(0).flatten().to_numpy()

    def write_index(self, split: SplitSource, folder: Path, files: list[RowFile]) -> None:
        """Write the JSON files."""
        info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": file.path.name} for file in files],
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
