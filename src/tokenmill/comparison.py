"""Comparing a store with the inputs it was made from: the same documents, the reference's ids.

Documents are found again by the input and position that the store keeps for each one, and
encoded by the library that defines the ids, whatever engine made the store. A sample seeks
where the format allows it; all documents are read front to back, which also shows a document
that the store does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.batch import IntArray, TextBatch, Trained
from tokenmill.engines import REFERENCES, SpecialTokens, create, open_tokenizer
from tokenmill.engines.alignment import Aligner
from tokenmill.inputs import expand_inputs
from tokenmill.pipeline.plan import InputFile, Span, inspect_inputs, row_spans
from tokenmill.pipeline.reading import Render, read_span
from tokenmill.pipeline.settings import TokenPolicy, supervision_of
from tokenmill.pipeline.task import surround
from tokenmill.progress import choose_display
from tokenmill.readers import reader_for
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
from tokenmill.remote.paths import input_path
from tokenmill.store.manifest import Manifest, ShardInfo
from tokenmill.store.shard import BESIDE, DTYPES, INDEX_HEADER_BYTES, index_lengths
from tokenmill.supervision.masking import Weights, assemble, weigh_tokens
from tokenmill.supervision.rendering import Renderer

__all__ = ["Comparison", "compare_with_inputs"]

SAMPLE_DOCUMENTS = 1000
MOST_EDGE_SHARDS = 250
"""Up to so many shards, the first and last document of each is in the sample: cuts are where bugs live."""
SEEK_BYTES = 1 << 20
"""Reading a document from the middle costs about as much as reading this much front to back."""
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


@dataclass(frozen=True)
class _Part:
    """One shard, and the number of its first document in the split."""

    split: str
    shard: ShardInfo
    first: int


@dataclass(frozen=True)
class _Task:
    """The documents of one task to be compared, in input order; arrays, because there may be millions."""

    parts: list[_Part]
    part: npt.NDArray[np.int64]
    inner: npt.NDArray[np.int64]
    """The document's number in its shard."""
    input: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]

    def name(self, row: int) -> str:
        part = self.parts[self.part[row]]
        return f"document {part.first + int(self.inner[row])} of {part.split}"


def compare_with_inputs(
    store: Path, manifest: Manifest, against: Sequence[str], *, every: bool, advance: Callable[[int, int], None]
) -> Comparison:
    """Read documents of a sound store from its inputs again and compare the ids with the reference's."""
    report = Comparison(REFERENCES[manifest.tokenizer.kind])
    options = _read_options(manifest)
    renderer = _make_renderer(store, manifest)
    files = _match_inputs(manifest, against, options, report)
    chosen = _choose(manifest, every)
    total = sum(map(len, chosen.values()))
    judge = _Judge(store, manifest, report, lambda done: advance(done, total))
    render = renderer.render if renderer is not None else None
    source = _Source(files, options, render, task_bytes=manifest.settings["task-bytes"], sequential=every)
    for task in _tasks(store, manifest, chosen) if files else ():
        for row, document in source.find(task):
            if document is None:
                report.note(
                    f"{manifest.inputs[task.input[row]].path} has no document at position {task.position[row]}, from "
                    f"where {task.name(row)} came; tokenize again with --overwrite"
                )
            else:
                judge.add(task, row, document)
        judge.close()
    if every and manifest.settings["limit"] is None and len(files) == len(manifest.inputs):
        # Plain texts are refused for their special tokens after reading, records before.
        refused_later = manifest.rejects.get("special-token", 0) if renderer is None else 0
        missing = source.count_unwanted() - refused_later
        if missing:
            report.note(f"the inputs have {missing:,} documents that are neither in the store nor among its rejects")
    report.close()
    return report


def _read_options(manifest: Manifest) -> ReadOptions:
    """The reading flags of the run that made the store."""
    settings = manifest.settings
    supervision = supervision_of(settings)
    return ReadOptions(
        record_keys=supervision.keys if supervision is not None else (),
        text_key=settings["text-key"],
        keep_keys=tuple(settings["keep-keys"]),
        separator=settings["separator"],
        whole_files=settings["whole-files"],
        max_document_bytes=settings["max-document-bytes"],
    )


