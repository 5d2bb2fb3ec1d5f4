"""Batches as PyTorch tensors, without running any torch kernel.

numpy fills batches, and torch only wraps their memory. One cast through torch's own thread pool took 200 times longer
on a busy machine, so the loader never uses it and never changes the program's thread count. Worker processes make
small batches 7 to 48 times more expensive; they work, but the default is none.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import flag, whole_number
from tokenmill.dataset.rows import Rows, as_rows, row_number
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.filling.batch import Batch
from tokenmill.filling.buffers import BufferPool
from tokenmill.filling.fill import Chunk
from tokenmill.filling.layouts import map_parts
from tokenmill.loaders.base import BatchType, Loader

try:
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
except ImportError:
    raise MissingDependencyError("framework='torch'", "torch") from None

__all__ = ["TorchBatch", "TorchLoader", "TorchRows"]

TorchBatch = Batch[torch.Tensor]


class TorchLoader(Loader[BatchType]):
    """The loader with tensors; with `device`, they are copied there while the previous step is still running.

    `num_workers` fills batches in processes of `torch.utils.data.DataLoader`, in the same order.
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
        self._workers: Any = None
        if self._device is not None and self._device.type == "cuda":
            self._pool = _PinnedPool(settings.get("dtype", np.int64))

    @property
    def bottleneck(self) -> str:
        """What a trainer waits for; with worker processes, sending batches is most of the work."""
        if self._num_workers and self.rows.bottleneck is None:
            return f"{self._num_workers} worker processes; pass num_workers=0"
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
        """Yield the batches of worker processes, which take turns; each is a chunk of its own."""
        if self._workers is None or not self._persistent:
            self._workers = DataLoader(
                _WorkerBatches(self),
                batch_size=None,
                num_workers=self._num_workers,
                persistent_workers=self._persistent,
                collate_fn=TorchRows.collate_fn,
            )
        self._workers.dataset.start.fill_(row)
        batches = iter(self._workers)
        while self._num_left(row):
            batch = next(batches)
            if self._is_plain:
                chunk = self._resolve(row, 1)
                # Copy, so that a batch that the user keeps does not hold the shared memory of the workers.
                chunk.inputs, chunk.targets = np.stack([part.numpy()[None] for part in batch])
                yield self._make_batches(chunk)
            else:
                yield [map_parts(self._wrap, batch)]
            row += self.global_batch_size


class _WorkerBatches(IterableDataset[Any]):
    """Every n-th batch, made by worker w of n: those of rank `w * world_size + rank` among n times as many ranks."""

    def __init__(self, loader: TorchLoader[Any]) -> None:
        self._rows = loader.rows
        self._settings = {**loader._settings, "prefetch": 0, "group": None, "drop_last": False}
        self._rank, self._world_size = loader.rank, loader.world_size
        # Shared memory, because persistent workers get no other message between two iterations.
        self.start = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        rank, world_size = number * self._world_size + self._rank, count * self._world_size
        loader = TorchLoader(self._rows, **{**self._settings, "rank": rank, "world_size": world_size})
        loader._num_turns = count
        for batch in itertools.chain.from_iterable(loader._chunks(int(self.start.item()))):
            yield (batch.inputs, batch.targets) if isinstance(batch, Batch) else batch


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
