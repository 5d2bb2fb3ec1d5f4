"""Batches as JAX arrays: on the default device, or as global arrays over a mesh.

A global array has its rows where its sharding says, whatever the numbers of the processes are. So the
slice of the global batch that a process fills is read off the sharding, and not off `process_index`:
the global batch then has the same rows in the same order on any mesh. Arrays of numpy are handed to
`device_put`, which copies them or, on CPUs, refers to them for as long as the JAX array lives; both are
safe with memory that is used again only when nobody refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import name_kind
from tokenmill.dataset.base import Rows
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.loaders.base import Loader, batch_dtype
from tokenmill.loaders.batches import Batch, Chunk
from tokenmill.loaders.parts import map_parts
from tokenmill.loaders.ranks import is_auto

try:
    import jax
except ImportError:
    raise MissingDependencyError("framework='jax'", "jax") from None

__all__ = ["JaxLoader"]


class JaxLoader(Loader):
    """The loader with JAX arrays, of int32 unless told; int64 needs `jax_enable_x64`.

    With `sharding`, one for arrays (batch, seq_len), every such array is a global one of
    `batch_size * world_size` rows; rank and world size follow from it. What has no value for each
    token, such as `cu_seqlens`, stays that of the process.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        sharding: Any = None,
        rank: int | str | None = None,
        world_size: int | None = None,
        dtype: npt.DTypeLike = np.int32,
        **settings: Any,
    ) -> None:
        kind = batch_dtype(dtype)
        if jax.dtypes.canonicalize_dtype(kind) != kind:
            raise UsageError(f"dtype {kind} is cut by JAX; pass dtype='int32', or set jax_enable_x64")
        share = None if sharding is None else _find_share(sharding)
        is_free = (rank is None or is_auto(rank)) and world_size is None and settings.get("group") is None
        if share is not None and is_free:
            rank, world_size = share
        super().__init__(rows, rank=rank, world_size=world_size, dtype=dtype, **settings)
        self._sharding = sharding
        self._global_shape = (self.global_batch_size, rows.seq_len)
        if share is not None:
            self._check_sharding(share)

    def _check_sharding(self, share: tuple[int, int]) -> None:
        if (self.rank, self.world_size) != share:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} does not fit the sharding, which gives this process "
                f"slice {share[0]} of {share[1]}; leave rank and world_size out"
            )
        try:
            self._sharding.shard_shape(self._global_shape)
        except ValueError as error:
            raise UsageError(f"batches of {self._global_shape} cannot be sharded so: {error}") from None

    def _deliver(self, chunk: Chunk) -> list[Any]:
        if not self._is_plain:
            return [map_parts(self._wrap_part, batch) for batch in super()._deliver(chunk)]
        arrays = self._wrap_all([*chunk.inputs, *chunk.targets])
        pairs = zip(arrays[: chunk.num_batches], arrays[chunk.num_batches :], strict=True)
        return [Batch(x, y, chunk, number, self._wrap) for number, (x, y) in enumerate(pairs)]

    def _wrap_all(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[Any]:
        """Arrays of tokens; one call for all of them costs half of one call for each."""
        if self._sharding is None:
            wrapped: Sequence[Any] = jax.device_put(arrays)
            return wrapped
        return [self._wrap(array) for array in arrays]

    def _wrap(self, array: npt.NDArray[Any], is_ragged: bool = False) -> Any:
        # Without x64, JAX has no int64: narrow it here, where it is said, and not there, with a warning.
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        if self._sharding is None or is_ragged or array.ndim != 2:
            return jax.device_put(array)
        return jax.make_array_from_process_local_data(self._sharding, array, self._global_shape)  # type: ignore[no-untyped-call]

    def _wrap_part(self, part: Any, is_ragged: bool) -> Any:
        return self._wrap(part, is_ragged) if isinstance(part, np.ndarray) else part


def _find_share(sharding: Any) -> tuple[int, int]:
    """Which slice of the rows the devices of this process hold, and how many different slices there are.

    Processes that hold the same rows, as those of tensor parallelism do, have the same slice.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        how = "pass jax.sharding.NamedSharding(mesh, PartitionSpec('data'))"
        raise UsageError(f"{name_kind(sharding)} is no sharding; {how}")
    held = _held_rows(sharding)
    if jax.process_index() not in held:
        raise UsageError("the sharding has no device of this process; make its mesh of the devices of all processes")
    shares = sorted(set(held.values()))
    size = len(shares[0])
    if shares != [tuple(range(first, first + size)) for first in range(0, size * len(shares), size)]:
        raise UsageError(
            f"{sharding} does not give each process an equal number of rows that follow each other; "
            "order the devices of its mesh by process"
        )
    return shares.index(held[jax.process_index()]), len(shares)


def _held_rows(sharding: Any) -> dict[int, tuple[int, ...]]:
    """The rows that the devices of each process hold, of an array that has as many rows as there are devices."""
    size = len(sharding.device_set)
    try:
        indices = sharding.devices_indices_map((size, size))
    except (IndexError, ValueError):
        raise UsageError(f"{sharding} is no sharding for arrays of two dimensions, (batch, seq_len)") from None
    held: dict[int, set[int]] = {}
    for device, (rows, _) in indices.items():
        held.setdefault(device.process_index, set()).update(range(size)[rows])
    return {process: tuple(sorted(rows)) for process, rows in held.items()}