def _make_renderer(store: Path, manifest: Manifest) -> Renderer | None:
    supervision = supervision_of(manifest.settings)
    if supervision is None:
        return None
    return Renderer(
        supervision,
        open_tokenizer(store / "tokenizer", "tokenizer"),
        check_specials=manifest.special_tokens.in_text == "error",
        max_bytes=manifest.settings["max-document-bytes"],
    )


def _match_inputs(
    manifest: Manifest, against: Sequence[str], options: ReadOptions, report: Comparison
) -> dict[int, InputFile]:
    """The given files by their number in the store; those that differ are named and left aside."""
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


def _tasks(store: Path, manifest: Manifest, chosen: dict[str, npt.NDArray[np.int64]]) -> Iterator[_Task]:
    """The documents to compare, task after task in input order; a task has a shard in each split."""
    parts: dict[str, list[_Part]] = {}
    for split, info in manifest.splits.items():
        firsts = accumulate((shard.num_documents for shard in info.shards), initial=0)
        for shard, first in zip(info.shards, firsts, strict=False):
            parts.setdefault(shard.name.partition("/")[2], []).append(_Part(split, shard, first))
    for name in sorted(parts, key=lambda name: [int(number) for number in name.split("-")[1:]]):
        several = parts[name]
        inner = [chosen[part.shard.name] for part in several]
        sources = [_locate(store, part.shard, wanted) for part, wanted in zip(several, inner, strict=True)]
        inputs, positions = (np.concatenate([source[i] for source in sources]) for i in (0, 1))
        part = np.repeat(np.arange(len(several)), [len(wanted) for wanted in inner])
        order = np.lexsort((positions, inputs))
        yield _Task(several, part[order], np.concatenate(inner)[order], inputs[order], positions[order])


def _choose(manifest: Manifest, every: bool) -> dict[str, npt.NDArray[np.int64]]:
    """Which documents of each shard to compare, by their numbers in it."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    if every or manifest.num_documents <= SAMPLE_DOCUMENTS:
        return {shard.name: np.arange(shard.num_documents) for shard in shards}
    spread = np.linspace(0, manifest.num_documents - 1, SAMPLE_DOCUMENTS).astype(np.int64)
    chosen = {}
    first = 0
    for shard in shards:
        stop = first + shard.num_documents
        mine = spread[(spread >= first) & (spread < stop)] - first
        if len(shards) <= MOST_EDGE_SHARDS:
            mine = np.unique(np.concatenate([mine, [0, shard.num_documents - 1]]))
        chosen[shard.name] = mine
        first = stop
    return chosen


def _locate(
    store: Path, shard: ShardInfo, wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and positions of documents of a shard, read row group by row group."""
    import pyarrow.parquet as pq

    found = [np.empty((2, 0), np.int64)]
    row = 0
    with pq.ParquetFile(store / f"{shard.name}.docs.parquet") as file:
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            mine = wanted[(wanted >= row) & (wanted < row + count)] - row
            if len(mine):
                table = file.read_row_group(group, columns=["input", "position"])
                found.append(np.stack([column.to_numpy()[mine].astype(np.int64) for column in table.columns]))
            row += count
    inputs, positions = np.concatenate(found, axis=1)
    return inputs, positions


_Document = tuple[str, Trained | None]
"""A text, and of supervised data what of it is trained on."""


