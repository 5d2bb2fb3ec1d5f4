"""All figures of a store, in one pass over its indexes and tables, a sample of its tokens, and its packings.

Documents are counted exactly, because indexes are small. Tokens are looked at up to a number that takes seconds,
in pieces that are spread evenly over each split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenmill.arguments import whole_number
from tokenmill.inspection.statistics import measure_lengths
from tokenmill.progress import show_safely
from tokenmill.report.checking import check_store, read_run
from tokenmill.report.counting import PIECE_TOKENS, TokenTally, Worst, choose_pieces, cut_pieces
from tokenmill.report.figures import Example, Figures, LengthBin, SplitFigures, Suspicion
from tokenmill.report.filling import fill_rows
from tokenmill.report.grouping import GroupTally, Integers, SourceTally, Sums
from tokenmill.report.vocabulary import Vocabulary
from tokenmill.store.documents import Documents
from tokenmill.store.store import Split, TokenStore

__all__ = ["SAMPLE_TOKENS", "Advance", "gather"]

Advance = Callable[[str, int, int], None]

SAMPLE_TOKENS = 1 << 26
NEAR_EMPTY_TOKENS = 3
READING = "reading documents"


def gather(
    store: TokenStore,
    *,
    seq_len: int = 2048,
    sample_tokens: int = SAMPLE_TOKENS,
    verify: bool = False,
    advance: Advance = lambda _stage, _done, _total: None,
) -> Figures:
    """Everything a report says of a store; with `verify`, every byte of it is checked first."""
    whole_number(seq_len, "--seq-len", 1, (1 << 31) - 1)
    whole_number(sample_tokens, "--sample-tokens", 1)
    manifest = store.manifest
    checks = check_store(store, verify=verify, advance=advance)
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
        bos=_name_token(store, manifest.special_tokens.bos_id),
        eos=_name_token(store, manifest.special_tokens.eos_id),
        special_tokens=manifest.special_tokens.in_text,
        store_bytes=sum(split.store_bytes for split in splits),
        num_documents=manifest.num_documents,
        num_tokens=manifest.num_tokens,
        num_documents_in=manifest.num_documents_in,
        rejects=manifest.rejects,
        bytes_per_token=reading.by_split.total(reading.is_supervised).bytes_per_token,
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
        run=read_run(store.path),
        settings=manifest.settings,
    )


@dataclass(frozen=True)
class _Found:
    """Documents with some trouble: how many, of how many that were looked at, and how to say it."""

    name: str
    meaning: str
    worst: list[Worst]
    num_looked_at: int
    detail: Callable[[Split, int, float], str]


class _Reading:
    """The pass over all shards of all splits."""

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
        self.by_split = GroupTally(list(store.splits))
        kept = store.manifest.settings.get("keep-keys") or []
        self.sources = SourceTally(store.manifest.inputs, list(kept), is_supervised=self.is_supervised)
        self._near_empty: list[Worst] = []

    def read(self, name: str, split: Split) -> SplitFigures:
        """Read one split and describe it."""
        self.tally.start_split()
        self._near_empty.append(Worst())
        info = self._store.manifest.splits[name]
        # Never less than one piece: a small val split is worth a look too.
        most_tokens = split.num_tokens if self._share >= 1 else int(self._share * split.num_tokens)
        chosen = choose_pieces(split.table.num_tokens, most_tokens)
        bins = _Bins()
        place = self.by_split.names.index(name)
        filled = np.flatnonzero(split.table.num_documents)
        first_token = first_document = 0
        for shard, lengths in zip(filled.tolist(), split.lengths(), strict=True):
            bins.add(lengths)
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
        lengths_of_all = measure_lengths(split)
        return SplitFigures(
            totals=self.by_split.one(place, self.is_supervised),
            num_shards=len(info.shards),
            store_bytes=sum(file.bytes for shard in info.shards for file in shard.files.values()),
            mean_tokens=lengths_of_all.mean,
            median_tokens=lengths_of_all.median,
            shortest_tokens=lengths_of_all.shortest,
            longest_tokens=lengths_of_all.longest,
            bins=bins.filled(),
        )

    def _look(self, split: Split, edges: Integers, chosen: Integers, first_document: int) -> Sums:
        """Look at some pieces of a shard."""
        sums = Sums(np.diff(edges))
        for piece in cut_pieces(split, edges, chosen, first_document=first_document):
            sizes = self.tally.add(piece)
            trained = None if piece.trained is None else np.add.reduceat(piece.trained, piece.starts, dtype=np.int64)
            sums.look(piece.documents - first_document, piece.lengths, sizes, trained)
        return sums

    def suspicions(self, names: list[str]) -> Iterator[Suspicion]:
        """What may be wrong with documents, the worst first of each kind."""
        around = self._num_around
        kinds = (
            _Found(
                "near-empty",
                f"At most {NEAR_EMPTY_TOKENS} tokens beside BOS and EOS",
                self._near_empty,
                self._store.manifest.num_documents,
                lambda _split, _document, score: f"{max(0, int(-score) - around)} tokens beside BOS and EOS",
            ),
            _Found(
                "one token again and again",
                "One token makes up at least half of what was looked at; in code this may be indentation",
                self.tally.repeating,
                self.tally.num_documents,
                self._describe_repetition,
            ),
            _Found(
                "replacement characters",
                "U+FFFD stands where a text was decoded with the wrong encoding",
                self.tally.replaced,
                self.tally.num_documents,
                lambda _split, _document, score: f"{int(score):,} replacement character{'s' if score > 1 else ''}",
            ),
        )
        for kind in kinds:
            yield Suspicion(
                name=kind.name,
                meaning=kind.meaning,
                num_documents=sum(worst.num_documents for worst in kind.worst),
                num_looked_at=kind.num_looked_at,
                examples=list(self._examples(kind, names)),
            )

    def _describe_repetition(self, split: Split, document: int, share: float) -> str:
        """Which token it is, from the start of the document."""
        starts, stops = split.bounds(np.array([document]))
        start = int(starts[0])
        ids = split.read(start, min(int(stops[0]), start + PIECE_TOKENS))
        token = int(np.bincount(ids).argmax())
        return f"{self._vocabulary.show(token)} ({token}) makes up {100 * share:.0f}%"

    def _examples(self, kind: _Found, names: list[str]) -> Iterator[Example]:
        for name, worst in zip(names, kind.worst, strict=True):
            split = self._store.splits[name]
            starts, stops = split.bounds(worst.documents)
            lengths = (stops - starts).tolist()
            for document, length, score in zip(worst.documents.tolist(), lengths, worst.scores.tolist(), strict=True):
                yield Example(
                    split=name, document=document, num_tokens=length, detail=kind.detail(split, document, score)
                )


class _Bins:
    """Documents by length, in bins that are half as wide as powers of two: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""

    def __init__(self) -> None:
        powers = (1 << np.arange(34)).astype(np.int64)
        self._edges = np.unique(np.concatenate([[0], powers, powers + powers // 2]))
        self._documents = np.zeros(len(self._edges), np.int64)
        self._tokens = np.zeros(len(self._edges), np.float64)

    def add(self, lengths: Integers) -> None:
        places = np.searchsorted(self._edges, lengths, "right") - 1
        self._documents += np.bincount(places, minlength=len(self._edges))
        self._tokens += np.bincount(places, lengths, len(self._edges))

    def filled(self) -> list[LengthBin]:
        """From the first bin that has documents to the last."""
        used = np.flatnonzero(self._documents)
        places = range(int(used[0]), int(used[-1]) + 1) if len(used) else range(0)
        return [
            LengthBin(
                start=int(self._edges[place]),
                stop=int(self._edges[place + 1]),
                num_documents=int(self._documents[place]),
                num_tokens=int(self._tokens[place]),
            )
            for place in places
        ]


def _count_long(documents: Documents, seq_len: int) -> tuple[int, int]:
    """Documents longer than a row, and their tokens."""
    count = tokens = 0
    for lengths in documents.lengths():
        long = lengths[lengths > seq_len]
        count, tokens = count + len(long), tokens + int(long.sum())
    return count, tokens


def _name_token(store: TokenStore, token: int | None) -> str:
    if token is None:
        return "none"
    names = {number: name for name, number in store.tokenizer.special_tokens.items()}
    return f"{show_safely(names.get(token, ''))} ({token})".strip()
