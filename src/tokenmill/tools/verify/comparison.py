"""Compare a store with the inputs it was made from: the same documents, encoded by the reference.

The reference is the library that defines the ids, whatever engine made the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.display import choose_display
from tokenmill.engines import REFERENCES, SpecialTokens, Tokenizer, create, open_tokenizer
from tokenmill.engines.alignment import Aligner
from tokenmill.formatting import plural
from tokenmill.inputs import expand_inputs
from tokenmill.pipeline.input_file import InputFile, Span, find_damage, read_span
from tokenmill.pipeline.inspection import inspect_inputs
from tokenmill.pipeline.settings import Settings, TokenPolicy, supervision_of
from tokenmill.pipeline.task.runner import surround
from tokenmill.readers.base import ReadOptions
from tokenmill.store.manifest import Manifest, ShardInfo
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES, index_lengths
from tokenmill.supervision.masks import Weights, assemble, weigh_tokens
from tokenmill.supervision.preferences import LATE_REASONS, assemble_pairs
from tokenmill.text_batch import IntArray
from tokenmill.tools.verify.source_documents import SourceDocument, SourceReader, StoredTask, choose_documents, tasks_of

__all__ = ["Comparison", "compare_with_inputs"]

BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 4 << 20
MOST_NAMED = 20
MOST_MAPPED = 8


@dataclass
class Comparison:
    """How many documents were compared with which reference, and the differences."""

    reference: str
    num_compared: int = 0
    problems: list[str] = field(default_factory=list)
    _num_unnamed: int = 0

    def note(self, problem: str) -> None:
        """Record a difference; after twenty, only count them."""
        if len(self.problems) < MOST_NAMED:
            self.problems.append(problem)
        else:
            self._num_unnamed += 1

    def close(self) -> None:
        """Add how many differences were only counted."""
        if self._num_unnamed:
            self.problems.append(f"{plural(self._num_unnamed, 'more document')} differ")


def compare_with_inputs(
    store: Path, manifest: Manifest, against: Sequence[str], *, every: bool, advance: Callable[[int, int], None]
) -> Comparison:
    """Read documents of a sound store from its inputs again and compare the ids with the reference's."""
    report = Comparison(REFERENCES[manifest.tokenizer.kind])
    settings, tokenizer = _settings_of(manifest), open_tokenizer(store / "tokenizer", "tokenizer")
    renderer = settings.renderer(tokenizer)
    files = _match_inputs(manifest, against, settings.reading, report)
    chosen = choose_documents(manifest, every)
    total = sum(map(len, chosen.values()))
    comparer = _Comparer(store, manifest, settings, tokenizer, report, lambda done: advance(done, total))
    render = renderer.render if renderer is not None else None
    source = SourceReader(files, settings.reading, render, task_bytes=settings.task_bytes, sequential=every)
    for task in tasks_of(store, manifest, chosen) if files else ():
        for row, document in source.find(task):
            if document is None:
                report.note(
                    f"{manifest.inputs[task.input[row]].path} has no document at position {task.position[row]}, from "
                    f"where {task.name(row)} came; tokenize again with --overwrite"
                )
            else:
                comparer.add(task, row, document)
        comparer.flush()
    if every and manifest.settings["limit"] is None and len(files) == len(manifest.inputs):
        # Plain texts with special tokens are rejected after reading, records before.
        rejected_later = manifest.rejects.get("special-token", 0) if renderer is None else 0
        rejected_later += 2 * sum(manifest.rejects.get(reason, 0) for reason in LATE_REASONS)
        missing = source.count_unclaimed() - rejected_later
        if missing and "damaged" in manifest.rejects:
            missing -= _count_unconfirmed(files.values(), settings.reading)
        if missing:
            verb = "is" if missing == 1 else "are"
            documents = f"{plural(missing, 'document')} that {verb} neither in the store nor among its rejects"
            report.note(f"the inputs have {documents}")
    report.close()
    return report


def _count_unconfirmed(files: Iterable[InputFile], reading: ReadOptions) -> int:
    """Count the documents in damaged frames, which a run leaves out without --on-error keep-damaged."""
    count = 0
    for file in files:
        damage = find_damage(file, reading) if file.compression != "none" else None
        if damage is not None:
            everything, confirmed = (read_span(file, span, reading) for span in (Span(0), Span(0, damage=damage)))
            count += sum(len(batch.texts) for batch in everything) - sum(len(batch.texts) for batch in confirmed)
    return count


