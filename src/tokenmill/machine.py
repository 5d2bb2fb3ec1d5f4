"""What this machine offers a run: cores it may use, memory it may take.

Containers and schedulers limit a process by affinity masks and cgroups, which plain counts of
cores and memory do not show; a budget taken from the whole machine would be killed there.
"""

from __future__ import annotations

import os
import platform
import re
from itertools import zip_longest
from pathlib import Path

import psutil

from tokenmill.errors import UsageError

__all__ = ["available_memory", "parse_bytes", "physical_cpus", "processor_name", "tree_memory", "usable_cores"]

CGROUP = Path("/sys/fs/cgroup")
UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12}
UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str, flag: str) -> int:
    """`1GB`, `512MiB`, `200000`: a number of bytes; decimal units unless an `i` says binary."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in UNITS:
        raise UsageError(f"{flag} {text!r} is not a size; write it like 1GB, 512MiB or 200000")
    return int(float(match.group(1)) * UNITS[unit])


def processor_name() -> str:
    """What the processor calls itself, or at least its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Physical cores among those this process may run on, within its cgroup's CPU quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_core_siblings(cpu) for cpu in allowed}
    cores = len(siblings)
    quota = _cgroup_cpu_quota()
    return max(1, min(cores, quota) if quota else cores)


def physical_cpus(*, across_nodes: bool = False) -> list[int]:
    """One CPU of each physical core that this process may use; from all memory nodes in turn, if asked."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    first: dict[str, int] = {}
    for cpu in sorted(allowed):
        first.setdefault(_core_siblings(cpu), cpu)
    cpus = sorted(first.values())
    if not across_nodes:
        return cpus
    nodes = [[cpu for cpu in cpus if cpu in node] for node in _memory_nodes()]
    turns = [cpu for turn in zip_longest(*nodes) for cpu in turn if cpu is not None]
    return turns + [cpu for cpu in cpus if cpu not in turns]


def _memory_nodes() -> list[set[int]]:
    """The CPUs of each NUMA node; one node where the system names none."""
    lists = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return [_parse_cpus(path.read_text()) for path in lists]


def _parse_cpus(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


def available_memory() -> int:
    """Bytes that are free for a run: of the machine, or of its cgroup when that is tighter."""
    free = int(psutil.virtual_memory().available)
    limit, used = _cgroup_memory()
    return free if limit is None else max(0, min(free, limit - used))


def tree_memory(process: psutil.Process) -> int:
    """Proportional set size of a process and all its descendants, in bytes."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += _pss(member.pid)
        except (psutil.Error, OSError):
            continue
    return total


def _pss(pid: int) -> int:
    """Shared pages are counted once over the tree; only Linux knows them, elsewhere it is the resident size."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return int(psutil.Process(pid).memory_info().rss)
    match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _core_siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_cpu_quota() -> int | None:
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def _cgroup_memory() -> tuple[int | None, int]:
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (CGROUP / limit_file).read_text().strip(), (CGROUP / used_file).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < 1 << 60:
            return int(limit), int(used)
    return None, 0
