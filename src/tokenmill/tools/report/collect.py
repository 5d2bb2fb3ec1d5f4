"""Collect all figures of a store from its manifest, its indexes and tables, a sample of its tokens, and its packings.

Documents are counted exactly, because indexes are small. Tokens are sampled, so that this takes seconds: the sample is
pieces that are spread evenly over each split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from tokenmill.arguments import whole_number
from tokenmill.display import Advance, ignore_progress
from tokenmill.errors import StoreError
from tokenmill.formatting import plural, show_safely
from tokenmill.pipeline.journal.attempts import RunInfo
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import FileInfo, decode_sealed, read_sealed
from tokenmill.store.store import Split, TokenStore
from tokenmill.tools.inspect.statistics import measure_lengths, name_token
from tokenmill.tools.report.duplicates import DuplicateTally, ShardHashes
from tokenmill.tools.report.figures import Checks, Example, Figures, SplitFigures, Suspicion
from tokenmill.tools.report.groups import GroupTally, Integers, SourceTally, Sums
from tokenmill.tools.report.packings import fill_rows
from tokenmill.tools.report.token_counts import PIECE_TOKENS, TokenTally, Vocabulary, Worst, choose_pieces, cut_pieces
from tokenmill.tools.verify import list_files
from tokenmill.tools.verify import verify as verify_store

__all__ = ["SAMPLE_TOKENS", "collect_figures"]

SAMPLE_TOKENS = 1 << 26
NEAR_EMPTY_TOKENS = 3
READING = "reading documents"
Describe = Callable[[Split, int, float], str]
"""Describes the defect of a document, from its split, its number and its score."""


def collect_figures(
    store: TokenStore,
    *,
    seq_len: int = 2048,
    sample_tokens: int = SAMPLE_TOKENS,
    verify: bool = False,
    advance: Advance = ignore_progress,
) -> Figures:
    """Collect all figures of a report; with `verify`, check every byte of the store first."""
    whole_number(seq_len, "--seq-len", 1, (1 << 31) - 1)
    whole_number(sample_tokens, "--sample-tokens", 1)
    manifest = store.manifest
    checks = _check_store(store, verify=verify, advance=advance)
    reading = _Reading(store, sample_tokens, advance)
    splits = [reading.read(name, split) for name, split in store.splits.items()]
    names = list(store.splits)
    documents = store.split()
    long_documents, long_tokens = _count_long(documents, seq_len)
    return Figures(
        store=show_safely(store.path.resolve().name),
        fingerprint=manifest.checksum,
        tokenizer=show_safely(manifest.tokenizer.name),
        tokenizer_kind=manifest.tokenizer.kind,
        vocab_size=store.vocab_size,
        dtype=manifest.dtype,
        bos=name_token(store, manifest.special_tokens.bos_id),
        eos=name_token(store, manifest.special_tokens.eos_id),
        special_tokens=manifest.special_tokens.in_text,
        store_bytes=sum(split.store_bytes for split in splits),
        num_documents=manifest.num_documents,
        num_tokens=manifest.num_tokens,
        num_documents_in=manifest.num_documents_in,
        rejects=manifest.rejects,
        bytes_per_token=reading.by_split.sum_up("all", range(len(names))).bytes_per_token,
        is_supervised=reading.is_supervised,
        splits=splits,
        groupings=reading.sources.groupings(),
        ungrouped=reading.sources.ungrouped,
        seq_len=seq_len,
        long_document_share=long_documents / max(1, documents.num_documents),
        long_token_share=long_tokens / max(1, documents.num_tokens),
        fillings=list(fill_rows(documents, seq_len)),
        tokens=reading.tally.figures(names, manifest.num_tokens),
        suspicions=list(reading.suspicions(names)),
        checks=checks,
        run=_read_run(store.path),
        settings=manifest.settings,
    )


class _Reading:
    """One pass over all shards of all splits."""

    def __init__(self, store: TokenStore, sample_tokens: int, advance: Advance) -> None:
        self._store = store
        self._share = min(1.0, sample_tokens / max(1, store.manifest.num_tokens))
        self._advance = advance
        self._num_done = 0
        specials = store.manifest.special_tokens
        self._num_around = sum(token is not None for token in (specials.bos_id, specials.eos_id))
        self.is_supervised = any(split.mask is not None for split in store.splits.values())
        self._vocabulary = Vocabulary(store.tokenizer, store.vocab_size)
        self.tally = TokenTally(self._vocabulary)
        self.by_split = GroupTally(self.is_supervised, list(store.splits))
        kept = store.manifest.settings.get("keep-keys") or []
        self.sources = SourceTally(store.manifest.inputs, list(kept), is_supervised=self.is_supervised)
        self._near_empty: list[Worst] = []
        self._duplicates = DuplicateTally(self._num_around + 1)

    def read(self, name: str, split: Split) -> SplitFigures:
        """Read one split and describe it."""
        self.tally.start_split()
        self._near_empty.append(Worst())
        info = self._store.manifest.splits[name]
        # At least one piece is read, of a small val split too.
        most_tokens = split.num_tokens if self._share >= 1 else int(self._share * split.num_tokens)
        chosen = choose_pieces(split.table.num_tokens, most_tokens)
        place = self.by_split.names.index(name)
        filled = np.flatnonzero(split.table.num_documents)
        first_token = first_document = 0
        for shard, lengths in zip(filled.tolist(), split.lengths(), strict=True):
            short = np.flatnonzero(lengths <= NEAR_EMPTY_TOKENS + self._num_around)
            self._near_empty[-1].offer(-lengths[short].astype(float), short + first_document)
            edges = np.concatenate([[0], np.cumsum(lengths)]) + first_token
            sums = self._look(split, edges, chosen[shard], first_document)
            for looked_at in filter(None, (split, split.mask)):
                looked_at.table.release(shard)
            self.by_split.add(np.full(len(lengths), place), sums)
            if ".docs.parquet" in info.shards[shard].files:
                self.sources.add(Path(split.table.local_path(shard, ".docs.parquet")), sums)
            first_token, first_document = int(edges[-1]), first_document + len(lengths)
            self._num_done += len(lengths)
            self._advance(READING, self._num_done, self._store.manifest.num_documents)
        measured = measure_lengths(split)
        return SplitFigures(
            totals=self.by_split.sum_up(name, [place]),
            num_shards=len(info.shards),
            store_bytes=info.num_bytes,
            mean_tokens=measured.mean,
            median_tokens=measured.median,
            shortest_tokens=measured.shortest,
            longest_tokens=measured.longest,
            bins=measured.counts,
        )

    def _look(self, split: Split, edges: Integers, chosen: Integers, first_document: int) -> Sums:
        """Read some pieces of a shard."""
        sums, hashes = Sums(np.diff(edges)), ShardHashes(edges, first_document)
        for piece in cut_pieces(split, edges, chosen, first_document=first_document):
            sizes = self.tally.add(piece)
            trained = None if piece.trained is None else np.add.reduceat(piece.trained, piece.starts, dtype=np.int64)
            hashes.add(piece)
            sums.look(piece.documents - first_document, piece.lengths, sizes, trained)
        self._duplicates.add(len(self._near_empty) - 1, hashes)
        return sums

    def suspicions(self, names: list[str]) -> Iterator[Suspicion]:
        """List what may be wrong with documents; the worst examples of each kind come first."""
        around = self._num_around
        kinds: list[tuple[str, str, list[Worst], Describe]] = [
            (
                "near-empty",
                f"At most {NEAR_EMPTY_TOKENS} tokens beside BOS and EOS",
                self._near_empty,
                lambda _split, _document, score: f"{max(0, int(-score) - around)} tokens beside BOS and EOS",
            ),
            (
                "one token again and again",
                "One token makes up at least half of what was looked at; in code this may be indentation",
                self.tally.repeating,
                self._describe_repetition,
            ),
            (
                "replacement characters",
                "U+FFFD stands where a text was decoded with the wrong encoding",
                self.tally.replaced,
                lambda _split, _document, score: plural(int(score), "replacement character"),
            ),
        ]
        all_documents = self._store.manifest.num_documents
        for name, meaning, worst, describe in kinds:
            yield Suspicion(
                name=name,
                meaning=meaning,
                num_documents=sum(some.num_documents for some in worst),
                num_looked_at=all_documents if worst is self._near_empty else self.tally.num_documents,
                examples=list(self._examples(worst, describe, names)),
            )

        yield self._describe_duplicates(names)

    def _describe_duplicates(self, names: list[str]) -> Suspicion:
        num_documents, most_copied = self._duplicates.count()
        examples = []
        for split, document, count in most_copied:
            starts, stops = self._store.splits[names[split]].bounds(np.array([document]))
            detail = f"{count:,} documents with these tokens"
            example = Example(
                split=names[split], document=document, num_tokens=int(stops[0] - starts[0]), detail=detail
            )
            examples.append(example)
        return Suspicion(
            name="exact duplicates",
            meaning="Documents with the tokens of an earlier one. Those of a split are trained on once more each epoch",
            num_documents=num_documents,
            num_looked_at=self._duplicates.num_looked_at,
            examples=examples,
        )

    def _describe_repetition(self, split: Split, document: int, share: float) -> str:
        """Name the token, from the first piece of the document."""
        starts, stops = split.bounds(np.array([document]))
        start = int(starts[0])
        ids = split.read(start, min(int(stops[0]), start + PIECE_TOKENS))
        token = int(np.bincount(ids).argmax())
        return f"{self._vocabulary.show(token)} ({token}) makes up {100 * share:.0f}%"

    def _examples(self, worst: list[Worst], describe: Describe, names: list[str]) -> Iterator[Example]:
        for name, some in zip(names, worst, strict=True):
            split = self._store.splits[name]
            starts, stops = split.bounds(some.documents)
            rows = zip(some.documents.tolist(), (stops - starts).tolist(), some.scores.tolist(), strict=True)
            for document, length, score in rows:
                detail = describe(split, document, score)
                yield Example(split=name, document=document, num_tokens=length, detail=detail)


def _count_long(documents: Documents, seq_len: int) -> tuple[int, int]:
    """Count the documents that are longer than a row, and their tokens."""
    count = tokens = 0
    for lengths in documents.lengths():
        long = lengths[lengths > seq_len]
        count, tokens = count + len(long), tokens + int(long.sum())
    return count, tokens


def _check_store(store: TokenStore, *, verify: bool, advance: Advance) -> Checks:
    """Compare the sizes of all files with the manifest; with `verify`, check every byte of them instead."""
    manifest = store.manifest
    parity = manifest.engine.parity
    files = list_files(store.path, manifest)
    verified = verify_store(store.path, advance=advance) if verify else None
    problems = list(_check_sizes(files)) if verified is None else verified.problems
    return Checks(
        engine=f"{manifest.engine.name} {manifest.engine.version}",
        reference=parity.reference if parity else None,
        num_compared=parity.num_documents if parity else 0,
        num_compared_bytes=parity.num_bytes if parity else 0,
        num_awkward=parity.num_awkward if parity else 0,
        num_compared_later=parity.num_later_documents if parity else 0,
        num_mismatches=parity.num_mismatches if parity else 0,
        num_rerouted=manifest.engine.num_rerouted,
        num_files=len(files),
        num_bytes=sum(info.bytes for info in files.values()),
        problems=[problem.replace(str(store.path), store.path.name) for problem in problems],
        verified=None if verified is None else verified.rows(),
    )


def _check_sizes(files: dict[Path, FileInfo]) -> Iterator[str]:
    for path, info in files.items():
        try:
            size = path.stat().st_size
        except OSError:
            yield f"{path} is missing"
            continue
        if size != info.bytes:
            yield f"{path} has {size:,} bytes and the manifest says {info.bytes:,}"


def _read_run(store: Path) -> RunInfo | None:
    """Read the history of the run; None if it was not kept or is not readable, since no figure depends on it."""
    path = store / "run.json"
    with suppress(OSError, StoreError):
        return decode_sealed(read_sealed(path), RunInfo, path)
    return None
