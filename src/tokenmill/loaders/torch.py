"""Batches as PyTorch tensors, without a single computing torch operation.

Filling happens in numpy; torch only wraps the memory. One widening through torch's own thread pool
was seen to take 200 times longer on a busy machine, so the loader never uses it and never
changes the program's thread count. Worker processes make small batches 7 to 48 times dearer; they work, but
the default is none.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import flag, whole_number
from tokenmill.dataset.base import Rows, as_rows, row_number
from tokenmill.dataset.copying import RowBlock
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.loaders.base import Loader
from tokenmill.loaders.batches import Batch, Chunk
from tokenmill.loaders.buffers import BufferPool
from tokenmill.loaders.parts import map_parts

try:
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
except ImportError:
    raise MissingDependencyError("framework='torch'", "torch") from None

__all__ = ["TorchLoader", "TorchRows"]


class TorchLoader(Loader):
    """The loader with tensors; with `device`, they are copied there while the step before is still running.

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
        self._device = _find_device(device)
        self._num_workers = whole_number(num_workers, "num_workers", 0)
        self._persistent = flag(persistent_workers, "persistent_workers")
        self._workers: Any = None
        if self._device is not None and self._device.type == "cuda":
            self._pool = _PinnedPool(settings.get("dtype", np.int64))

    @property
    def bottleneck(self) -> str:
        """What steps wait for; of batches that come from processes, handing them over is most of the work."""
        if self._num_workers and self.rows.bottleneck is None:
            return f"{self._num_workers} worker processes; pass num_workers=0"
        return super().bottleneck

    def _deliver(self, chunk: Chunk) -> list[Any]:
        if self._is_plain:
            wrap = self._wrap
            return [
                Batch(wrap(chunk.inputs[number]), wrap(chunk.targets[number]), chunk, number, wrap)
                for number in range(chunk.num_batches)
            ]
        return [map_parts(self._wrap_part, batch) for batch in super()._deliver(chunk)]

    def _wrap_part(self, part: Any, _: bool) -> Any:
        """An array of a layout, or a tensor that a worker made of one."""
        if isinstance(part, torch.Tensor):
            part = part.numpy()
        return self._wrap(part) if isinstance(part, np.ndarray) else part

    def _wrap(self, array: npt.NDArray[Any]) -> Any:
        tensor = torch.from_numpy(array)
        if self._device is None or self._device.type == "cpu":
            return tensor
        if not isinstance(self._pool, _PinnedPool):
            return tensor.to(self._device)
        with torch.cuda.device(self._device):
            moved = tensor.to(self._device, non_blocking=True)
            self._pool.hold(array)
        return moved

    def _chunks(self, row: int) -> Iterator[list[Any]]:
        return self._from_workers(row) if self._num_workers else super()._chunks(row)

    def _from_workers(self, row: int) -> Iterator[list[Any]]:
        """Batches of worker processes, which take turns; each is a chunk of its own."""
        if self._workers is None or not self._persistent:
            self._workers = DataLoader(
                _WorkerBatches(self),
                batch_size=None,
                num_workers=self._num_workers,
                persistent_workers=self._persistent,
                collate_fn=_as_it_is,
            )
        self._workers.dataset.start.fill_(row)
        batches = iter(self._workers)
        while self._num_left(row):
            batch = next(batches)
            if self._is_plain:
                both = np.stack([part.numpy()[None] for part in batch])
                yield self._deliver(Chunk(both, self._block(row, 1), 0))
            else:
                yield [map_parts(self._wrap_part, batch)]
            row += self.global_batch_size


class _WorkerBatches(IterableDataset[Any]):
    """What worker w of n makes, every n-th batch: the share of rank `w * world_size + rank` of n times the ranks."""

    def __init__(self, loader: TorchLoader) -> None:
        self._rows = loader.rows
        self._settings = {**loader._settings, "prefetch": 0, "group": None, "drop_last": False}
        self._rank, self._world_size = loader.rank, loader.world_size
        # Shared with workers that are kept from one iteration to the next.
        self.start = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        rank, world_size = number * self._world_size + self._rank, count * self._world_size
        loader = TorchLoader(self._rows, **{**self._settings, "rank": rank, "world_size": world_size})
        for batch in itertools.chain.from_iterable(loader._chunks(int(self.start.item()))):
            yield (batch.inputs, batch.targets) if isinstance(batch, Batch) else batch


def _find_device(device: Any) -> Any:
    """The device by name and number: what is current may be another one in a thread."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {device!r} is unknown to torch: {str(error).splitlines()[0]}") from None
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        found = torch.device("cuda", torch.cuda.current_device())
    try:
        torch.empty(0, device=found)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"device {device!r} is not here: {str(error).partition(chr(10))[0]}") from None
    return found


def _as_it_is(batch: Any) -> Any:
    return batch


class _PinnedPool(BufferPool):
    """Page-locked memory, which a device can copy from by itself; held until it has done so."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        super().__init__(dtype)
        self._busy: list[tuple[Any, npt.NDArray[Any]]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """An array of pinned memory."""
        with self._lock:
            self._busy = [(event, array) for event, array in self._busy if not event.query()]
        return super().take(shape)

    def _allocate(self, size: int) -> npt.NDArray[Any]:
        kind = torch.int64 if self.dtype == np.int64 else torch.int32
        block: npt.NDArray[Any] = torch.empty(size, dtype=kind, pin_memory=True).numpy()
        return block

    def hold(self, array: npt.NDArray[Any]) -> None:
        """Keep an array until the copies that were started before now are done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        with self._lock:
            self._busy.append((event, array))


class TorchRows(Dataset[Any]):
    """Rows as a map-style data set, for `torch.utils.data.DataLoader` and its samplers.

    `DataLoader` asks for whole batches through `__getitems__`, which makes one fill of them; pass `collate_fn`
    of this object. Order, ranks and resuming are then the sampler's business.
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
        """Inputs and targets of several rows, filled together."""
        index = np.asarray(indices)
        if index.dtype.kind != "i" or not 0 <= index.min(initial=0) <= index.max(initial=0) < len(self.rows):
            index = np.array([row_number(index, len(self.rows)) for index in indices], np.int64)
        inputs = np.empty((len(index), self.rows.seq_len), np.int64)
        targets = np.empty_like(inputs)
        RowBlock(self.rows, index, document_mask=self._document_mask).copy(0, len(index), inputs, targets)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    @staticmethod
    def collate_fn(batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """The batch is made already."""
        return batch
