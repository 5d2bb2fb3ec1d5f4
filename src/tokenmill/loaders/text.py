"""Windows of a text that is being tokenized: where the rows of `tokenmill.stream` come from.

What is tokenized is written to a store as it goes, byte for byte the one that `tokenmill tokenize` makes; so
later epochs, a resumed training and other ones read it from disk. See `dataset/windows.py` for the order of
rows, which depends on the text and the seed alone.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import xxhash

from tokenmill.arguments import flag, one_of, whole_number
from tokenmill.dataset.base import Rows, as_seed
from tokenmill.dataset.packing import Method, pack
from tokenmill.dataset.permutation import make_key
from tokenmill.dataset.report import LongDocuments
from tokenmill.dataset.shuffling import shuffle as shuffle_rows
from tokenmill.errors import StoreError, UsageError
from tokenmill.machine import parse_bytes
from tokenmill.pipeline.background import BackgroundRun
from tokenmill.pipeline.beginning import find_beginning, temporary_folder
from tokenmill.pipeline.following import Follower
from tokenmill.pipeline.journal import Journal
from tokenmill.pipeline.locking import is_in_use
from tokenmill.pipeline.plan import Plan, make_plan
from tokenmill.pipeline.preparing import Prepared
from tokenmill.pipeline.resume import find_finished, is_same
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST, ShardInfo
from tokenmill.store.shard import dtype_for
from tokenmill.store.store import TokenStore, open_shards

__all__ = ["Making", "TokenizedText"]

WINDOW = "1GB"
LOOK_SECONDS = 0.02


class Making(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are made of documents, and how many rows are shuffled among each other in the first epoch."""

    seq_len: int
    packing: str = "concat"
    long_documents: str = "split"
    shuffle: bool = True
    seed: int = 0
    window: str | int = WINDOW

    @classmethod
    def checked(cls, **settings: Any) -> Making:
        """Refuse what no rows can be made of before anything is tokenized."""
        making = cls(**settings)
        whole_number(making.seq_len, "seq_len", 1)
        one_of(making.packing, get_args(Method), "packing")
        one_of(making.long_documents, get_args(LongDocuments), "long_documents")
        flag(making.shuffle, "shuffle")
        as_seed(making.seed)
        return making

    def rows(self, documents: Documents, seed: int) -> Rows:
        """Rows of some documents, packed and shuffled with a seed of their own."""
        packed = pack(
            documents,
            seq_len=self.seq_len,
            method=self.packing,  # type: ignore[arg-type]
            long_documents=self.long_documents,  # type: ignore[arg-type]
            seed=seed,
        )
        return shuffle_rows(packed, seed=seed) if self.shuffle else packed


