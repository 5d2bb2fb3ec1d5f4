"""Find the data-parallel rank of a process where its trainer keeps it.

Peers in tensor or pipeline parallelism need equal batches, so the rank is that in the data-parallel group or in one
dimension of the device mesh, not the number of the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from tokenmill.arguments import flag, name_kind, one_of, whole_number
from tokenmill.dataset.rows import Rows
from tokenmill.errors import UsageError
from tokenmill.filling.context import ContextShare
from tokenmill.filling.layouts import UNSHIFTED

__all__ = ["World", "find_part", "find_rank", "is_auto"]

ENVIRONMENTS = {
    "RANK": "WORLD_SIZE",
    "SLURM_PROCID": "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
}
MOST_RANKS = 1 << 24
NAMES = {"rank": "rank", "world_size": "world_size", "group": "group"}


class World(TypedDict, total=False):
    """The settings of a loader that say which part of each global batch a process gets; by default, all of it."""

    rank: int | str | None
    """A number, or "auto" to find it in the environment."""
    world_size: int | None
    group: Any
    """The process group of torch or the device mesh of one dimension to ask instead."""
    cp_rank: int | None
    """Which part of every row a context-parallel rank gets; peers have the same `rank`."""
    cp_size: int | None
    cp_group: Any
    """The process group or mesh dimension to ask for both instead."""
    cp_by: str
    """What is cut into chunks: every "row", or every "document" with its padding."""
    balance: bool
    """Deal the rows of a global batch to ranks so that the squared lengths of their documents have equal sums."""


class BatchPart(NamedTuple):
    """Which rows of each global batch a process gets, and which part of each row."""

    rank: int
    world_size: int
    share: ContextShare | None
    is_balanced: bool


def find_part(rows: Rows, document_mask: bool, layout: str, world: World) -> BatchPart:
    """Check the settings of a loader that say which part of each global batch a process gets."""
    if unknown := world.keys() - World.__annotations__:
        raise TypeError(f"Loader got an unexpected setting {min(unknown)!r}")
    rank, size = find_rank(world.get("rank"), world.get("world_size"), world.get("group"))
    is_balanced = flag(world.get("balance", False), "balance")
    if is_balanced and not document_mask:
        raise UsageError(
            "balance=True has no effect if every row is one document to the model; pass document_mask=True"
        )
    return BatchPart(rank, size, _find_share(rows, document_mask, layout, world), is_balanced)


def _find_share(rows: Rows, document_mask: bool, layout: str, world: World) -> ContextShare | None:
    """Return the part of every row that a context-parallel rank gets; None if that is all of it."""
    by = one_of(world.get("cp_by", "row"), ("row", "document"), "cp_by")
    names = {"rank": "cp_rank", "world_size": "cp_size", "group": "cp_group"}
    rank, size = find_rank(**{name: world.get(given) for name, given in names.items()}, names=names)
    if size == 1:
        return None
    if layout in UNSHIFTED:
        raise UsageError(
            f"layout {layout!r} leaves it to the model to shift labels, and the next token may be on another rank; "
            "use a layout with targets, such as 'xy' or 'megatron'"
        )
    if rows.layout is not None:
        raise UsageError(f"cp_size {size} cuts rows of packed documents, and these rows are {rows.layout}")
    if rows.seq_len % (2 * size):
        raise UsageError(f"cp_size {size} cuts rows into {2 * size} chunks, and seq_len {rows.seq_len} is no multiple")
    if by == "document" and rows.align % (2 * size):
        raise UsageError(
            f"cp_by='document' cuts documents into {2 * size} chunks, and they are aligned to {rows.align}; "
            f"pass align={2 * size} with packing='best-fit' or 'pad'"
        )
    if by == "document" and not document_mask:
        raise UsageError("cp_by='document' gives each document positions of its own; pass document_mask=True")
    return ContextShare(rank, size, by)


def find_rank(
    rank: Any = None, world_size: Any = None, group: Any = None, *, names: Mapping[str, str] = NAMES
) -> tuple[int, int]:
    """Return rank and world size as given, from a process group or mesh, or with `rank="auto"` from the environment.

    If they are given in two ways, both must be equal. `names` are those that the user knows them by.
    """
    rank_name, size_name = names["rank"], names["world_size"]
    if group is None and not (is_auto(rank) and names is NAMES):
        size = 1 if world_size is None else whole_number(world_size, size_name, 1, MOST_RANKS)
        if rank is None and size > 1:
            how = "pass one, or rank='auto'" if names is NAMES else f"pass one, or {names['group']}"
            raise UsageError(f"{size_name} {size} needs a {rank_name}; {how}")
        number = 0 if rank is None else whole_number(rank, rank_name, 0)
        if number >= size:
            bound = f"expected 0 <= {rank_name} < {size_name}"
            raise UsageError(f"{rank_name} {number} of {size_name} {size} is impossible; {bound}")
        return number, size
    where = "rank='auto'" if group is None else f"the {names['group']}"
    found = _from_environment() if group is None else _from_group(group)
    passed = (None if is_auto(rank) else rank, world_size)
    for name, given, known in zip((rank_name, size_name), passed, found, strict=True):
        if given is not None and whole_number(given, name) != known:
            raise UsageError(f"{name} {given} contradicts {where}, which gives {known}; leave {name} out")
    return found


def is_auto(rank: Any) -> bool:
    """Return whether the rank is to be found in the environment."""
    return isinstance(rank, str) and rank == "auto"


def _from_group(group: Any) -> tuple[int, int]:
    """Ask a torch DeviceMesh of one dimension, or a process group."""
    distributed = sys.modules.get("torch.distributed")
    outside = getattr(getattr(distributed, "GroupMember", None), "NON_GROUP_MEMBER", None)
    if outside is not None and group is outside:
        raise _not_in_group()
    if hasattr(group, "get_local_rank") and getattr(group, "ndim", 1) != 1:
        names = getattr(group, "mesh_dim_names", None)
        raise UsageError(f"the mesh has several dimensions {names}; pass the data-parallel one, such as mesh['dp']")
    find = getattr(group, "get_local_rank", None) or getattr(group, "rank", None)
    if not callable(find) or not callable(getattr(group, "size", None)):
        raise UsageError(f"{name_kind(group)} is neither a process group nor a device mesh; pass rank and world_size")
    try:
        number, size = int(find()), int(group.size())
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the group has no rank for this process: {str(error).partition(chr(10))[0]}") from None
    if not 0 <= number < size:
        raise _not_in_group()
    return number, size


def _not_in_group() -> UsageError:
    return UsageError("this process is not in the group; pass a group that it is in, or make no loader here")


def _from_environment() -> tuple[int, int]:
    """Ask torch.distributed and JAX if the program uses them, else the environment variables of launchers."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    jax = sys.modules.get("jax")
    if jax is not None and jax.process_count() > 1:
        return int(jax.process_index()), int(jax.process_count())
    return _from_variables()


def _from_variables() -> tuple[int, int]:
    """Return the first complete pair of variables; half a pair is an error if there is no other."""
    halves = []
    for pair in ENVIRONMENTS.items():
        number, count = (os.environ.get(name) for name in pair)
        if number is not None and count is not None:
            return _parse(pair, number, count)
        # In a batch script of Slurm only SLURM_PROCID=0 is set; its steps have both.
        if (number or count) and not (pair[0] == "SLURM_PROCID" and number in (None, "0")):
            halves.append(pair if number is not None else pair[::-1])
    if halves:
        here, missing = halves[0]
        half = f"{here}={os.environ[here]!r} is in the environment and {missing} is not"
        raise UsageError(f"{half}; set both, or pass rank and world_size")
    return 0, 1


def _parse(names: tuple[str, str], number: str, count: str) -> tuple[int, int]:
    what = f"{names[0]}={number!r} and {names[1]}={count!r} in the environment"
    try:
        rank, size = int(number), int(count)
    except ValueError:
        raise UsageError(f"{what} are not numbers") from None
    if not 0 <= rank < size <= MOST_RANKS:
        raise UsageError(f"{what} are impossible; expected 0 <= {names[0]} < {names[1]}")
    return rank, size
