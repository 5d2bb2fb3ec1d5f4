"""The share of a rank: what one of several processes does of a run that they share.

Every rank makes the same plan from the same inputs and divides it in the same way, so nobody has to hand out work.
A share depends on the plan and the number of ranks, never on what is done already: a rank that is started again
finds its own work, wherever the others are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tokenmill.errors import UsageError
from tokenmill.pipeline.plan import Plan, Stream, Task

__all__ = ["WHOLE", "Share", "divide", "find_share", "join_ranks", "membership", "ownership"]


class Share(msgspec.Struct, frozen=True):
    """Which part of a run a process does; one of one is all of it."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether nobody else works on the run."""
        return self.world_size == 1

    @property
    def name(self) -> str:
        """What it is called in names of files; empty for the whole."""
        return "" if self.is_whole else f"rank-{self.rank}-of-{self.world_size}"

    def of(self, plan: Plan) -> Plan:
        """The tasks and streams of a plan that are this rank's."""
        return plan if self.is_whole else divide(plan, self.world_size)[self.rank]

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


WHOLE = Share()


def divide(plan: Plan, world_size: int) -> list[Plan]:
    """Share a plan by bytes of text: the largest first, each to the rank that has the least so far."""
    parts = [msgspec.structs.replace(plan, tasks=[], streams=[]) for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for size, work in sorted(_weigh(plan), key=_largest_first):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size, rank))
        if isinstance(work, Task):
            parts[rank].tasks.append(work)
        else:
            parts[rank].streams.append(work)
    return parts


def membership(plan: Plan) -> Callable[[str], bool]:
    """Tells whether a task, by its name, is one of a plan or of a stream in it."""
    tasks = {task.name for task in plan.tasks}
    streams = {stream.name for stream in plan.streams}
    return lambda name: name in tasks or name.partition("-")[0] in streams


def ownership(plan: Plan, world_size: int) -> Callable[[str], int]:
    """Tells whose a task or a stream is, by its name: a number of ranks is one lookup then, and not one for each."""
    ranks = {}
    for rank, part in enumerate(divide(plan, world_size)):
        ranks.update({task.name: rank for task in part.tasks})
        ranks.update({stream.name: rank for stream in part.streams})
    return lambda name: ranks[name] if name in ranks else ranks[name.partition("-")[0]]


def join_ranks(ranks: Iterable[int]) -> str:
    """Numbers as `sbatch --array` takes them: `0-4,6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def find_share(rank: int | str | None, world_size: int | None, environment: Mapping[str, str]) -> Share:
    """The share that `--rank` and `--world-size` ask for; a word for a rank says whose variables to read."""
    if rank is None:
        if world_size is not None:
            raise UsageError(f"--world-size {world_size} says how many ranks there are; say which this is with --rank")
        return WHOLE
    if rank == "slurm":
        return _ask_slurm(world_size, environment)
    if rank == "kubernetes":
        return _ask_kubernetes(world_size, environment)
    if world_size is None:
        raise UsageError(f"--rank {rank} is one of several; say how many with --world-size")
    number = int(rank)
    if not 0 <= number < world_size:
        raise UsageError(f"--rank {number} must be below --world-size {world_size}: ranks are counted from 0")
    return Share(number, world_size)


def _weigh(plan: Plan) -> list[tuple[int, Task | Stream]]:
    """Tasks and streams with about how much text they have, which is what they take time for."""
    weighed: list[tuple[int, Task | Stream]] = []
    for task in plan.tasks:
        files = [plan.inputs[span.input] for span in task.spans]
        on_disk = sum(file.bytes for file in files)
        weighed.append((1 + task.bytes * sum(file.text_bytes for file in files) // max(1, on_disk), task))
    return weighed + [(1 + plan.inputs[stream.input].text_bytes, stream) for stream in plan.streams]


def _largest_first(weighed: tuple[int, Task | Stream]) -> tuple[int, int, int]:
    size, work = weighed
    return -size, work.input, work.number if isinstance(work, Task) else 0


def _ask_slurm(world_size: int | None, environment: Mapping[str, str]) -> Share:
    """The place in an array, in a step of srun, or in a step of an array.

    With `--world-size`, the number in the array is the rank itself, so that a part of an array can be submitted again.
    """
    is_step = "SLURM_STEP_ID" in environment
    process, num_processes = 0, 1
    if is_step:
        process, num_processes = _number("SLURM_PROCID", environment), _number("SLURM_NTASKS", environment)
    elif "SLURM_ARRAY_TASK_ID" not in environment:
        raise UsageError(
            "--rank slurm finds neither SLURM_ARRAY_TASK_ID nor a step of srun; submit it with sbatch --array=0-7, or "
            "start it with srun"
        )
    number, count = 0, 1
    if "SLURM_ARRAY_TASK_ID" in environment and world_size is not None:
        number = _number("SLURM_ARRAY_TASK_ID", environment)
    elif "SLURM_ARRAY_TASK_ID" in environment:
        number, count = _place_in_array(environment)
    share = Share(number * num_processes + process, world_size or count * num_processes)
    if share.rank >= share.world_size:
        # An array that is counted from 1 ends so.
        found, advice = f"SLURM_PROCID is {process}", f"start at most {share.world_size} tasks"
        if "SLURM_ARRAY_TASK_ID" in environment:
            found = f"SLURM_ARRAY_TASK_ID is {number}" + (f", {found}" if is_step else "")
            advice = f"submit --array=0-{max(1, share.world_size // num_processes) - 1}"
        raise UsageError(f"{found} and --world-size {share.world_size}; {advice}, or leave --world-size out")
    return share


def _place_in_array(environment: Mapping[str, str]) -> tuple[int, int]:
    number, count = _number("SLURM_ARRAY_TASK_ID", environment), _number("SLURM_ARRAY_TASK_COUNT", environment)
    first = _number("SLURM_ARRAY_TASK_MIN", environment)
    step = _number("SLURM_ARRAY_TASK_STEP", environment) if "SLURM_ARRAY_TASK_STEP" in environment else 1
    place, odd = divmod(number - first, max(1, step))
    if odd or place >= count:
        raise UsageError(
            f"SLURM_ARRAY_TASK_ID {number} is in an array with gaps; to submit some ranks again, say how many there "
            "are in all with --world-size"
        )
    return place, count


def _ask_kubernetes(world_size: int | None, environment: Mapping[str, str]) -> Share:
    if "JOB_COMPLETION_INDEX" not in environment:
        raise UsageError(
            "--rank kubernetes finds no JOB_COMPLETION_INDEX; the job needs completionMode: Indexed in its spec"
        )
    number = _number("JOB_COMPLETION_INDEX", environment)
    source = "--world-size"
    if world_size is None:
        if "JOB_COMPLETIONS" not in environment:
            raise UsageError(
                f"--rank kubernetes is rank {number}, and Kubernetes does not say of how many; pass --world-size, or "
                "set JOB_COMPLETIONS in the container's env"
            )
        source, world_size = "JOB_COMPLETIONS", _number("JOB_COMPLETIONS", environment)
    if number >= world_size:
        raise UsageError(
            f"JOB_COMPLETION_INDEX is {number} and {source} {world_size}; give {source} the number of completions of "
            "the job, which is more than any index"
        )
    return Share(number, world_size)


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r} in the environment; expected a number, or pass --rank and --world-size")
    return int(text)
