"""Batches as PyTorch tensors, without running any torch kernel.

numpy fills batches, and torch only wraps their memory. One cast through torch's own thread pool took 200 times longer
on a busy machine, so the loader never uses it and never changes the program's thread count. Worker processes fill
memory that they share with the loader (`_workers.py`). The default is none: one process fills faster than any step.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import flag, whole_number
from tokenmill.dataset.rows import Rows, as_rows, row_number
from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError
from tokenmill.filling.batch import Batch
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import Chunk, FilledChunk
from tokenmill.filling.layouts import map_parts
from tokenmill.loaders._workers import Workers
from tokenmill.loaders.base import CHUNK_BYTES, BatchType, Loader

try:
    import torch
    from torch.utils.data import Dataset
except ImportError:
    raise MissingDependencyError("framework='torch'", "torch") from None

__all__ = ["TorchBatch", "TorchLoader", "TorchRows"]

TorchBatch = Batch[torch.Tensor]

LAYOUT_SIZE = 4
"""Room for the batches of a layout, in those of plain ones; what does not fit is sent through a pipe."""


class TorchLoader(Loader[BatchType]):
    """The loader with tensors; with `device`, they are copied there while the previous step is still running.

    `num_workers` processes fill batches, in the same order; `persistent_workers` stay for the next iteration.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        device: Any = None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(rows, **settings)
        self._settings = settings
        self._device = None if device is None else _find_device(device)
        self._num_workers = whole_number(num_workers, "num_workers", 0)
        self._persistent = flag(persistent_workers, "persistent_workers")
        self._workers: Workers | None = None
        if self._device is not None and self._device.type == "cuda":
            self._pool = _PinnedPool(settings.get("dtype", np.int64))

    @property
    def bottleneck(self) -> str:
        """What a trainer waits for; worker processes need free cores, and one process without them may be enough."""
        if self._num_workers and self.rows.bottleneck is None:
            return f"{self._num_workers} worker processes; leave each a free core, or pass num_workers=0"
        return super().bottleneck

    def _wrap(self, part: Any, is_ragged: bool = False) -> Any:  # type: ignore[override]
        tensor = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        if self._device is None or self._device.type == "cpu" or not isinstance(tensor, torch.Tensor):
            return tensor
        if not isinstance(self._pool, _PinnedPool):
            return tensor.to(self._device)
        with torch.cuda.device(self._device):
            moved = tensor.to(self._device, non_blocking=True)
            self._pool.hold(tensor)
        return moved

    def _chunks(self, row: int) -> Iterator[list[Any]]:
        return self._from_workers(row) if self._num_workers else super()._chunks(row)

    def _from_workers(self, row: int) -> Iterator[list[Any]]:
        """Yield lists of batches that worker processes have filled, each a chunk of its own."""
        workers = self._get_workers()
        shares, asked = self._shares(row), deque[tuple[int, int]]()
        try:
            while True:
                # While text is being tokenized, looking further ahead would wait for it.
                while workers.has_room and (self._is_end_known or not asked):
                    share = next(shares, None)
                    if share is None:
                        break
                    workers.ask(*share)
                    asked.append(share)
                if not asked:
                    break
                yield self._unpack(*workers.take(), *asked.popleft())
            if self._check is not None:
                workers.wait_for_checks()
        except GeneratorExit:
            self._keep_or_close(workers)
            raise
        except BaseException:
            workers.close()
            raise
        self._keep_or_close(workers)

    def _shares(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield the first row and the number of batches of each chunk from a row on; the first ones are small."""
        most, num_batches = max(1, CHUNK_BYTES // self._batch_bytes), 1
        while num_left := self._num_left(row):
            num_batches = min(num_batches, num_left)
            yield row, num_batches
            row += num_batches * self.global_batch_size
            num_batches = min(most, 2 * num_batches)

    def _get_workers(self) -> Workers:
        """Return the workers of the last iteration if they are there and well, or new ones."""
        workers, self._workers = self._workers, None
        if workers is not None:
            try:
                workers.forget()
            except TokenmillError:
                workers.close()
            else:
                return workers
        settings = {**self._settings, "prefetch": 0, "group": None, "drop_last": False}
        settings |= {"rank": self.rank, "world_size": self.world_size}
        slot_bytes = max(CHUNK_BYTES, self._batch_bytes) * (1 if self._is_plain else LAYOUT_SIZE)
        return Workers(self.rows, settings, self._num_workers, slot_bytes)

    def _keep_or_close(self, workers: Workers) -> None:
        if self._persistent and self._workers is None:
            self._workers = workers
        else:
            workers.close()

    def _unpack(self, memory: npt.NDArray[np.uint8], described: Any, row: int, num_batches: int) -> list[Any]:
        """Turn what a worker has filled into batches."""
        if described is not None:
            data, places = described
            parts = [memory[start : start + size] for start, size in places]
            return [map_parts(self._wrap, batch, self._is_flat) for batch in pickle.loads(data, buffers=parts)]
        shape = (2, num_batches, self.batch_size, self._width)
        arrays = memory.view(self._pool.dtype).reshape(shape)
        if isinstance(self._pool, _PinnedPool):
            pinned = self._pool.take(shape)
            np.copyto(pinned, arrays)
            arrays = pinned
        resolve = partial(self._resolve_rows, self._index(row, num_batches), self._pass.stop)
        return self._make_batches(FilledChunk(resolve, *arrays))


def _find_device(device: Any) -> Any:
    """Return the device with its number, because another one may be current in another thread."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {device!r} is unknown to torch: {str(error).splitlines()[0]}") from None
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        found = torch.device("cuda", torch.cuda.current_device())
    try:
        torch.empty(0, device=found)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"device {device!r} is not available: {str(error).partition(chr(10))[0]}") from None
    return found


class _PinnedPool(BufferPool):
    """Page-locked memory, from which a device copies asynchronously; it is held until the copy is done."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        super().__init__(dtype)
        self._busy: list[tuple[Any, torch.Tensor]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return an array of pinned memory."""
        with self._lock:
            self._busy = [(event, tensor) for event, tensor in self._busy if not event.query()]
        return super().take(shape)

    def _allocate(self, size: int) -> npt.NDArray[Any]:
        kind = torch.int64 if self.dtype == np.int64 else torch.int32
        block: npt.NDArray[Any] = torch.empty(size, dtype=kind, pin_memory=True).numpy()
        return block

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor, and so its memory, until the copies that have been started are done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        with self._lock:
            self._busy.append((event, tensor))


class TorchRows(Dataset[Any]):
    """Rows as a map-style data set, for `torch.utils.data.DataLoader` and its samplers.

    `DataLoader` asks for whole batches through `__getitems__`, which fills them at once; pass `collate_fn` of this
    object. The sampler then decides order, ranks and resuming.
    """

    def __init__(self, rows: Rows, *, document_mask: bool = False) -> None:
        self.rows = as_rows(rows, "TorchRows")
        self._document_mask = flag(document_mask, "document_mask")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and targets of several rows, filled together."""
        index = np.asarray(indices)
        if index.dtype.kind != "i" or not 0 <= index.min(initial=0) <= index.max(initial=0) < len(self.rows):
            index = np.array([row_number(index, len(self.rows)) for index in indices], np.int64)
        inputs = np.empty((len(index), self.rows.seq_len), np.int64)
        targets = np.empty_like(inputs)
        Chunk(self.rows, index, document_mask=self._document_mask).copy(inputs, targets)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch, which `__getitems__` has made already."""
        return batch
