"""Compare the ids of an engine with those of the reference, in threads of the run's own process.

An engine is compared twice. The parity gate compares a sample of all inputs, and a set of awkward strings, before
anything is published. Then every task sends a few of its own documents, so that the proof grows with the corpus.
Workers send each text with the ids that they gave it. So the reference is loaded once, and workers never wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tokenmill.engines.base import Engine
from tokenmill.text_batch import IntArray, PackedTexts, TokenBatch

__all__ = ["Compared", "ParityCheck", "SampledText", "encode_packed", "mismatches", "pair_up"]

BATCH, BATCH_CHARACTERS = 256, 250_000
"""Limits of one batch for the reference, which takes up to 300 bytes of memory per byte of text."""
MOST_THREADS = 8


class SampledText(msgspec.Struct, frozen=True):
    """A text, and the ids that an engine gave it."""

    text: str
    ids: bytes
    """32-bit numbers in the byte order of the machine."""
    input: int = -1
    position: int = -1
    """Its place, as in a `TextBatch`; -1 for a text that is no document."""

    @classmethod
    def of(cls, text: str, ids: IntArray, input: int = -1, position: int = -1) -> SampledText:
        """Keep the ids of a text as bytes."""
        return cls(text, ids.astype(np.uint32).tobytes(), input, position)


def pair_up(texts: Sequence[str], encoded: TokenBatch) -> list[SampledText]:
    """Pair texts with their ids."""
    edges = encoded.offsets.tolist()
    return [SampledText.of(text, encoded.ids[edges[i] : edges[i + 1]]) for i, text in enumerate(texts)]


@dataclass(eq=False)
class Compared:
    """The texts that were submitted under one name, and those of them that differ."""

    name: str
    differing: list[SampledText] = field(default_factory=list)
    num_open: int = 0
    """How many batches of them are left to compare."""


class ParityCheck:
    """Compares texts with the reference, which `load` loads at once, in daemon threads.

    The threads are our own: a library's pool would not survive a fork of this process, which may be a training.
    """

    def __init__(self, load: Callable[[], Engine], num_threads: int) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._reference: Engine | None = None
        self._batches: queue.SimpleQueue[tuple[Compared, list[SampledText]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Compared, list[SampledText]] | BaseException] = queue.SimpleQueue()
        self.num_open = 0
        """How many names are not compared yet."""
        self.names: set[str] = set()
        """The names whose texts were compared."""
        self._num_threads = max(1, min(num_threads, MOST_THREADS))
        for _ in range(self._num_threads):
            threading.Thread(target=self._work, name="tokenmill-reference", daemon=True).start()

    def submit(self, name: str, texts: Sequence[SampledText]) -> None:
        """Compare texts; `take` returns the result."""
        compared = Compared(name)
        self.num_open += 1
        batches = list(_batches(texts)) or [[]]
        compared.num_open = len(batches)
        for batch in batches:
            self._batches.put((compared, batch))

    def take(self) -> list[Compared]:
        """Return what has been compared since the last call, or raise the error of the reference."""
        ready = []
        while not self._answers.empty():
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            compared, differing = answer
            compared.differing += differing
            compared.num_open -= 1
            if not compared.num_open:
                self.num_open -= 1
                self.names.add(compared.name)
                ready.append(compared)
        return ready

    def close(self) -> None:
        """End the threads when they have finished their batches, and free the reference."""
        for _ in range(self._num_threads):
            self._batches.put(None)

    def _work(self) -> None:
        try:
            with self._loading:
                reference = self._reference = self._reference or self._load()
            while (work := self._batches.get()) is not None:
                compared, texts = work
                self._answers.put((compared, _find_differing(texts, reference)))
        except BaseException as error:
            self._answers.put(error)


def mismatches(engine: Engine, reference: Engine, texts: list[str]) -> list[str]:
    """Return the texts whose ids differ between two engines."""
    differing: list[str] = []
    for some in _batches(pair_up(texts, encode_packed(engine, texts))):
        differing += [one.text for one in _find_differing(some, reference)]
    return differing


def encode_packed(engine: Engine, texts: list[str]) -> TokenBatch:
    """Encode texts in the form in which workers give them to the engine, so that the same code is tested."""
    return engine.encode(PackedTexts.of(texts) if engine.takes_packed else texts)


def _find_differing(texts: list[SampledText], reference: Engine) -> list[SampledText]:
    if not texts:
        return []
    theirs = reference.encode([one.text for one in texts])
    edges, ids = theirs.offsets.tolist(), theirs.ids.astype(np.uint32, copy=False)
    return [one for i, one in enumerate(texts) if ids[edges[i] : edges[i + 1]].tobytes() != one.ids]


def _batches(texts: Sequence[Any]) -> Iterator[list[Any]]:
    some: list[Any] = []
    size = 0
    for one in texts:
        some.append(one)
        size += len(one.text)
        if len(some) == BATCH or size > BATCH_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some
