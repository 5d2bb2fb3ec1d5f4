"""Stop a run with --on-error skip if its text field is wrong, instead of rejecting every record of a file.

A few records without the field are rejects. If no record of a file has it, or of the part that a task or the parity
gate reads, the flag is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import DataError
from tokenmill.pipeline.input_file import InputFile, Span
from tokenmill.text_batch import Reject, TextBatch

__all__ = ["TextField"]

FILE_RECORDS, PART_RECORDS = 10, 100
"""The flag is wrong if a file, or a part of it, has at least this many records and none has the field."""
MOST_RECORDS = 10_000
"""With this many records at the start, the flag is wrong before the end of the file or the part is reached."""
LACKING = {"missing-field", "no-text-column"}
UNREADABLE = {"damaged", "invalid-utf8", "malformed-json", "not-an-object"}
"""Reasons of rejects that do not show whether the record has the field."""


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
            raise DataError(self.file.shown, f"no record that was read has the text: {self.first.detail}")
