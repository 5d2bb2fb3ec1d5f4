"""The loader: rows to batches, in an order that depends only on the dataset and a row number.

Global batch b begins with row `b * batch_size * world_size`, and rank r takes the r-th slice of it. So a place in
training is one integer, which does not depend on the number of ranks, threads or workers. This loader makes numpy
arrays; those of the frameworks differ only in how they hand them over.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import MOST_ROWS, flag, one_of, show, whole_number
from tokenmill.dataset.rows import Integers, Rows, as_rows
from tokenmill.errors import StoreError, UsageError
from tokenmill.filling.batch import Batch
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import Chunk
from tokenmill.filling.layouts import FLAT_LAYOUTS, LAYOUTS, map_parts
from tokenmill.filling.row_layouts import own_layout
from tokenmill.loaders._disk import FIRST_ROWS, Disk
from tokenmill.loaders._extras import Extras, Others, take_extras
from tokenmill.loaders._prefetch import Prefetcher
from tokenmill.loaders._state import VERSION, check_state
from tokenmill.loaders._world import World, find_part
from tokenmill.loaders.deal import deal
from tokenmill.loaders.passes import Pass
from tokenmill.store.background_check import BackgroundCheck

__all__ = ["FRAMEWORKS", "BatchType", "Loader", "batch_dtype", "make_loader"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar, Unpack

    BatchType = TypeVar("BatchType", default=Any)
else:
    from typing import TypeVar

    BatchType = TypeVar("BatchType")

FRAMEWORKS = {
    "numpy": ("tokenmill.loaders.base", "Loader"),
    "torch": ("tokenmill.loaders.torch", "TorchLoader"),
    "jax": ("tokenmill.loaders.jax", "JaxLoader"),
    "grain": ("tokenmill.loaders.grain", "GrainLoader"),
    "tf": ("tokenmill.loaders.tf", "TfLoader"),
}

MOST_ROWS_OF_BATCH = 1 << 30
CHUNK_BYTES = 1 << 22
"""Small batches are filled several at a time, as many as fit the CPU cache."""
RESOLVED_ROWS = 8192
"""Rows that are resolved together: 30 ns each, against 9,000 for eight at a time."""
RESOLVED_TOKENS = 1 << 25
"""Fewer rows if they are long, because these have many documents."""
CHUNKS_AHEAD = 4


class Loader(Generic[BatchType]):
    """Batches of a dataset, endless unless `epochs` is given.

    Iterating resumes after the last batch that was handed over, and ends after `epochs`. Iterating again goes on with
    the next epochs, in their own order, also from a state that was taken at the end; `seek(0)` goes back. The last
    batch before an end is padded, or with `drop_last` left out.

    `batch_size` is rows per rank; `rank` and `world_size`, or `group`, say which rank this is (see `World`). With
    `document_mask`, targets do not cross documents. `layout` names the trainer for which batches are laid out (see
    `Extras` for more). `prefetch` fills that many chunks ahead in a thread, which hides latency and does not add speed.
    `verify="background"` compares files with their checksums in a thread. A batch owns its memory.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        layout: str = "xy",
        document_mask: bool = False,
        epochs: float | None = None,
        drop_last: bool = False,
        dtype: npt.DTypeLike = np.int64,
        prefetch: int = 0,
        verify: str | None = None,
        **others: Unpack[Others],
    ) -> None:
        self.rows = as_rows(rows, "Loader")
        self.batch_size = whole_number(batch_size, "batch_size", 1, MOST_ROWS_OF_BATCH)
        world: World = {}
        self._extras = Extras()
        if others:
            world, self._extras = take_extras(type(self).__name__, others)
        self.rank, self.world_size, self._share, self._is_balanced = 0, 1, None, False
        if world:
            self.rank, self.world_size, self._share, self._is_balanced = find_part(
                self.rows, document_mask, layout, world
            )
        self._width = self.rows.seq_len if self._share is None else self.rows.seq_len // self._share.size
        """Tokens of each row that this rank gets."""
        self._num_turns = 1
        """How many loaders take turns with global batches; each counts as `world_size` ranks of its own."""
        self.global_batch_size = self.batch_size * self.world_size
        """Rows of one step over all ranks."""
        is_packed = self.rows.layout is None
        self._layout = LAYOUTS[one_of(layout, LAYOUTS, "layout")] if is_packed else own_layout(self.rows, layout)
        if self._extras.fields:
            self._layout = self._extras.add_fields(self._layout, layout)
        self._is_plain, self._is_flat = layout == "xy" and is_packed, layout in FLAT_LAYOUTS and is_packed
        self._masks: Any = {**self._extras.masks, "document_mask": flag(document_mask, "document_mask")}
        if self._share is not None:
            self._masks["share"] = self._share
        if self._extras.masks.get("token_masks") and (self._share is not None or self.rows.align > 1):
            raise UsageError("token_masks look at whole rows, so they cannot be used with cp_size or align")
        self._prefetch = whole_number(prefetch, "prefetch", 0)
        self._epochs, self._drop_last = epochs, flag(drop_last, "drop_last")
        self._next_row = 0
        self._find_end(0)
        self._pool = BufferPool(batch_dtype(dtype))
        self._disk = Disk()
        self._check = None if verify is None else self._start_check(verify)
        self._has_ended = False
        self._generation = 0

    def _start_check(self, verify: str) -> BackgroundCheck:
        one_of(verify, ["background"], "verify")
        for leaf in self.rows.leaves():
            if not leaf.documents.table.files.have_checksums:
                raise UsageError(f"verify={verify!r} needs checksums, and {leaf.documents.name} has none; leave it out")
        return BackgroundCheck()

    def _watch_files(self) -> None:
        """Check the files of the rows from now on, in the current process, which may be a worker."""
        if self._check is not None:
            for leaf in self.rows.leaves():
                leaf.documents.table.files.watch(self._check)
            self._check_files()

    def _check_files(self) -> None:
        """Raise if a file that batches came from is damaged."""
        if self._check is not None and self._check.damage is not None:
            raise StoreError(self._check.damage)

    def _wait_for_check(self) -> None:
        """Wait until all files that were read are checked, and raise if one is damaged."""
        if self._check is not None:
            self._check.wait()
            self._check_files()

    def _look_at_files(self) -> None:
        """Raise if a mapped file was changed in place."""
        for leaf in self.rows.leaves():
            leaf.documents.table.files.look_again()

    def _find_end(self, row: int) -> None:
        """Find the pass of a row; where it ends is unknown while text is being tokenized."""
        self._is_end_known = self.rows.is_known
        if self._epochs is None and self._is_end_known and self.rows.num_rows < self.global_batch_size:
            raise UsageError(
                f"a batch of all ranks has {self.global_batch_size} rows, and there are {self.rows.num_rows}, so every "
                "batch would repeat some; choose a smaller batch_size or seq_len, or pass epochs to allow it"
            )
        self._pass = Pass.first(self.rows, self._epochs, self.global_batch_size, drop_last=self._drop_last)
        if row:
            self._pass = self._pass.find(row)

    @property
    def vocab_size(self) -> int | None:
        """How many token ids a model needs for these batches, or None if a store does not record it."""
        return self.rows.vocab_size

    @property
    def step(self) -> int:
        """The number of global batches that were handed over, at this batch size."""
        return self._pass.count_steps(self._next_row, self.global_batch_size)

    @property
    def bottleneck(self) -> str:
        """The work that a trainer waits for when it waits for this loader, and what to do about it."""
        if self.rows.bottleneck is not None:
            return self.rows.bottleneck
        work = "reading the disk" if self._disk.has_waited else "filling batches"
        if not self._prefetch:
            return f"{work}; pass prefetch=2"
        return f"{work}; {'move the store to a faster one' if self._disk.has_waited else 'leave it a free core'}"

    def __len__(self) -> int:
        """Steps of one iteration from its start, which has all `epochs`."""
        if self._pass.stop is None:
            if self._epochs is not None:
                raise TypeError("the number of steps is known only when all text is tokenized; count steps yourself")
            raise TypeError("an endless loader has no length; pass epochs, or count steps yourself")
        return self._num_left(self._pass.start)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch that was handed over, regardless of what was prefetched."""
        return {
            "version": VERSION,
            "fingerprint": self.rows.fingerprint,
            "next_row": self._next_row,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "dataset": self.rows.describe(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of this dataset, also one with another number of ranks or another batch size.

        After a state from the end of an iteration, iterating goes on with the next epochs.
        """
        self.seek(check_state(state, self.rows))

    # Grain's names.
    get_state, set_state = state_dict, load_state_dict

    def seek(self, row: int) -> None:
        """Continue with a row number, counted over all epochs and ranks: epoch n begins with `n * len(loader.rows)`.

        The next iteration ends where the one that hands over this row does.
        """
        row = whole_number(row, "row", 0, MOST_ROWS)
        self._pass = self._pass.find(row)
        self._next_row = row
        self._has_ended = self._num_left(row) == 0
        self._generation += 1

    def __iter__(self) -> Iterator[BatchType]:
        if self._has_ended:
            self._begin_next_pass()
        self._generation += 1
        return self._batches(self._generation)

    def _begin_next_pass(self) -> None:
        """Go on with the next epochs; if there are none, start over, and say so."""
        if self._pass.is_last and self.rank == 0:
            print(
                f"tokenmill: there are only {self._pass.stop:,} rows, so they come again, in the same order",
                file=sys.stderr,
            )
        self._pass = self._pass.following()
        self._next_row, self._has_ended = self._pass.start, False

    def _batches(self, generation: int) -> Iterator[BatchType]:
        """Yield batches one by one; moving the loader, or iterating over it again, invalidates this iterator."""
        chunks = self._chunks(self._next_row)
        if self._prefetch:
            chunks = Prefetcher(chunks, self._prefetch)
        size = self.global_batch_size
        for batches in chunks:
            # Keep no reference, so that a dropped batch returns its buffer while it is still in the CPU cache.
            batches.reverse()
            while batches:
                if self._generation != generation:
                    raise UsageError(
                        "the loader was moved, or iterated again, after this iterator began; use the new one"
                    )
                self._check_files()
                self._next_row += size
                if self._pass.end is not None and self._next_row >= self._pass.end:
                    self._next_row, self._has_ended = min(self._next_row, self._pass.stop or 0), True
                yield batches.pop()
        self._has_ended = True
        self._wait_for_check()

    def _chunks(self, row: int) -> Iterator[list[Any]]:
        """Yield lists of batches from a row on; if rows come from a disk or a bucket, read the next ones ahead."""
        self._watch_files()
        plan = self._plan(row)
        disk = self._disk = Disk()
        coming: deque[Chunk] = deque()
        while chunk := coming.popleft() if coming else next(plan, None):
            if self._is_end_known and (self.rows.is_remote or disk.is_slow):
                for following in itertools.islice(plan, CHUNKS_AHEAD - len(coming)):
                    following.will_need()
                    coming.append(following)
            batches = self._make_batches(chunk.fill(self._pool))
            self._check_files()
            self._look_at_files()
            disk.observe(chunk.stop - chunk.start)
            # Keep no reference to a filled chunk, or its memory could not be reused.
            del chunk
            yield batches
            del batches

    @property
    def _batch_bytes(self) -> int:
        """The memory of inputs and targets of a batch."""
        return 2 * self._pool.dtype.itemsize * self.batch_size * self._width

    def _plan(self, row: int) -> Iterator[Chunk]:
        """Yield the chunks from a row on, to be filled; the first ones are small, so that the first batch comes soon.

        The rows of several chunks are resolved together. Rows after the last epoch are blank.
        """
        batch_size, seq_len = self.batch_size, self.rows.seq_len
        most = max(1, CHUNK_BYTES // self._batch_bytes)
        num_batches = max(1, FIRST_ROWS // batch_size)
        per_chunk = 1
        while num_left := self._num_left(row):
            num_batches = min(num_batches, num_left)
            resolved = self._resolve(row, num_batches)
            for first in range(0, num_batches, per_chunk):
                yield resolved.cut(first * batch_size, min(first + per_chunk, num_batches) * batch_size)
            row += num_batches * self.global_batch_size
            per_chunk = min(most, 2 * per_chunk)
            most_rows = min(RESOLVED_ROWS, RESOLVED_TOKENS // seq_len)
            num_batches = max(per_chunk, min(2 * num_batches, most_rows // batch_size))

    def _resolve(self, row: int, num_batches: int, *, is_blank: bool = False) -> Chunk:
        """Resolve this rank's rows of some global batches, or make blank rows instead."""
        return self._resolve_rows(self._index(row, num_batches), 0 if is_blank else self._pass.stop)

    def _resolve_rows(self, index: Integers, limit: int | None) -> Chunk:
        return Chunk(self.rows, index, batch_size=self.batch_size, limit=limit, **self._masks)

    def _index(self, row: int, num_batches: int) -> Integers:
        """Return the numbers of this rank's rows in some global batches."""
        firsts = row + np.arange(num_batches) * self.global_batch_size + self.rank * self.batch_size
        if self._is_balanced:
            world_size = self.world_size // self._num_turns
            rank = self.rank % world_size
            sizes: Any = {"batch_size": self.batch_size, "rank": rank, "world_size": world_size}
            return deal(self.rows, firsts - rank * self.batch_size, limit=self._pass.stop, **sizes)
        index: Integers = (firsts[:, None] + np.arange(self.batch_size)).reshape(-1)
        return index

    def _num_left(self, row: int) -> int:
        """Count the batches that begin from a row on; while text is being tokenized, those whose rows exist."""
        if not self._is_end_known:
            num_ready = self.rows.wait_for(row + self.global_batch_size)
            if not self.rows.is_known:
                return (num_ready - row) // self.global_batch_size
            self._find_end(row)
        return self._pass.count_left(row, self.global_batch_size)

    def _make_batches(self, chunk: Chunk) -> list[Any]:
        """Return the batches of a chunk as the user gets them."""
        count = len(chunk.inputs)
        if self._is_plain:
            arrays = self._wrap_tokens([*chunk.inputs, *chunk.targets])
            return [Batch(arrays[number], arrays[count + number], chunk, number, self._wrap) for number in range(count)]
        batches = (Batch(chunk.inputs[number], chunk.targets[number], chunk, number) for number in range(count))
        return [map_parts(self._wrap, self._layout(batch), self._is_flat) for batch in batches]

    def _wrap_tokens(self, arrays: list[npt.NDArray[Any]]) -> Sequence[Any]:
        """Turn inputs and targets into arrays of the framework."""
        return [self._wrap(array) for array in arrays]

    @staticmethod  # so that a batch of numpy, which has this function, keeps no loader alive
    def _wrap(part: Any, is_ragged: bool = False) -> Any:
        """Turn a part of a batch into an array of the framework; a part that is not an array stays as it is."""
        return part

    def __repr__(self) -> str:
        shape = f"{self.batch_size} x {self._width}, rank {self.rank} of {self.world_size}"
        return f"{type(self).__name__}({shape}, at row {self._next_row:,})\n{self.rows!r}"


def make_loader(rows: Any, *, framework: str = "numpy", others: Iterable[str] = (), **settings: Any) -> Loader:
    """Make the loader of a framework.

    The error for an unknown setting lists the known ones: the keyword-only parameters of the loader's class and its
    parents, and `others`, those that the caller takes itself.
    """
    module, name = FRAMEWORKS[one_of(framework, FRAMEWORKS, "framework")]
    kind = getattr(import_module(module), name)
    known = {"batch_size", *Others.__annotations__, *others}
    for base in (*kind.__mro__, Loader):
        known.update(getattr(vars(base).get("__init__"), "__kwdefaults__", None) or ())
    unknown = next((name for name in settings if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{unknown!r} is no setting of framework {framework!r}; there are {', '.join(sorted(known))}")
    loader: Loader = kind(rows, **settings)
    return loader


def batch_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Check the type of batches, which must hold every id and -100."""
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError):
        raise UsageError(f"dtype {show(dtype)} is no type of numpy; expected int64 or int32") from None
    if dtype is None or kind not in (np.dtype(np.int64), np.dtype(np.int32)):
        name = dtype if dtype is None else kind
        raise UsageError(f"dtype {name} cannot hold every id and -100; expected int64 or int32")
    return kind
