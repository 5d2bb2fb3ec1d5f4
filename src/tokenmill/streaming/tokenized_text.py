"""Windows of a text that is being tokenized: the source of the rows of `tokenmill.stream`.

The run in the background writes a store, byte for byte the one that `tokenmill tokenize` makes, so later epochs and
resumed or other trainings read it from disk. See `windows.py` for the order of rows, which depends only on the text
and the seed.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import xxhash

from tokenmill.arguments import flag, one_of, whole_number
from tokenmill.dataset.pack import Method, pack
from tokenmill.dataset.packing_report import LongDocuments
from tokenmill.dataset.rows import Rows, as_seed
from tokenmill.dataset.shuffle import make_key
from tokenmill.dataset.shuffle import shuffle as shuffle_rows
from tokenmill.errors import StoreError, UsageError
from tokenmill.machine import parse_bytes
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.pipeline.journal.locks import find_holders
from tokenmill.pipeline.journal.resume import find_finished, is_same
from tokenmill.pipeline.plan.prepare import Prepared
from tokenmill.pipeline.plan.tasks import Plan, make_plan
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import MANIFEST, ShardInfo
from tokenmill.store.store import TokenStore, open_shards
from tokenmill.streaming.background import BackgroundRun, follow
from tokenmill.streaming.first_window import find_first_window

__all__ = ["RowSettings", "TokenizedText"]

WINDOW = "1GB"
LOOK_SECONDS = 0.02
LOST_SECONDS = 60.0
"""A run locks the directory within seconds, and another rank takes over from a killed one as quickly."""


class RowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How documents become rows, and how much text is shuffled together in the first epoch."""

    seq_len: int
    packing: str = "concat"
    long_documents: str = "split"
    max_documents: int | None = None
    align: int | None = None
    shuffle: bool = True
    seed: int = 0
    window: str | int = WINDOW

    def __post_init__(self) -> None:
        """Check all settings before anything is tokenized."""
        whole_number(self.seq_len, "seq_len", 1)
        one_of(self.packing, get_args(Method), "packing")
        one_of(self.long_documents, get_args(LongDocuments), "long_documents")
        for name in ("max_documents", "align"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, 1)
        if self.align is not None and (self.packing == "concat" or self.seq_len % self.align):
            raise UsageError(
                f"align {self.align} pads documents, so packing must be 'best-fit' or 'pad', and seq_len a multiple"
            )
        flag(self.shuffle, "shuffle")
        as_seed(self.seed)

    def make_rows(self, documents: Documents, seed: int) -> Rows:
        """Pack and shuffle documents with a seed of their own."""
        packed = pack(
            documents,
            seq_len=self.seq_len,
            method=self.packing,  # type: ignore[arg-type]
            long_documents=self.long_documents,  # type: ignore[arg-type]
            seed=seed,
            max_documents=self.max_documents,
            align=self.align or 1,
        )
        return shuffle_rows(packed, seed=seed) if self.shuffle else packed


