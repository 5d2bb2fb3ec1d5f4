"""Which share of every batch a process takes: its data-parallel rank, found where the trainer keeps it.

Peers of tensor or pipeline parallelism need equal batches, so what counts is the data-parallel group
or one dimension of the device mesh, not the number of the process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tokenmill.errors import UsageError

__all__ = ["find_rank"]

ENVIRONMENTS = {
    "RANK": "WORLD_SIZE",
    "SLURM_PROCID": "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
}


def find_rank(rank: int | str | None, world_size: int | None, group: Any = None) -> tuple[int, int]:
    """Rank and world size as given; from a process group or mesh; or, with `rank="auto"`, from the surroundings."""
    if group is not None:
        found = _from_group(group)
    elif rank == "auto":
        found = _from_surroundings()
    elif rank is None and world_size not in (None, 1):
        raise UsageError(f"world_size {world_size} needs a rank; pass one, or rank='auto'")
    else:
        found = (0 if rank is None else rank, 1 if world_size is None else world_size)  # type: ignore[assignment]
    number, size = found
    if not isinstance(number, int) or not isinstance(size, int) or not 0 <= number < size:
        raise UsageError(f"rank {number!r} of world_size {size!r} is impossible; expected 0 <= rank < world_size")
    return number, size


def _from_group(group: Any) -> tuple[int, int]:
    """A torch DeviceMesh of one dimension, or a process group."""
    if hasattr(group, "get_local_rank"):
        if getattr(group, "ndim", 1) != 1:
            names = getattr(group, "mesh_dim_names", None)
            raise UsageError(f"the mesh has several dimensions {names}; pass the data-parallel one, such as mesh['dp']")
        return int(group.get_local_rank()), int(group.size())
    if hasattr(group, "rank") and hasattr(group, "size"):
        return int(group.rank()), int(group.size())
    raise UsageError(f"{type(group).__name__} is neither a process group nor a device mesh; pass rank and world_size")


def _from_surroundings() -> tuple[int, int]:
    """torch.distributed and JAX where the program uses them, else what launchers set."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    jax = sys.modules.get("jax")
    if jax is not None and jax.process_count() > 1:
        return int(jax.process_index()), int(jax.process_count())
    for rank, size in ENVIRONMENTS.items():
        number, count = os.environ.get(rank), os.environ.get(size)
        if number is not None and count is not None:
            try:
                return int(number), int(count)
            except ValueError:
                raise UsageError(f"{rank}={number!r} and {size}={count!r} in the environment are no numbers") from None
    return 0, 1
