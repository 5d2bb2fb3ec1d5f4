"""Batches as JAX arrays: on the default device, or as global arrays over a mesh.

The sharding of a global array, and not `process_index`, decides which rows of the global batch a process fills. So
the global batch has the same rows in the same order on any mesh. `device_put` copies an array of numpy or, on CPUs,
refers to it for as long as the JAX array lives. Both are safe, because memory is reused only when no array refers to
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import name_kind
from tokenmill.dataset.rows import Rows
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.filling.batch import Batch
from tokenmill.loaders._world import is_auto
from tokenmill.loaders.base import BatchType, Loader, batch_dtype

try:
    import jax
except ImportError:
    raise MissingDependencyError("framework='jax'", "jax") from None

__all__ = ["JaxBatch", "JaxLoader"]

JaxBatch = Batch[jax.Array]


class JaxLoader(Loader[BatchType]):
    """The loader with JAX arrays, by default of int32; int64 needs `jax_enable_x64`.

    With `sharding`, one for arrays (batch, seq_len), every such array is a global one of `batch_size * world_size`
    rows, and rank and world size follow from it. Parts that do not have one value for each token, such as
    `cu_seqlens`, stay local to the process.
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
            raise UsageError(f"dtype {kind} is truncated by JAX; pass dtype='int32', or set jax_enable_x64")
        share = None if sharding is None else _find_share(sharding)
        is_free = (rank is None or is_auto(rank)) and world_size is None and settings.get("group") is None
        if share is not None and is_free:
            rank, world_size = share
        super().__init__(rows, rank=rank, world_size=world_size, dtype=dtype, **settings)
        if sharding is not None and self._share is not None:
            raise UsageError(
                "a sharding and cp_size both divide batches among processes; leave the sharding out, and make global "
                "arrays of the parts with jax.make_array_from_process_local_data"
            )
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
            raise UsageError(f"batches of {self._global_shape} do not fit the sharding: {error}") from None

    def _wrap_tokens(self, arrays: list[npt.NDArray[Any]]) -> Sequence[Any]:
        if self._sharding is None:
            # One call for all arrays costs half as much as one call for each.
            wrapped: Sequence[Any] = jax.device_put(arrays)
            return wrapped
        return super()._wrap_tokens(arrays)

    def _wrap(self, part: Any, is_ragged: bool = False) -> Any:  # type: ignore[override]
        if not isinstance(part, np.ndarray):
            return part
        # Without x64, JAX has no int64, and would narrow the array itself with a warning.
        array = part.astype(jax.dtypes.canonicalize_dtype(part.dtype), copy=False)
        if self._sharding is None or is_ragged or array.ndim != 2:
            return jax.device_put(array)
        shape = (self.global_batch_size, array.shape[1])
        return jax.make_array_from_process_local_data(self._sharding, array, shape)  # type: ignore[no-untyped-call]


def _find_share(sharding: Any) -> tuple[int, int]:
    """Find which slice of the rows the devices of this process hold, and the number of different slices.

    Processes that hold the same rows, as in tensor parallelism, have the same slice.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        how = "pass jax.sharding.NamedSharding(mesh, PartitionSpec('data'))"
        raise UsageError(f"{name_kind(sharding)} is not a sharding; {how}")
    held = _held_rows(sharding)
    if jax.process_index() not in held:
        raise UsageError("the sharding has no device of this process; make its mesh of the devices of all processes")
    shares = sorted(set(held.values()))
    size = len(shares[0])
    if shares != [tuple(range(first, first + size)) for first in range(0, size * len(shares), size)]:
        raise UsageError(
            f"{sharding} does not give each process the same number of consecutive rows; "
            "order the devices of its mesh by process"
        )
    return shares.index(held[jax.process_index()]), len(shares)


def _held_rows(sharding: Any) -> dict[int, tuple[int, ...]]:
    """Find the rows that the devices of each process hold, of an array with as many rows as devices."""
    size = len(sharding.device_set)
    try:
        indices = sharding.devices_indices_map((size, size))
    except (IndexError, ValueError):
        raise UsageError(f"{sharding} is not a sharding for arrays of two dimensions, (batch, seq_len)") from None
    held: dict[int, set[int]] = {}
    for device, (rows, _) in indices.items():
        held.setdefault(device.process_index, set()).update(range(size)[rows])
    return {process: tuple(sorted(rows)) for process, rows in held.items()}
