"""TRL's `DPOTrainer` on pairs that are tokenized already.

TRL has no switch for this: its trainer renders and tokenizes every data set. `PairTrainer` leaves that out and nothing
else, so collator, losses, reference model and sampler are TRL's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.dataset.rows import Rows, as_rows
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.filling.row_layouts import arrange

try:
    from datasets import Dataset
    from trl import DPOTrainer  # type: ignore[import-not-found]
except ImportError:
    raise MissingDependencyError("tokenmill.loaders.trl", "trl") from None

__all__ = ["PairTrainer", "as_dataset"]

COLUMNS = ("prompt_ids", "chosen_ids", "rejected_ids")


class PairTrainer(DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` for data sets with the columns `prompt_ids`, `chosen_ids` and `rejected_ids`; see `as_dataset`."""

    def _prepare_dataset(self, dataset: Any, *settings: Any, **others: Any) -> Any:
        found = next(iter(dataset))
        if not set(COLUMNS) <= set(found):
            raise UsageError(
                f"the data set has {', '.join(found)}; expected {', '.join(COLUMNS)}, as "
                "tokenmill.loaders.trl.as_dataset makes them"
            )
        return dataset


def as_dataset(rows: Rows) -> Any:
    """Return rows of pairs as a `datasets.Dataset`, which reads them when they are asked for and copies nothing.

    The trainer's sampler decides order, ranks and resuming, so pass `tm.pairs(...)` without a shuffle. With
    `long_documents="keep_end"`, pass the same `max_length` and `truncation_mode` to `DPOConfig` too: one prompt column
    cannot be cut for two answers of different lengths.
    """
    rows = as_rows(rows, "as_dataset")
    if rows.layout != "pairs":
        raise UsageError("as_dataset needs rows of preference pairs; make them with tm.pairs(store, max_length=...)")

    def fetch(batch: dict[str, list[int]]) -> dict[str, Any]:
        found = arrange(rows, np.array(batch["prompt_ids"], np.int64))
        return {name: found[name] for name in COLUMNS}

    # The trainer drops columns that it does not know, so the row numbers have the name of one that it does.
    return Dataset.from_dict({"prompt_ids": range(len(rows))}).with_transform(fetch)
