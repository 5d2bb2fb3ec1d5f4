"""Worker processes that fill batches in memory which they share with the loader.

The loader decides everything: it tells a worker which rows to fill in which slot, takes the answers in the order of its
requests, and knows when a slot is free again. A request and its answer are a few bytes, so tokens are copied once,
from the store into the memory that the user gets. If the user keeps so many batches that slots run out, the loader
copies what comes next and frees its slot at once.

Workers ignore signals, and end when the loader's end of their pipe is closed or its process is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import struct
from collections import deque
from collections.abc import Sequence
from multiprocessing import util
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.rows import Rows
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import Chunk
from tokenmill.loaders._disk import Disk
from tokenmill.loaders._shared_slots import Bytes, SharedSlots
from tokenmill.loaders.base import CHUNKS_AHEAD, RESOLVED_ROWS, RESOLVED_TOKENS, Loader

__all__ = ["Workers"]

REQUEST = struct.Struct("<qqq")
"""Slot, first row and number of batches; no batches ask for the end of the background check."""
LOOK_MS = 2000
"""How often a process that waits looks whether the other one still runs."""
JOIN_SECONDS = 2.0
ALIGNMENT = 64
SPARE_SLOTS = 3
"""Slots beside two for each worker: for the batches that the user holds, and the chunk that comes next."""
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They reach a whole process group, and the trainer may want to save a checkpoint before it ends."""


class Workers:
    """The processes of one iteration over a loader, or of several; closed when it is gone, or at exit."""

    def __init__(self, rows: Rows, settings: dict[str, Any], count: int, slot_bytes: int) -> None:
        if multiprocessing.current_process().daemon:
            raise UsageError(
                "a daemon process of multiprocessing may not start worker processes; pass num_workers=0, or start the "
                "process with daemon=False"
            )
        self._slots = SharedSlots(2 * count + SPARE_SLOTS, slot_bytes)
        self._requests: deque[tuple[_Process, int]] = deque()
        self._number = 0
        self._processes: list[_Process] = []
        self._close = util.Finalize(self, _close, args=(self._processes,), exitpriority=10)
        try:
            for number in range(count):
                name = f"worker process {number + 1} of {count}"
                before = [process.connection for process in self._processes]
                self._processes.append(_Process(name, self._slots, rows, settings, before))
        except BaseException:
            self.close()
            raise
        finally:
            self._slots.close_descriptor()

    @property
    def is_waiting(self) -> bool:
        """Whether a request has not been answered."""
        return bool(self._requests)

    @property
    def has_room(self) -> bool:
        """Whether another request can be made before an answer is taken."""
        return len(self._requests) < 2 * len(self._processes) and self._slots.num_free > 0

    def ask(self, row: int, num_batches: int) -> None:
        """Ask the next worker to fill some batches from a row on."""
        slot = self._slots.choose()
        process = self._processes[self._number % len(self._processes)]
        self._number += 1
        self._requests.append((process, slot))
        process.send(slot, row, num_batches)

    def take(self) -> tuple[Bytes, Any]:
        """Wait for the first answer that was not taken: the memory of the batches, and how to find them there.

        The memory is a copy if the user keeps so many batches that too few slots are left.
        """
        slot, size, found = self._next_answer()
        if self._slots.num_free + len(self._requests) < len(self._processes):
            memory = self._slots.memory_of(slot)[:size].copy()
            self._slots.free(slot)
        else:
            memory = self._slots.lend(slot)[:size]
        if isinstance(found, BaseException):
            raise found
        return memory, found

    def forget(self) -> None:
        """Throw away the answers that were not taken."""
        while self._requests:
            slot, _, _ = self._next_answer()
            self._slots.free(slot)
        for process in self._processes:
            process.check()

    def _next_answer(self) -> tuple[int, int, Any]:
        process, slot = self._requests.popleft()
        return (slot, *process.receive())

    def wait_for_checks(self) -> None:
        """Wait until the files that the workers read are checked; raise if one is damaged."""
        for process in self._processes:
            process.send(0, 0, 0)
        for process in self._processes:
            _, found = process.receive()
            if found is not None:
                raise found

    def close(self) -> None:
        """End the processes."""
        self._close()