class TokenizedText:
    """The windows of a text that is being tokenized: shards in the order of the plan, about twice as many each time.

    The first one is the beginning of the first shard. A window that has too little text for a row
    takes the next shards too; what is left of the last one comes in the second epoch.
    """

    def __init__(self, prepared: Prepared, split: str, making: Making, verbose: bool = False) -> None:
        self._prepared = prepared
        self._store = Path(prepared.request.out)
        self._split = split
        self._making = making
        self._verbose = verbose
        self._most_shards = max(1, parse_bytes(str(making.window), "window") // prepared.settings.task_bytes)
        plan = make_plan(prepared.files, prepared.settings)
        self._plan = msgspec.structs.replace(plan, order=_order(plan, making))
        self._is_ours = False
        self._too_little: UsageError | None = None
        self._run: BackgroundRun | None = BackgroundRun(prepared, self._plan)
        # When nobody reads on, tokenizing ends where it is.
        weakref.finalize(self, self._run.cancel)
        self._begin()

    def _begin(self) -> None:
        self._error: Exception | None = None
        self._folders: list[Any] = []
        self._teller = _Teller(self._store)
        self.has_ended = False
        self._go_to(0)

    def _go_to(self, number: int) -> None:
        """Give windows from one on; those before it are made again, and passed over."""
        self._num_given = number
        self._follower = Follower(self._store, self._plan, self._split)
        self._windows = itertools.islice(self._make_windows(), number, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process does not tokenize: it follows the run of this one.
        kept = ("_prepared", "_store", "_split", "_making", "_most_shards", "_plan", "_is_ours")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _run=None, _verbose=False, _too_little=None)
        self._begin()

    def describe(self) -> dict[str, Any]:
        """The text by its content, what decides the tokens, and how rows are made of them."""
        files = [(file.name, file.bytes, file.fingerprint) for file in self._prepared.files]
        return {
            **msgspec.to_builtins(self._making),
            "split": self._split,
            "tokenize": self._prepared.settings.flags(),
            "inputs": xxhash.xxh3_64_hexdigest(msgspec.json.encode(files)),
        }

    @property
    def was_waited_for(self) -> bool:
        """Whether a window was not there when it was asked for; the first one never is."""
        return self._teller.was_waited_for

    def whole(self) -> Rows:
        """All rows of the store, which is finished soon after its last shard."""
        while not (self._store / MANIFEST).exists():
            self._look_again()
        return self._making.rows(TokenStore(self._store).split(self._split), self._making.seed)

    def next_window(self) -> Rows | None:
        """Wait for the rows of the next window; None behind the last one."""
        if self._error is not None:
            raise self._error
        asked = time.perf_counter()
        try:
            window = next(self._windows, None)
        except Exception as error:
            self._error = error
            raise
        except BaseException:
            # An interrupt while it waits must not pass for the end of the text.
            self._go_to(self._num_given)
            raise
        if window is None:
            self.has_ended = True
            return None
        self._num_given += 1
        line = self._teller.tell(window, time.perf_counter() - asked)
        if self._verbose:
            print(line, file=sys.stderr, flush=True)
        return window.rows

    def _make_windows(self) -> Iterator[_Window]:
        """The beginning of the first shard, then 1, 2, 4, ... shards."""
        beginning, shards = self._beginning()
        window = self._make(beginning, shards, 0)
        num_begun = 0
        if window is not None:
            num_begun = window.num_documents
            yield window
        shards, size, number = [], 1, 1
        while (shard := self._next_shard()) is not None or shards:
            shards += [shard] if shard is not None else []
            if shard is not None and len(shards) < size:
                continue
            documents = self._open(shards)
            window = self._make(documents.slice(num_begun, documents.num_documents), shards, number)
            if window is not None:
                yield window
                shards, num_begun, size, number = [], 0, min(2 * size, self._most_shards), number + 1
            elif shard is None:
                break
        if number == 1 and not num_begun:
            raise self._too_little or UsageError(f"{self._store} has no documents in its split {self._split!r}")

    def _beginning(self) -> tuple[Documents | None, list[ShardInfo]]:
        """The first documents: of the first shard, if that is there, else tokenized here."""
        beginning = find_beginning(self._plan, self._prepared.settings.reading)
        if beginning is None:
            return None, []
        shard = Follower(self._store, self._plan, self._split).take() if self._has_begun() else None
        if shard is None:
            self._folders.append(temporary_folder())
            return beginning.encode(self._prepared, Path(self._folders[-1].name), self._split), []
        count = beginning.count(self._store, shard)
        return self._open([shard]).slice(0, count) if count else None, [shard]

    def _open(self, shards: list[ShardInfo]) -> Documents:
        dtype = dtype_for(self._prepared.tokenizer.vocab_size)
        documents = open_shards(self._store, shards, dtype, f"{self._store.name}/{self._split}")
        documents.vocab_size = self._prepared.tokenizer.vocab_size
        return documents

    def _make(self, documents: Documents | None, shards: list[ShardInfo], number: int) -> _Window | None:
        """A window; None if there is too little for a row."""
        if documents is None or not documents.num_documents:
            return None
        try:
            rows = self._making.rows(documents, make_key(self._making.seed, number))
        except UsageError as error:
            self._too_little = error
            return None
        return _Window(rows, documents.num_documents, shards)

    def _next_shard(self) -> ShardInfo | None:
        """Wait for the next shard; None behind the last one."""
        while True:
            shard = self._follower.take() if self._has_begun() else None
            if shard is not None or self._follower.has_ended:
                return shard
            self._look_again()

    def _has_begun(self) -> bool:
        """Whether what is in the directory is this run, and not one that was asked for something else."""
        if not self._is_ours:
            journal, settings, files = Journal(self._store), self._prepared.settings, self._prepared.files
            if find_finished(self._store, settings, files) is not None:
                self._is_ours = True
            elif journal.exists():
                self._is_ours = is_same(journal.saved_plan(), settings, files)
                if not self._is_ours and is_in_use(self._store):
                    raise StoreError(
                        f"{self._store} is being made from other text or with other flags; use another cache"
                    )
        return self._is_ours

    def _look_again(self) -> None:
        """Let some time pass, unless there is nothing to wait for."""
        if self._run is not None:
            self._run.check()
        time.sleep(LOOK_SECONDS)


class _Window(NamedTuple):
    """Rows, and what they were made of; no shards where they were tokenized here."""

    rows: Rows
    num_documents: int
    shards: list[ShardInfo]


class _Teller:
    """What a window took, in words; the time between two windows is that between their last shards."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._started = self._last = time.time()
        self._is_first = True
        self.was_waited_for = False

    def tell(self, window: _Window, waited: float) -> str:
        """One line on a window."""
        seconds, written = waited, time.time()
        if window.shards:
            written = max(_written(self._store, shard) for shard in window.shards)
            seconds, self._last = max(0.0, written - self._last), max(self._last, written)
        self.was_waited_for |= not self._is_first and waited > 2 * LOOK_SECONDS
        self._is_first = False
        milliseconds, count = seconds * 1e3, window.num_documents
        done = f"tokenized {count:,} documents in {milliseconds:,.0f} ms ({milliseconds / count:.3f} ms per document)"
        if written < self._started:
            done = f"read {count:,} documents from {self._store}"
        return f"{done}, training waited {waited * 1e3:,.0f} ms"


def _written(store: Path, shard: ShardInfo) -> float:
    return (store / f"{shard.name}.idx").stat().st_mtime


def _order(plan: Plan, making: Making) -> dict[str, int]:
    """What comes first: as the inputs have it, or in an order of the seed."""
    names = sorted([*(task.name for task in plan.tasks), *(stream.name for stream in plan.streams)])
    if making.shuffle:
        names.sort(key=lambda name: xxhash.xxh3_64_intdigest(name.encode(), make_key(making.seed)))
    return {name: place for place, name in enumerate(names)}
