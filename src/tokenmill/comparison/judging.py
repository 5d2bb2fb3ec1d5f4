"""What is stored of documents against what the reference makes of them, and what to say of the difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.batch import IntArray
from tokenmill.comparison.finding import Document, Task
from tokenmill.engines import REFERENCES, SpecialTokens, create, open_tokenizer
from tokenmill.engines.alignment import Aligner
from tokenmill.pipeline.settings import TokenPolicy, supervision_of
from tokenmill.pipeline.task import surround
from tokenmill.store.manifest import Manifest, ShardInfo
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES, index_lengths
from tokenmill.supervision.masking import Weights, assemble, weigh_tokens

__all__ = ["Comparison", "Judge"]

BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 4 << 20
MOST_NAMED = 20
MOST_MAPPED = 8


@dataclass
class Comparison:
    """How many documents were compared with which reference, and what differs."""

    reference: str
    num_compared: int = 0
    problems: list[str] = field(default_factory=list)
    _num_unnamed: int = 0

    def note(self, problem: str) -> None:
        """Take down a difference; after twenty, the rest are only counted."""
        if len(self.problems) < MOST_NAMED:
            self.problems.append(problem)
        else:
            self._num_unnamed += 1

    def close(self) -> None:
        """Say how many differences were only counted."""
        if self._num_unnamed:
            self.problems.append(f"{self._num_unnamed:,} more documents differ")


class Judge:
    """Encodes texts with the reference, in batches, and compares with what is stored."""

    def __init__(self, store: Path, manifest: Manifest, report: Comparison, advance: Callable[[int], None]) -> None:
        self._store = store
        self._manifest = manifest
        self._report = report
        self._advance = advance
        kind, policy = manifest.tokenizer.kind, manifest.special_tokens
        tokenizer = open_tokenizer(store / "tokenizer", "tokenizer")
        in_text: SpecialTokens = policy.in_text  # type: ignore[assignment]
        self._reference = create(REFERENCES[kind], tokenizer, in_text, threads=True)
        self._policy = TokenPolicy(bos_id=policy.bos_id, eos_id=policy.eos_id, special_tokens=in_text)
        self._aligner = Aligner(tokenizer, in_text) if supervision_of(manifest.settings) is not None else None
        self._waiting: list[tuple[Task, int, Document]] = []
        self._num_characters = 0
        self._indexes: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = {}

    def add(self, task: Task, row: int, document: Document) -> None:
        """Compare a document, now or with the next ones."""
        self._waiting.append((task, row, document))
        self._num_characters += len(document[0])
        if len(self._waiting) >= BATCH_DOCUMENTS or self._num_characters >= BATCH_CHARACTERS:
            self.close()

    def close(self) -> None:
        """Compare what is waiting."""
        if not self._waiting:
            return
        expected, lengths, weights = self._encode([document for _, _, document in self._waiting])
        start = 0
        for (task, row, _), length in zip(self._waiting, lengths.tolist(), strict=True):
            some = slice(start, start + length)
            self._compare(task, row, expected[some], weights[some] if weights is not None else None)
            start += length
        self._report.num_compared += len(self._waiting)
        self._advance(self._report.num_compared)
        self._waiting, self._num_characters = [], 0

    def _encode(self, documents: list[Document]) -> tuple[IntArray, npt.NDArray[np.int32], Weights | None]:
        texts = [text for text, _ in documents]
        encoded = self._reference.encode(texts)
        if self._aligner is None:
            vocab_size = self._manifest.tokenizer.vocab_size
            return *surround(encoded, self._policy, dtype=np.int64, vocab_size=vocab_size), None
        trained = [some for _, some in documents if some is not None]
        weights = weigh_tokens(texts, trained, encoded, self._aligner)
        policy = self._policy
        return assemble(encoded, weights, trained, bos_id=policy.bos_id, eos_id=policy.eos_id, dtype=np.int64)

    def _compare(self, task: Task, row: int, expected: IntArray, weights: Weights | None) -> None:
        shard, inner = task.parts[task.part[row]].shard, int(task.inner[row])
        stored = self._stored(shard, inner)
        if np.array_equal(stored, expected):
            if weights is not None and not np.array_equal(self._stored(shard, inner, ".mask"), weights > 0):
                self._report.note(
                    f"{task.name(row)} has another loss mask than its record; tokenize again with --overwrite"
                )
            return
        shorter = min(len(stored), len(expected))
        differing = np.flatnonzero(stored[:shorter] != expected[:shorter])
        at = int(differing[0]) if len(differing) else shorter
        ours, theirs = (str(ids[at]) if at < len(ids) else "nothing" for ids in (stored, expected))
        self._report.note(
            f"{self._manifest.inputs[task.input[row]].path} position {task.position[row]} ({task.name(row)}): "
            f"token {at} is {ours}, and {self._reference.name} gives {theirs}; tokenize again with --overwrite"
        )

    def _stored(self, shard: ShardInfo, inner: int, suffix: str = ".bin") -> IntArray:
        """The ids of a document. The index of a few shards stays mapped, since splits alternate."""
        if shard.name not in self._indexes:
            if len(self._indexes) >= MOST_MAPPED:
                self._indexes.clear()
            path = self._store / f"{shard.name}.idx"
            offset = INDEX_HEADER_BYTES + 4 * shard.num_documents
            mapped = np.memmap(path, "<i8", mode="r", offset=offset, shape=(shard.num_documents,))
            self._indexes[shard.name] = (index_lengths(path, shard, self._manifest.dtype), mapped)
        lengths, pointers = self._indexes[shard.name]
        dtype = DTYPES[self._manifest.dtype][1]
        first = int(pointers[inner]) // dtype.itemsize
        if suffix in BESIDE:
            dtype = BESIDE[suffix]
        path = self._store / f"{shard.name}{suffix}"
        return np.fromfile(path, dtype, int(lengths[inner]), offset=first * dtype.itemsize)
