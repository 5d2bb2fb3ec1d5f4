"""Batches as TensorFlow tensors, one by one or as a `tf.data.Dataset`.

The dataset asks for chunks by number: rows are random access, so filling chunk i is a pure function of i. So Python is
called once for many batches, TensorFlow may prefetch, and its own checkpoints of an iterator resume exactly. A
generator would allow none of that.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Rows
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.filling.batch import Batch
from tokenmill.filling.fill import Chunk
from tokenmill.filling.layouts import map_parts
from tokenmill.loaders.base import BatchType, Loader

__all__ = ["TfBatch", "TfLoader"]

CHUNK_TOKENS = 1 << 19
"""Tokens that are filled together. TensorFlow's checkpoints of its iterator count these chunks: never change it."""
ALIGNMENT = 64
"""TensorFlow aborts the process when an operation gets memory that is not aligned to this."""
QUIET_SECONDS = 0.02
MOST_SECONDS_AT_EXIT = 10.0
CHATTER = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Hide the lines that TensorFlow writes to stderr when it is imported, and no others.

    TensorFlow reads its log level once, at import, and its line about oneDNN ignores it. So all output to stderr is
    held back during the import, and shown afterwards without these lines.
    """
    if "tensorflow" in sys.modules:
        yield
        return
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    shown = os.dup(2)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            held.seek(0)
            os.write(2, b"".join(line for line in held if not line.startswith(CHATTER)))
            if level is None:
                del os.environ["TF_CPP_MIN_LOG_LEVEL"]


try:
    with _without_chatter():
        import tensorflow as tf  # type: ignore[import-untyped]
except ImportError:
    raise MissingDependencyError("framework='tf'", "tf") from None


TfBatch = Batch[tf.Tensor]


class _Calls:
    """Calls of Python by TensorFlow's threads, which must have returned before the interpreter exits.

    At exit the interpreter blocks every thread that wants to run Python, and TensorFlow would wait for such a thread
    forever. So an `atexit` function answers all calls at once with blank batches, until TensorFlow's buffers are full
    and it stops asking. Functions that were registered with `atexit` earlier run later, and get blank batches too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = self._num_begun = 0
        self._is_ending = False
        atexit.register(self._let_end)

    @contextlib.contextmanager
    def running(self) -> Iterator[bool]:
        """Count a call, and yield whether the program is ending."""
        with self._lock:
            self._num_running += 1
            self._num_begun += 1
        try:
            yield self._is_ending
        finally:
            with self._lock:
                self._num_running -= 1

    def _let_end(self) -> None:
        self._is_ending = True
        seen, deadline = 0, time.monotonic() + MOST_SECONDS_AT_EXIT
        while (self._num_running or self._num_begun != seen) and time.monotonic() < deadline:
            seen = self._num_begun
            time.sleep(QUIET_SECONDS)


_CALLS = _Calls()


def _wrap(part: Any, is_ragged: bool = False) -> Any:
    """Make a tensor that shares the memory of the batch, or a copy if TensorFlow cannot use that memory."""
    if not isinstance(part, np.ndarray):
        return part
    is_aligned = part.__array_interface__["data"][0] % ALIGNMENT == 0
    if is_aligned and part.size and part.flags.c_contiguous and part.flags.writeable:
        return tf.experimental.dlpack.from_dlpack(part.__dlpack__())
    return tf.convert_to_tensor(part)


class TfLoader(Loader[BatchType]):
    """The loader with tensors; `dataset` gives the same batches to `tf.data` and Keras."""

    _wrap = staticmethod(_wrap)

    def __init__(self, rows: Rows, **settings: Any) -> None:
        super().__init__(rows, **settings)
        if rows.layout is not None:
            raise UsageError(f"framework='tf' has no batches of {rows.layout}; use numpy, torch or jax")

    def dataset(self) -> Any:
        """Return the batches from the loader's place on, as a `tf.data.Dataset` of pairs `x, y` or of layout batches.

        It does not move the loader, because TensorFlow prefetches. To resume, load a state before calling this, or
        keep the dataset's iterator in a `tf.train.Checkpoint`. After the end of an iteration over the loader, these
        are the batches of the next one.
        """
        if self._is_plain and self._extras.fields:
            names = ", ".join(self._extras.fields)
            raise UsageError(f"tf.data gets pairs x, y, without the fields {names}; choose a layout")
        if not self._num_left(self._next_row):
            self._begin_next_pass()
        start = self._next_row
        if not self._is_end_known and self._epochs is not None:
            raise UsageError("tf.data needs to know the number of batches; tokenize first, or leave epochs out")
        num_batches = self._num_left(start) if self._is_end_known else 1 << 40
        fixed = copy.copy(self)  # it stays in these epochs when the loader goes on
        specs = map_parts(self._spec, self._parts(self._chunk(start, 1)), self._is_flat)
        # Parts of a layout may have another length in every batch, and then cannot be stacked.
        can_join = self._is_plain and self._is_end_known
        at_once = max(1, CHUNK_TOKENS // (self.batch_size * self.rows.seq_len)) if can_join else 1

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def fill(number: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
            with _CALLS.running() as is_ending:
                row = start + int(number) * at_once * self.global_batch_size
                chunk = fixed._chunk(row, at_once, is_blank=is_ending)
                return [np.asarray(part) for part in tf.nest.flatten(self._parts(chunk))]

        made = tf.data.Dataset.range(-(-num_batches // at_once)).map(lambda number: _call(fill, number, specs))
        made = made.prefetch(self._prefetch) if self._prefetch else made
        made = made.unbatch() if self._is_plain else made
        length = tf.data.INFINITE_CARDINALITY if self._pass.stop is None else num_batches
        return made.apply(tf.data.experimental.assert_cardinality(length))

    def _chunk(self, row: int, num_batches: int, *, is_blank: bool = False) -> Chunk:
        """Fill some batches from a row on, fewer at the end, or blank ones that will not be used."""
        self._watch_files()
        self._look_at_files()
        count = num_batches if is_blank else min(num_batches, self._num_left(row))
        return self._resolve(row, count, is_blank=is_blank).fill(self._pool)

    def _parts(self, chunk: Chunk) -> Any:
        """Return what TensorFlow receives for a chunk: all its batches stacked, or its only batch in the layout."""
        if self._is_plain:
            return chunk.inputs, chunk.targets
        arranged = self._layout(Batch(chunk.inputs[0], chunk.targets[0], chunk, 0))
        # TensorFlow would treat each item of a list as a separate part.
        return map_parts(lambda part, _: np.asarray(part), arranged)

    def _spec(self, part: Any, is_ragged: bool) -> Any:
        """Return the type of a part, with the lengths that are equal in every batch."""
        array = np.asarray(part)
        whole = [] if is_ragged else [self.batch_size, self._width]
        return tf.TensorSpec([None] * (array.ndim - len(whole)) + whole, array.dtype)


def _call(fill: Any, number: Any, specs: Any) -> Any:
    """Let TensorFlow call a pure Python function, and declare the types of its results."""
    flat = tf.nest.flatten(specs)
    parts = tf.numpy_function(fill, [number], [spec.dtype for spec in flat], stateful=False)
    for part, spec in zip(parts, flat, strict=True):
        part.set_shape(spec.shape)
    return tf.nest.pack_sequence_as(specs, parts)