class _Source:
    """Finds texts again by input and position. What can only be read front to back is read once."""

    def __init__(
        self,
        files: dict[int, InputFile],
        options: ReadOptions,
        render: Render | None,
        *,
        task_bytes: int,
        sequential: bool,
    ) -> None:
        self._files = files
        self._options = options
        self._render = render
        self._task_bytes = task_bytes
        self._sequential = sequential
        self._unread = set(files)
        self._input = -1
        self._batches: Iterator[TextBatch] = iter(())
        self._batch: TextBatch | None = None
        self._num_read = 0
        self._num_found = 0

    def find(self, task: _Task) -> Iterator[tuple[int, _Document | None]]:
        """Rows of the task with their documents, None where the input has no such one."""
        for number in np.unique(task.input).tolist():
            if number in self._files:
                start, stop = np.searchsorted(task.input, [number, number + 1]).tolist()
                for row, document in self._find_in_input(number, task.position[start:stop]):
                    yield start + row, document

    def count_unwanted(self) -> int:
        """Documents of the inputs that nobody asked for; reads what is left of all inputs."""
        self._read_to_end()
        for number in sorted(self._unread):
            self._start(number)
            self._read_to_end()
        return self._num_read - self._num_found

    def _find_in_input(self, number: int, positions: npt.NDArray[np.int64]) -> Iterator[tuple[int, _Document | None]]:
        spans = None if self._sequential else _spans(self._files[number], positions, self._options)
        if spans is None:
            if self._input != number:
                self._read_to_end()
                self._start(number)
            yield from self._pick(positions, self._from_here())
            return
        done = 0
        for start, stop in spans:
            count = int(np.searchsorted(positions, stop)) - done
            batches = read_span(self._files[number], Span(number, start, stop), self._options, self._render)
            for row, document in self._pick(positions[done : done + count], batches):
                yield done + row, document
            done += count

    def _pick(
        self, positions: npt.NDArray[np.int64], batches: Iterator[TextBatch]
    ) -> Iterator[tuple[int, _Document | None]]:
        row = 0
        for batch in batches:
            stop = int(np.searchsorted(positions, batch.positions[-1], "right")) if len(batch.positions) else row
            places = np.searchsorted(batch.positions, positions[row:stop])
            found = batch.positions[places] == positions[row:stop]
            self._num_found += int(found.sum())
            for place, is_there in zip(places.tolist(), found.tolist(), strict=True):
                trained = batch.trained[place] if batch.trained is not None and is_there else None
                yield row, (batch.texts[place], trained) if is_there else None
                row += 1
            if row == len(positions):
                return
        for lost in range(row, len(positions)):
            yield lost, None

    def _start(self, number: int) -> None:
        self._unread.discard(number)
        self._input = number
        file = self._files[number]
        spans = [Span(number)]
        if file.format == "parquet":
            spans = row_spans(number, file, self._options, self._task_bytes)
        self._batches = chain.from_iterable(read_span(file, span, self._options, self._render) for span in spans)
        self._next()

    def _next(self) -> None:
        self._batch = next(self._batches, None)
        self._num_read += len(self._batch.texts) if self._batch is not None else 0

    def _from_here(self) -> Iterator[TextBatch]:
        """Batches front to back; the one in which the caller stops comes first in the next call."""
        while self._batch is not None:
            yield self._batch
            self._next()

    def _read_to_end(self) -> None:
        """A sample has no use for what is behind it; when all documents count, this counts them."""
        while self._sequential and self._batch is not None:
            self._next()


def _spans(file: InputFile, positions: npt.NDArray[np.int64], options: ReadOptions) -> list[tuple[int, int]] | None:
    """Spans in which documents at sorted positions start; None: the input can only be read front to back."""
    reader = reader_for(file.format, options)
    if isinstance(reader, ParquetReader):
        groups = np.array([stop for _, stop in reader.plan(input_path(file.path), 1)], np.int64)
        group = np.searchsorted(groups, positions, "right")
        last = np.flatnonzero(np.diff(group, append=-1))
        first = np.concatenate([[0], last[:-1] + 1])
        return [*zip(positions[first].tolist(), (positions[last] + 1).tolist(), strict=True)]
    if file.compression != "none" or not reader.splittable:
        return None
    if int(positions[-1] - positions[0]) < len(positions) * SEEK_BYTES:
        return [(int(positions[0]), int(positions[-1]) + 1)]
    return [(position, position + 1) for position in positions.tolist()]


class _Judge:
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
        self._waiting: list[tuple[_Task, int, _Document]] = []
        self._num_characters = 0
        self._indexes: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = {}

    def add(self, task: _Task, row: int, document: _Document) -> None:
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

    def _encode(self, documents: list[_Document]) -> tuple[IntArray, npt.NDArray[np.int32], Weights | None]:
        texts = [text for text, _ in documents]
        encoded = self._reference.encode(texts)
        if self._aligner is None:
            vocab_size = self._manifest.tokenizer.vocab_size
            return *surround(encoded, self._policy, dtype=np.int64, vocab_size=vocab_size), None
        trained = [some for _, some in documents if some is not None]
        weights = weigh_tokens(texts, trained, encoded, self._aligner)
        policy = self._policy
        return assemble(encoded, weights, trained, bos_id=policy.bos_id, eos_id=policy.eos_id, dtype=np.int64)

    def _compare(self, task: _Task, row: int, expected: IntArray, weights: Weights | None) -> None:
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
