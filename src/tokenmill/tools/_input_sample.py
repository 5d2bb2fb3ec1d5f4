"""Texts from the user's inputs, up to a number of bytes: `bench` measures on them, `train-tokenizer` trains on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from tokenmill.display import Display
from tokenmill.errors import DataError
from tokenmill.inputs import expand_inputs, text_key_of
from tokenmill.pipeline.input_file import InputFile, Span, read_span
from tokenmill.pipeline.inspection import inspect_inputs
from tokenmill.readers.base import ReadOptions

__all__ = ["InputSample", "open_inputs"]

PLACES, PLACE_BYTES = 32, 4096
"""A spread sample reads plain files in this many places, not just at their beginning."""


def open_inputs(
    inputs: Sequence[str], display: Display, text_key: str | None = None, format: str = "auto"
) -> tuple[list[InputFile], ReadOptions]:
    """Find the files that the user means, and how to read them."""
    found = expand_inputs(inputs, display)
    options = ReadOptions(text_key=text_key_of(found, text_key, display))
    return inspect_inputs(found, format, options, display), options


class InputSample:
    """Texts of all inputs in a fixed order, each file with its share of `max_bytes`.

    A file that holds less than its share is not replaced by another one. A `spread` sample takes the text of a file
    from several places, and cuts the last text at the limit; any other takes whole documents from the start.
    """

    def __init__(self, files: Sequence[InputFile], options: ReadOptions, max_bytes: int, *, spread: bool) -> None:
        self._files, self._options = files, options
        self._max_bytes = max_bytes
        self._spread = spread
        self._total = max(1, sum(file.text_bytes for file in files))
        self.takes_all = self._total <= max_bytes
        """Whether all text fits, judged by the sizes of the files."""
        self.is_whole = True
        """Whether all text that was read was also taken."""
        self.num_documents = self.num_bytes = self.num_rejects = 0
        self.first_reject: DataError | None = None

    def texts(self) -> Iterator[str]:
        """Read the texts."""
        for number, file in enumerate(self._files):
            if self.takes_all:
                yield from self._read(file, Span(number), self._max_bytes - self.num_bytes)
                continue
            share = max(1, file.text_bytes * self._max_bytes // self._total)
            before = self.num_bytes
            spans = _places(number, file, share) if self._spread else [Span(number)]
            for count, span in enumerate(spans, 1):
                # If one place has too little text, the next ones may make up for it.
                yield from self._read(file, span, before + share * count // len(spans) - self.num_bytes)

    def _read(self, file: InputFile, span: Span, quota: int) -> Iterator[str]:
        if quota <= 0:
            self.is_whole = False
            return
        for batch in read_span(file, span, self._options):
            self.num_rejects += sum(reject.num_documents for reject in batch.rejects)
            if batch.rejects and self.first_reject is None:
                self.first_reject = DataError(file.shown, batch.rejects[0].detail)
            for text in batch.texts:
                if quota <= 0:
                    self.is_whole = False
                    return
                size = len(text.encode())
                if self._spread and size > quota:
                    text = text[: max(1, len(text) * quota // size)]
                    size = quota
                self.num_documents += 1
                self.num_bytes += size
                quota -= size
                yield text


def _places(number: int, file: InputFile, share: int) -> list[Span]:
    """Where to read `share` bytes of a file: in many places of a plain one, at the start of any other."""
    if file.compression != "none" or file.format not in {"jsonl", "text"}:
        return [Span(number)]
    edges = np.linspace(0, file.bytes, max(1, min(PLACES, share // PLACE_BYTES)) + 1).astype(np.int64).tolist()
    return [Span(number, start, stop) for start, stop in pairwise(edges) if stop > start]
