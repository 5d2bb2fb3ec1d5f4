"""The documents that a task sends to be compared with the reference, so that the proof grows with the corpus.

The reference is 20 to 90 times slower than the engine, so about one document of 8,000 costs one percent of the time.
The choice depends on the places of documents alone: it is the same for any number of workers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.engines.base import Engine
from tokenmill.pipeline.parity import SampledText, pair_up
from tokenmill.text_batch import TextBatch, TokenBatch

__all__ = ["LONG_DOCUMENT", "WINDOW", "TaskSample", "cut_window"]

ONE_OF = 8192
LONG_DOCUMENT = 1_500
"""Of a document with more characters, windows are encoded and compared: many documents prove more than long ones."""
WINDOW = 1_000
MOST_GAP = 200


class TaskSample:
    """Chooses documents of a task; `texts` has them with their ids."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._has_looked = False
        self.texts: list[SampledText] = []

    def look(self, input: int, batch: TextBatch, encoded: TokenBatch) -> None:
        """Choose from the documents of a batch: one of the first batch, and of all, one of 8,192 on average."""
        if not len(batch.texts):
            return
        keys = _hash(batch.positions, input)
        chosen = np.flatnonzero(keys < 2**64 // ONE_OF).tolist()
        if not self._has_looked:
            self._has_looked = True
            chosen = sorted({*chosen, int(keys.argmin())})
        for i in chosen:
            text, position = batch.texts[i], int(batch.positions[i])
            if len(text) <= LONG_DOCUMENT:
                ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]]
                self.texts.append(SampledText.of(text, ids, input, position))
            else:
                window = cut_window(text, int(keys[i]) % (len(text) - WINDOW), WINDOW)
                (pair,) = pair_up([window], self._engine.encode([window]))
                self.texts.append(SampledText(pair.text, pair.ids, input, position))


def cut_window(text: str, start: int, size: int) -> str:
    """Cut a window that begins before a space, where tokens begin, if there is one near `start`."""
    space = text.find(" ", start, start + MOST_GAP) if start else 0
    start = max(start, space)
    return text[start : start + size]


def _hash(positions: npt.NDArray[np.int64], input: int) -> npt.NDArray[np.uint64]:
    """Mix the bits of places (the finalizer of SplitMix64)."""
    mixed = (positions.astype(np.uint64) + np.uint64(input << 40)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