def _settings_of(manifest: Manifest) -> Settings:
    """The settings of the run that made the store, as far as they decide how its inputs are read and encoded."""
    flags, specials, supervision = manifest.settings, manifest.special_tokens, supervision_of(manifest.settings)
    in_text: SpecialTokens = specials.in_text  # type: ignore[assignment]
    return Settings(
        tokenizer_sha256=manifest.tokenizer.sha256,
        policy=TokenPolicy(bos_id=specials.bos_id, eos_id=specials.eos_id, special_tokens=in_text),
        reading=ReadOptions(
            record_keys=supervision.keys if supervision is not None else (),
            text_key=flags["text-key"],
            keep_keys=tuple(flags["keep-keys"]),
            separator=flags["separator"],
            whole_files=flags["whole-files"],
            max_document_bytes=flags["max-document-bytes"],
        ),
        supervision=supervision,
        task_bytes=flags["task-bytes"],
    )


def _match_inputs(
    manifest: Manifest, against: Sequence[str], options: ReadOptions, report: Comparison
) -> dict[int, InputFile]:
    """Match the given files with the inputs of the store, by number; report the others."""
    inputs = expand_inputs(against, choose_display(), manifest.settings["limit"])
    found = {file.name: file for file in inspect_inputs(inputs, manifest.settings["format"], options)}
    matched = {}
    for number, known in enumerate(manifest.inputs):
        file = found.pop(known.path, None)
        if file is None:
            report.note(f"input {known.path} of the store is not among --against; pass the inputs of the run")
        elif file.bytes != known.bytes:
            report.note(f"input {known.path} has {file.bytes:,} bytes and had {known.bytes:,} when it was tokenized")
        elif file.fingerprint != known.fingerprint:
            report.note(f"input {known.path} has other content than when it was tokenized, at the same size")
        else:
            matched[number] = file
    for name in found:
        report.note(f"{name} is not an input of the store; pass the inputs of the run with --against")
    return matched


class _Comparer:
    """Encodes texts with the reference, in batches, and compares the ids with the stored ones."""

    def __init__(
        self,
        store: Path,
        manifest: Manifest,
        settings: Settings,
        tokenizer: Tokenizer,
        report: Comparison,
        advance: Callable[[int], None],
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._report = report
        self._advance = advance
        self._policy = policy = settings.policy
        self._reference = create(REFERENCES[tokenizer.kind], tokenizer, policy.special_tokens, threads=True)
        self._aligner = Aligner(tokenizer, policy.special_tokens) if settings.supervision is not None else None
        self._waiting: list[tuple[StoredTask, int, SourceDocument]] = []
        self._num_characters = 0
        self._indexes: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = {}

    def add(self, task: StoredTask, row: int, document: SourceDocument) -> None:
        """Compare a document, immediately or together with the next ones."""
        self._waiting.append((task, row, document))
        self._num_characters += len(document[0])
        is_full = len(self._waiting) >= BATCH_DOCUMENTS or self._num_characters >= BATCH_CHARACTERS
        if is_full and not (self._manifest.has_pairs and len(self._waiting) % 2):
            self.flush()

    def flush(self) -> None:
        """Compare the documents that are waiting."""
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

    def _encode(self, documents: list[SourceDocument]) -> tuple[IntArray, npt.NDArray[np.int32], Weights | None]:
        texts = [text for text, _ in documents]
        bos_id, eos_id = self._policy.bos_id, self._policy.eos_id
        trained = [some for _, some in documents if some is not None]
        if self._manifest.has_pairs:
            ids = {"bos_id": bos_id, "eos_id": eos_id}
            return assemble_pairs(texts, trained, self._reference.encode, **ids, dtype=np.int64)[:3]
        encoded = self._reference.encode(texts)
        if self._aligner is None:
            vocab_size = self._manifest.tokenizer.vocab_size
            return *surround(encoded, self._policy, dtype=np.int64, vocab_size=vocab_size), None
        weights = weigh_tokens(texts, trained, encoded, self._aligner)
        return assemble(encoded, weights, trained, bos_id=bos_id, eos_id=eos_id, dtype=np.int64)

    def _compare(self, task: StoredTask, row: int, expected: IntArray, weights: Weights | None) -> None:
        shard, inner = task.shards[task.shard[row]].shard, int(task.inner[row])
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
        """Read the ids or the loss mask of a document. The indexes of a few shards stay mapped, as splits alternate."""
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
