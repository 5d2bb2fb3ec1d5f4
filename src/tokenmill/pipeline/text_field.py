"""Stop a run with --on-error skip whose field for the text is wrong, instead of rejecting every record of a file.

A few records without the field are rejects. A whole file without it, or a whole part of one that a task or the parity
gate reads, is a wrong flag. Where each part has few records, the rejects of the finished run show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.errors import DataError
from tokenmill.pipeline.input_file import InputFile, Span
from tokenmill.text_batch import Reject, TextBatch

__all__ = ["TextField", "field_is_missing", "missing_field"]

FILE_RECORDS, PART_RECORDS = 10, 100
"""How many records without the field show that the flag is wrong, if a whole file or a part of it has no others."""
MOST_RECORDS = 10_000
"""So many first records show it before the end of the file or the part is reached."""
LACKING = {"missing-field", "no-text-column"}
UNREADABLE = {"damaged", "invalid-utf8", "malformed-json", "not-an-object"}
"""Reasons of records that do not show whether they have the field."""


def field_is_missing(rejects: Mapping[str, int]) -> str | None:
    """Given why the records of a whole file were rejected, the reason that shows a wrong flag; None without one."""
    reason = max(LACKING & rejects.keys(), key=lambda name: rejects[name], default=None)
    lacking = sum(rejects.get(name, 0) for name in LACKING)
    return reason if rejects.keys() <= LACKING | UNREADABLE and lacking >= FILE_RECORDS else None


def missing_field(file: InputFile, detail: str) -> DataError:
    """The error about a file whose records lack the field."""
    return DataError(file.shown, f"no record that was read has the text: {detail}")


@dataclass
class TextField:
    """Counts the records of a span that lack the field, and raises if all of them do."""

    file: InputFile
    span: Span
    is_found: bool = False
    num_lacking: int = 0
    first: Reject | None = None

    def look(self, batch: TextBatch) -> None:
        """Look at the next batch of the span."""
        if self.is_found:
            return
        self.is_found = bool(batch.texts) or any(r.reason not in LACKING | UNREADABLE for r in batch.rejects)
        lacking = [reject for reject in batch.rejects if reject.reason in LACKING]
        self.num_lacking += sum(reject.num_documents for reject in lacking)
        if lacking and self.first is None:
            self.first = min(lacking, key=lambda reject: reject.position)
        self._check(MOST_RECORDS)

    def end(self) -> None:
        """Note that the span has no more batches."""
        is_whole = self.span.start == 0 and self.span.stop is None
        self._check(FILE_RECORDS if is_whole else PART_RECORDS)

    def _check(self, least: int) -> None:
        if self.first is not None and not self.is_found and self.num_lacking >= least:
            raise missing_field(self.file, self.first.detail)