class TokenizedText:
    """The windows of a text that is being tokenized: shards in the order of the plan, about twice as many each time.

    The first window is the start of the first shard. A window with too little text for a row also takes the next
    shards. If the last window has too little, its text comes in the second epoch.
    """

    def __init__(self, prepared: Prepared, split: str, settings: RowSettings, verbose: bool = False) -> None:
        self._prepared = prepared
        self._store = Path(prepared.request.out)
        self._split = split
        self._settings = settings
        self._verbose = verbose
        self._most_shards = max(1, parse_bytes(str(settings.window), "window") // prepared.settings.task_bytes)
        plan = make_plan(prepared.files, prepared.settings)
        self._plan = msgspec.structs.replace(plan, order=_order(plan, settings))
        self._is_ours = False
        self._too_little: UsageError | None = None
        # A store of other text or flags is refused before a run starts that would have to be stopped again.
        find_finished(self._store, prepared)
        self._run: BackgroundRun | None = BackgroundRun(prepared, self._plan)
        # The run stops when this object is gone.
        weakref.finalize(self, self._run.cancel)
        self._begin()

    def _begin(self) -> None:
        self._error: Exception | None = None
        self._times = _WindowTimes(self._store)
        self.has_ended = False
        self._inputs: list[set[int]] = []
        """The inputs of each window so far; none for one that this process tokenized."""
        self._go_to(0)

    def _go_to(self, number: int) -> None:
        """Continue with a window; those before it are made again and skipped."""
        self._num_given = number
        self._shards = follow(self._store, self._plan, self._split)
        self._windows = itertools.islice(self._make_windows(), number, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process does not tokenize: it follows the run of this process.
        kept = ("_prepared", "_store", "_split", "_settings", "_most_shards", "_plan", "_is_ours")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _run=None, _verbose=False, _too_little=None)
        self._begin()

    def describe(self) -> dict[str, Any]:
        """Describe the text by its content, the flags that decide the tokens, and how rows are made of them."""
        files = [(file.name, file.bytes, file.fingerprint) for file in self._prepared.files]
        row_settings = msgspec.to_builtins(self._settings)
        for name in ("max_documents", "align"):
            if row_settings[name] is None:
                del row_settings[name]
        return {
            **row_settings,
            "split": self._split,
            "tokenize": self._prepared.settings.flags(),
            "inputs": xxhash.xxh3_64_hexdigest(msgspec.json.encode(files)),
        }

    @property
    def shape(self) -> tuple[int | None, int]:
        """The bound on the documents of a row, and the multiples of tokens at which they begin."""
        return self._settings.max_documents, self._settings.align or 1

    @property
    def has_waited(self) -> bool:
        """Whether the trainer had to wait for a window, except the first."""
        return self._times.has_waited

    def first_window_of(self, path: str) -> int:
        """Return the number of the first window that may have text of an input: 0 if it was tokenized here."""
        number = next((n for n, file in enumerate(self._prepared.files) if path in (file.path, file.shown)), -1)
        return next((n for n, inputs in enumerate(self._inputs) if number in inputs or not inputs), len(self._inputs))

    def whole(self) -> Rows:
        """Return all rows of the store, once it is finished; that is soon after its last shard."""
        self._last_seen = time.monotonic()
        while not (self._store / MANIFEST).exists():
            self._wait()
        return self._settings.make_rows(TokenStore(self._store).split(self._split), self._settings.seed)

    def next_window(self) -> Rows | None:
        """Wait for the rows of the next window; return None after the last one."""
        if self._error is not None:
            raise self._error
        asked, self._last_seen = time.perf_counter(), time.monotonic()
        try:
            window = next(self._windows, None)
        except Exception as error:
            self._error = error
            raise
        except BaseException:
            # An interrupt ends the generator, which must not be taken for the end of the text.
            self._go_to(self._num_given)
            raise
        if window is None:
            self.has_ended = True
            return None
        self._num_given += 1
        self._inputs.append({int(shard.name.rpartition("shard-")[2].split("-")[0]) for shard in window.shards})
        line = self._times.describe(window, time.perf_counter() - asked)
        if self._verbose:
            print(line, file=sys.stderr, flush=True)
        return window.rows

    def _make_windows(self) -> Iterator[_Window]:
        """Yield the start of the first shard, then 1, 2, 4, ... shards."""
        documents, shards = self._first_documents()
        window = self._make(documents, shards, 0)
        num_given = 0
        if window is not None:
            num_given = window.num_documents
            yield window
        shards, size, number = [], 1, 1
        while (shard := self._next_shard()) is not None or shards:
            shards += [shard] if shard is not None else []
            if shard is not None and len(shards) < size:
                continue
            documents = self._open(shards)
            window = self._make(documents.slice(num_given, documents.num_documents), shards, number)
            if window is not None:
                yield window
                shards, num_given, size, number = [], 0, min(2 * size, self._most_shards), number + 1
            elif shard is None:
                break
        if number == 1 and not num_given:
            raise self._too_little or UsageError(f"{self._store} has no documents in its split {self._split!r}")

    def _first_documents(self) -> tuple[Documents | None, list[ShardInfo]]:
        """Read the first documents from the first shard, if it exists; otherwise tokenize them here."""
        first = find_first_window(self._plan, self._prepared.settings.reading)
        if first is None:
            return None, []
        shard = next(follow(self._store, self._plan, self._split), None) if self._has_begun() else None
        if shard is None:
            folder = tempfile.TemporaryDirectory(prefix="tokenmill-", ignore_cleanup_errors=True)
            weakref.finalize(self, folder.cleanup)
            return first.encode(self._prepared, Path(folder.name), self._split), []
        count = first.count(self._store, shard)
        return self._open([shard]).slice(0, count) if count else None, [shard]

    def _open(self, shards: list[ShardInfo]) -> Documents:
        vocab_size = self._prepared.tokenizer.vocab_size
        return open_shards(self._store, shards, vocab_size, f"{self._store.name}/{self._split}")

    def _make(self, documents: Documents | None, shards: list[ShardInfo], number: int) -> _Window | None:
        """Make a window; return None if there is too little text for a row."""
        if documents is None or not documents.num_documents:
            return None
        try:
            rows = self._settings.make_rows(documents, make_key(self._settings.seed, number))
        except UsageError as error:
            self._too_little = error
            return None
        return _Window(rows, documents.num_documents, shards)

    def _next_shard(self) -> ShardInfo | None:
        """Wait for the next shard; return None after the last one."""
        while not self._has_begun():
            self._wait()
        for shard in self._shards:
            if shard is not None:
                return shard
            self._wait()
        return None

    def _has_begun(self) -> bool:
        """Return whether the directory holds this run, and not one of other text or with other flags."""
        if not self._is_ours:
            journal = Journal(self._store)
            if find_finished(self._store, self._prepared) is not None:
                self._is_ours = True
            elif journal.exists():
                self._is_ours = is_same(journal.saved_plan(), self._prepared)
                if not self._is_ours and find_holders(self._store):
                    raise StoreError(
                        f"{self._store} is being made from other text or with other flags; use another cache"
                    )
        return self._is_ours

    def _wait(self) -> None:
        """Sleep for a moment, or raise the error that ended the run."""
        if self._run is not None:
            self._run.check()
        else:
            self._check_that_a_run_continues()
        time.sleep(LOOK_SECONDS)

    def _check_that_a_run_continues(self) -> None:
        """Raise if no run has held the store for a while; only the process that started the run knows why it ended."""
        now = time.monotonic()
        if find_holders(self._store) or (self._store / MANIFEST).exists():
            self._last_seen = now
        elif now - self._last_seen > LOST_SECONDS:
            raise StoreError(
                f"no process has tokenized into {self._store} for {LOST_SECONDS:.0f} seconds;"
                " see the error of the process that made this loader, and start the training again to continue"
            )


class _Window(NamedTuple):
    """Rows, and the shards they were made of; there are none if they were tokenized in this process."""

    rows: Rows
    num_documents: int
    shards: list[ShardInfo]


class _WindowTimes:
    """How long windows took; the time between two windows is that between their last shards."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._started = self._last = time.time()
        self._is_first = True
        self.has_waited = False

    def describe(self, window: _Window, waited: float) -> str:
        """Return one line on a window."""
        seconds, written = waited, time.time()
        if window.shards:
            written = max((self._store / f"{shard.name}.idx").stat().st_mtime for shard in window.shards)
            seconds, self._last = max(0.0, written - self._last), max(self._last, written)
        self.has_waited |= not self._is_first and waited > 2 * LOOK_SECONDS
        self._is_first = False
        milliseconds, count = seconds * 1e3, window.num_documents
        done = f"tokenized {count:,} documents in {milliseconds:,.0f} ms ({milliseconds / count:.3f} ms per document)"
        if written < self._started:
            done = f"read {count:,} documents from {self._store}"
        return f"{done}, training waited {waited * 1e3:,.0f} ms"


def _order(plan: Plan, settings: RowSettings) -> dict[str, int]:
    """Order tasks and streams as the inputs are, or by the seed."""
    names = sorted([*(task.name for task in plan.tasks), *(stream.name for stream in plan.streams)])
    if settings.shuffle:
        names.sort(key=lambda name: xxhash.xxh3_64_intdigest(name.encode(), make_key(settings.seed)))
    return {name: place for place, name in enumerate(names)}