class _Process:
    """A worker as the loader sees it."""

    def __init__(
        self, name: str, slots: SharedSlots, rows: Rows, settings: dict[str, Any], before: list[Connection]
    ) -> None:
        self._name = name
        self.connection, theirs = Pipe()
        context = multiprocessing.get_context()
        # A forked process has the ends of all pipes so far, and would keep them open.
        inherited = [*before, self.connection] if context.get_start_method() == "fork" else []
        arguments = (theirs, inherited, slots, rows, settings)
        self.process = context.Process(target=_work, args=arguments, name=name, daemon=True)
        try:
            self.process.start()
        finally:
            theirs.close()
        self._poll = select.poll()
        self._poll.register(self.connection, select.POLLIN)

    def send(self, *request: int) -> None:
        """Send a request; a worker that has ended is noticed when its answer is awaited."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(REQUEST.pack(*request))

    def receive(self) -> tuple[int, Any]:
        """Wait for an answer: how many bytes of the slot are used, and what else the worker says."""
        try:
            while not self._poll.poll(LOOK_MS):
                if not self.process.is_alive():
                    raise EOFError
            answer: tuple[int, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._describe_end() from None
        return answer

    def check(self) -> None:
        """Raise if the process has ended."""
        if not self.process.is_alive():
            raise self._describe_end()

    def _describe_end(self) -> TokenmillError:
        self.process.join(JOIN_SECONDS)
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return TokenmillError(
            f"{self._name} (pid {self.process.pid}) {how} while it filled batches, perhaps because memory ran out; "
            "iterate again to continue after the last batch, with a smaller num_workers if it happens again"
        )


def _close(processes: list[_Process]) -> None:
    """Close the pipes, at which workers end, and wait for them."""
    for process in processes:
        process.connection.close()
    for process in processes:
        process.process.join(JOIN_SECONDS)
        if process.process.is_alive():
            process.process.kill()


def _work(
    connection: Connection, inherited: Sequence[Connection], slots: SharedSlots, rows: Rows, settings: dict[str, Any]
) -> None:
    """Do what a worker process does, until the loader is gone."""
    for kind in IGNORED_SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    for other in inherited:
        other.close()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _Filler(connection, slots, rows, settings).run()
    # At once: threads and libraries of the loader's process have nothing to finish here.
    os._exit(0)


class _Filler:
    """Fills slots in the order of the requests, and reads rows of later requests ahead if the disk is slow."""

    def __init__(self, connection: Connection, slots: SharedSlots, rows: Rows, settings: dict[str, Any]) -> None:
        self._connection, self._slots = connection, slots
        self._loader_process = os.getppid()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._rows, self._settings = rows, settings
        self._loader: Loader[Any] | None = None
        self._disk = Disk()
        self._coming: deque[tuple[int, Chunk | Exception | None]] = deque()
        self._foreseen: dict[tuple[int, int], Chunk] = {}
        self._last, self._stride = (0, 0), 0

    def run(self) -> None:
        """Answer requests until the loader closes the pipe."""
        while True:
            while not self._coming or (
                len(self._coming) <= CHUNKS_AHEAD and self._reads_ahead() and self._poll.poll(0)
            ):
                self._coming.append(self._receive())
            slot, chunk = self._coming.popleft()
            try:
                if isinstance(chunk, Exception):
                    raise chunk
                answer = pickle.dumps(self._fill(slot, chunk))
            except Exception as error:
                answer = _describe_error(error)
            self._connection.send_bytes(answer)

    def _reads_ahead(self) -> bool:
        return self._rows.is_remote or self._disk.is_slow

    def _receive(self) -> tuple[int, Chunk | Exception | None]:
        """Wait for a request, and locate its rows; None for the end of the background check."""
        while not self._poll.poll(LOOK_MS):
            if os.getppid() != self._loader_process:
                raise EOFError
        slot, row, num_batches = REQUEST.unpack(self._connection.recv_bytes())
        try:
            return slot, self._locate(row, num_batches) if num_batches else None
        except Exception as error:
            return slot, error

    def _locate(self, row: int, num_batches: int) -> Chunk:
        """Find the rows of some batches in the store."""
        if self._loader is None:
            self._loader = Loader(self._rows, **self._settings)
            self._loader._watch_files()
        chunk = self._foreseen.pop((row, num_batches), None)
        if chunk is None:
            count = self._foresee(row, num_batches)
            whole = self._resolve([row + number * self._stride for number in range(count)], num_batches)
            size = whole.stop // count
            for number in range(count):
                self._foreseen[row + number * self._stride, num_batches] = whole.cut(number * size, (number + 1) * size)
            chunk = self._foreseen.pop((row, num_batches))
        self._last = row, num_batches
        if self._reads_ahead():
            chunk.will_need()
        return chunk

    def _resolve(self, firsts: list[int], num_batches: int) -> Chunk:
        """Resolve the rows of batches that the loader is about to hand over."""
        loader = self._loader
        assert loader is not None
        loader._num_left(firsts[0] + (num_batches - 1) * loader.global_batch_size)  # wait for text to be tokenized
        if not (loader._pass.start <= firsts[0] and (loader._pass.end is None or firsts[0] < loader._pass.end)):
            loader._pass = loader._pass.find(firsts[0] + 1)
        index = np.concatenate([loader._index(first, num_batches) for first in firsts])
        return loader._resolve_rows(index, loader._pass.stop)

    def _foresee(self, row: int, num_batches: int) -> int:
        """Return for how many requests from this one on rows should be resolved together, which costs far less.

        Requests for chunks of full size follow each other at equal distances.
        """
        loader, stride = self._loader, row - self._last[0]
        is_steady = num_batches == self._last[1] and stride == self._stride > 0
        self._stride = stride
        self._foreseen.clear()
        assert loader is not None
        left = loader._num_left(row) if loader._is_end_known else 0
        if not is_steady or not left:
            return 1
        most = min(RESOLVED_ROWS, RESOLVED_TOKENS // loader.rows.seq_len) // (num_batches * loader.batch_size)
        return max(1, min(most, (left - num_batches) * loader.global_batch_size // stride + 1))

    def _fill(self, slot: int, chunk: Chunk | None) -> tuple[int, Any]:
        """Fill a slot; return how many bytes of it are used, and where the parts of batches in a layout are."""
        loader = self._loader
        if chunk is None:
            if loader is not None:
                loader._wait_for_check()
            return 0, None
        assert loader is not None
        memory = _SlotMemory(self._slots.memory_of(slot), loader._pool.dtype)
        chunk.fill(memory)
        loader._check_files()
        loader._look_at_files()
        self._disk.observe(chunk.stop - chunk.start)
        if loader._is_plain:
            return memory.num_used, None
        places: list[tuple[int, int]] = []
        batches = loader._make_batches(chunk)
        described = pickle.dumps(batches, 5, buffer_callback=lambda part: memory.place(part, places))
        return memory.num_used, (described, places)


class _SlotMemory(BufferPool):
    """A slot as a pool of memory for a chunk, and the place for the parts of batches in a layout."""

    def __init__(self, memory: Bytes, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype)
        self.num_used = 0
        self._memory = memory
        self._start = memory.ctypes.data

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return the first part of the slot as an array."""
        array: npt.NDArray[Any] = self._memory.view(self.dtype)[: int(np.prod(shape))].reshape(shape)
        self.num_used = array.nbytes
        return array

    def place(self, part: pickle.PickleBuffer, places: list[tuple[int, int]]) -> bool:
        """Put a buffer of a pickle into the slot, unless it is there; True if it does not fit and is sent."""
        if not part.raw().nbytes:
            return True
        raw = np.frombuffer(part.raw(), np.uint8)
        start = raw.ctypes.data - self._start
        if not 0 <= start <= self._memory.size - raw.size:
            start = -(-self.num_used // ALIGNMENT) * ALIGNMENT
            if start + raw.size > self._memory.size:
                return True
            self._memory[start : start + raw.size] = raw
            self.num_used = start + raw.size
        places.append((start, raw.size))
        return False


def _describe_error(error: Exception) -> bytes:
    """Return an error as an answer; one that cannot be sent becomes a sentence."""
    try:
        answer = pickle.dumps((0, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((0, TokenmillError(f"a worker process failed: {type(error).__name__}: {error}")))
    return answer
