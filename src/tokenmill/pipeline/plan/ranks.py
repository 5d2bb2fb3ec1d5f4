"""The share of a rank: the part of a run that one of several processes does.

Every rank makes the same plan from the same inputs and divides it in the same way, so no coordinator is needed. A share
depends on the plan and the number of ranks, never on progress: a rank that is started again finds its own work,
regardless of the progress of the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tokenmill.errors import UsageError
from tokenmill.pipeline.plan.tasks import Plan, Stream, Task

__all__ = ["WHOLE", "Share", "divide", "find_share", "join_ranks", "membership", "ownership"]


class Share(msgspec.Struct, frozen=True):
    """The part of a run that a process does; rank 0 of 1 does all of it."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this process does the whole run."""
        return self.world_size == 1

    @property
    def name(self) -> str:
        """The name of the share in file names; empty for the whole run."""
        return "" if self.is_whole else f"rank-{self.rank}-of-{self.world_size}"

    def of(self, plan: Plan) -> Plan:
        """Return the tasks and streams of a plan that belong to this rank."""
        return plan if self.is_whole else divide(plan, self.world_size)[self.rank]

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


WHOLE = Share()


def divide(plan: Plan, world_size: int) -> list[Plan]:
    """Divide a plan by bytes of text: the largest task first, each to the rank with the least so far."""
    parts = [msgspec.structs.replace(plan, tasks=[], streams=[]) for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    works: list[Task | Stream] = [*plan.tasks, *plan.streams]
    works.sort(key=lambda work: (-plan.weigh(work), work.input, work.number if isinstance(work, Task) else 0))
    for work in works:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + 1 + plan.weigh(work), rank))
        if isinstance(work, Task):
            parts[rank].tasks.append(work)
        else:
            parts[rank].streams.append(work)
    return parts


def membership(plan: Plan) -> Callable[[str], bool]:
    """Return a function that tells whether a task, by name, belongs to a plan or to a stream in it."""
    tasks = {task.name for task in plan.tasks}
    streams = {stream.name for stream in plan.streams}
    return lambda name: name in tasks or name.partition("-")[0] in streams


def ownership(plan: Plan, world_size: int) -> Callable[[str], int]:
    """Return a function that maps the name of a task or stream to its rank, with one lookup per name."""
    ranks = {}
    for rank, part in enumerate(divide(plan, world_size)):
        ranks.update({task.name: rank for task in part.tasks})
        ranks.update({stream.name: rank for stream in part.streams})
    return lambda name: ranks[name] if name in ranks else ranks[name.partition("-")[0]]


def join_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for `sbatch --array`: `0-4,6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def find_share(rank: int | str | None, world_size: int | None, environment: Mapping[str, str]) -> Share:
    """Find the share from `--rank` and `--world-size`; `slurm` and `kubernetes` read it from the environment."""
    if rank is None:
        if world_size is not None:
            raise UsageError(
                f"--world-size {world_size} says how many ranks there are; say which one this is with --rank"
            )
        return WHOLE
    if rank == "slurm":
        return _find_slurm_share(world_size, environment)
    if rank == "kubernetes":
        return _find_kubernetes_share(world_size, environment)
    if world_size is None:
        raise UsageError(f"--rank {rank} is one of several; say how many with --world-size")
    number = int(rank)
    if not 0 <= number < world_size:
        raise UsageError(f"--rank {number} must be below --world-size {world_size}: ranks are counted from 0")
    return Share(number, world_size)


def _find_slurm_share(world_size: int | None, environment: Mapping[str, str]) -> Share:
    """Find the share in a Slurm array, in a step of srun, or in a step of an array job.

    With `--world-size`, the array index is the rank itself, so that a part of an array can be submitted again.
    """
    is_step = "SLURM_STEP_ID" in environment
    process, num_processes = 0, 1
    if is_step:
        process, num_processes = _read_number("SLURM_PROCID", environment), _read_number("SLURM_NTASKS", environment)
    elif "SLURM_ARRAY_TASK_ID" not in environment:
        raise UsageError(
            "--rank slurm finds neither SLURM_ARRAY_TASK_ID nor a step of srun; submit it with sbatch --array=0-7, or "
            "start it with srun"
        )
    number, count = 0, 1
    if "SLURM_ARRAY_TASK_ID" in environment and world_size is not None:
        number = _read_number("SLURM_ARRAY_TASK_ID", environment)
    elif "SLURM_ARRAY_TASK_ID" in environment:
        number, count = _find_array_position(environment)
    share = Share(number * num_processes + process, world_size or count * num_processes)
    if share.rank >= share.world_size:
        # This happens if the array starts at 1.
        found, advice = f"SLURM_PROCID is {process}", f"start at most {share.world_size} tasks"
        if "SLURM_ARRAY_TASK_ID" in environment:
            found = f"SLURM_ARRAY_TASK_ID is {number}" + (f", {found}" if is_step else "")
            advice = f"submit --array=0-{max(1, share.world_size // num_processes) - 1}"
        raise UsageError(f"{found} and --world-size {share.world_size}; {advice}, or leave --world-size out")
    return share


def _find_array_position(environment: Mapping[str, str]) -> tuple[int, int]:
    number = _read_number("SLURM_ARRAY_TASK_ID", environment)
    count = _read_number("SLURM_ARRAY_TASK_COUNT", environment)
    first = _read_number("SLURM_ARRAY_TASK_MIN", environment)
    step = _read_number("SLURM_ARRAY_TASK_STEP", environment) if "SLURM_ARRAY_TASK_STEP" in environment else 1
    place, odd = divmod(number - first, max(1, step))
    if odd or place >= count:
        raise UsageError(
            f"SLURM_ARRAY_TASK_ID {number} is in an array with gaps; to submit some ranks again, say how many there "
            "are in all with --world-size"
        )
    return place, count


def _find_kubernetes_share(world_size: int | None, environment: Mapping[str, str]) -> Share:
    if "JOB_COMPLETION_INDEX" not in environment:
        raise UsageError(
            "--rank kubernetes finds no JOB_COMPLETION_INDEX; the job needs completionMode: Indexed in its spec"
        )
    number = _read_number("JOB_COMPLETION_INDEX", environment)
    source = "--world-size"
    if world_size is None:
        if "JOB_COMPLETIONS" not in environment:
            raise UsageError(
                f"--rank kubernetes is rank {number}, but Kubernetes does not say of how many; pass --world-size, or "
                "set JOB_COMPLETIONS in the container's env"
            )
        source, world_size = "JOB_COMPLETIONS", _read_number("JOB_COMPLETIONS", environment)
    if number >= world_size:
        raise UsageError(
            f"JOB_COMPLETION_INDEX is {number} and {source} {world_size}; set {source} to the number of completions of "
            "the job, which is larger than every index"
        )
    return Share(number, world_size)


def _read_number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment; expected a number, or pass --rank and --world-size")
    return int(text)
