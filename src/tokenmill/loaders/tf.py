"""Batches as TensorFlow tensors, one by one or as a `tf.data.Dataset`.

The dataset asks for batches by number: rows are random access, so filling the i-th chunk is a pure
function of i. Python is then called once for many batches, TensorFlow may ask ahead as it likes, and
its own checkpoints of an iterator resume exactly; a generator would allow none of that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.copying import RowBlock
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.loaders.base import Loader, Stretch
from tokenmill.loaders.batches import Batch, Chunk
from tokenmill.loaders.parts import map_parts

__all__ = ["TfLoader"]

CHUNK_TOKENS = 1 << 19
"""Tokens that are filled together. TensorFlow's checkpoints of its iterator count these chunks: never to be changed."""
ALIGNMENT = 64
"""TensorFlow ends the process when an operation meets memory that does not begin at a multiple of this."""
QUIET_SECONDS = 0.02
MOST_SECONDS_AT_EXIT = 10.0
CHATTER = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Show what is written to the standard error, but for what TensorFlow says about itself when it is imported.

    Its level of logging is read once, at import. The line about oneDNN ignores it, so all that is
    written meanwhile is held back, and then shown without such lines.
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


class _Calls:
    """Calls of Python by TensorFlow's threads, which must be over when the program ends.

    From then on a thread that wants to run Python is stopped for good, and TensorFlow waits for it for ever. So at the
    exit all calls are answered at once, with blank batches, until its buffers are full and it asks no more. Functions
    that were registered with `atexit` before this run later, and get blank batches too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = self._num_begun = 0
        self._is_ending = False
        atexit.register(self._let_end)

    @contextlib.contextmanager
    def running(self) -> Iterator[bool]:
        """Counts a call; tells whether the program is ending."""
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


class TfLoader(Loader):
    """The loader with tensors; `dataset` gives the same batches to `tf.data` and Keras."""

    def _deliver(self, chunk: Chunk) -> list[Any]:
        if not self._is_plain:
            return [map_parts(_wrap, batch) for batch in super()._deliver(chunk)]
        pairs = zip(map(_wrap, chunk.inputs), map(_wrap, chunk.targets), strict=True)
        return [Batch(x, y, chunk, number, _wrap) for number, (x, y) in enumerate(pairs)]

    def dataset(self) -> Any:
        """The batches from the loader's place on, as a `tf.data.Dataset` of pairs `x, y` or of what the layout has.

        It does not move the loader, because TensorFlow asks ahead. To resume, load a state before
        this is called, or keep the dataset's iterator in a `tf.train.Checkpoint`.
        """
        start = self._next_row if self._num_left(self._next_row) else 0
        if not self._is_settled and self._epochs is not None:
            raise UsageError("tf.data needs to know the number of batches; tokenize first, or leave epochs out")
        num_batches = self._num_left(start) if self._is_settled else 1 << 40
        specs = map_parts(self._spec, self._parts(self._chunk(start, 1)))
        # Layouts may have parts of another length in every batch, which cannot be stacked.
        can_join = self._is_plain and self._is_settled
        at_once = max(1, CHUNK_TOKENS // (self.batch_size * self.rows.seq_len)) if can_join else 1

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def fill(number: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
            with _CALLS.running() as is_ending:
                row = start + int(number) * at_once * self.global_batch_size
                chunk = self._blank_chunk(at_once) if is_ending else self._chunk(row, at_once)
                return [np.asarray(part) for part in tf.nest.flatten(self._parts(chunk))]

        made = tf.data.Dataset.range(-(-num_batches // at_once)).map(lambda number: _call(fill, number, specs))
        made = made.prefetch(self._prefetch) if self._prefetch else made
        made = made.unbatch() if self._is_plain else made
        length = tf.data.INFINITE_CARDINALITY if self._num_rows is None else num_batches
        return made.apply(tf.data.experimental.assert_cardinality(length))

    def _chunk(self, row: int, num_batches: int) -> Chunk:
        """Some batches from a row on, fewer at the end."""
        num_batches = min(num_batches, self._num_left(row))
        return self._fill(Stretch(self._block(row, num_batches), 0, num_batches))

    def _blank_chunk(self, num_batches: int) -> Chunk:
        """Batches without a token, for TensorFlow to keep when nobody will ask for them any more."""
        index = np.zeros(num_batches * self.batch_size, np.int64)
        block = RowBlock(self.rows, index, document_mask=self._document_mask, limit=0)
        return self._fill(Stretch(block, 0, num_batches))

    def _parts(self, chunk: Chunk) -> Any:
        """What TensorFlow gets of a chunk: all batches of it, or the only one as the layout has it."""
        if self._is_plain:
            return chunk.inputs, chunk.targets
        return _join_lists(self._layout(Batch(chunk.inputs[0], chunk.targets[0], chunk, 0)))

    def _spec(self, part: Any, is_ragged: bool) -> Any:
        """The type of a part, with the lengths that are the same in every batch."""
        array = np.asarray(part)
        whole = [] if is_ragged else [self.batch_size, self.rows.seq_len]
        return tf.TensorSpec([None] * (array.ndim - len(whole)) + whole, array.dtype)


def _wrap(part: Any, is_ragged: bool = False) -> Any:
    """A tensor in the memory of the batch, which then lives as long as it; a copy where TensorFlow cannot use that."""
    if not isinstance(part, np.ndarray):
        return part
    is_aligned = part.__array_interface__["data"][0] % ALIGNMENT == 0
    if is_aligned and part.size and part.flags.c_contiguous and part.flags.writeable:
        return tf.experimental.dlpack.from_dlpack(part.__dlpack__())
    return tf.convert_to_tensor(part)


def _call(fill: Any, number: Any, specs: Any) -> Any:
    """Let TensorFlow call a pure function of Python, and tell it what comes out."""
    flat = tf.nest.flatten(specs)
    parts = tf.numpy_function(fill, [number], [spec.dtype for spec in flat], stateful=False)
    for part, spec in zip(parts, flat, strict=True):
        part.set_shape(spec.shape)
    return tf.nest.pack_sequence_as(specs, parts)


def _join_lists(part: Any) -> Any:
    """Lists of numbers as arrays: to TensorFlow, a list is as many parts as it has items."""
    if isinstance(part, dict):
        return {name: _join_lists(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(_join_lists(value) for value in part)
    return np.asarray(part) if isinstance(part, list) else part
