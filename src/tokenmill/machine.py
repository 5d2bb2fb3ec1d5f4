"""The cores and the memory that a process may use, and the user's cache folder.

Containers and schedulers limit a process by affinity masks and cgroups, which plain counts of cores and memory ignore.
A process that used all of the machine's memory would be killed there.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from tokenmill.errors import UsageError

__all__ = [
    "available_memory",
    "cache_folder",
    "is_full",
    "own_command",
    "parse_bytes",
    "physical_cpus",
    "processor_name",
    "tree_memory",
    "usable_cores",
]

FULL_BYTES = 1 << 20

CGROUP = Path("/sys/fs/cgroup")
UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12}
UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def cache_folder() -> Path:
    """The folder for files that can be made again: `TOKENMILL_CACHE` if it is set, else in the user's cache folder."""
    if folder := os.environ.get("TOKENMILL_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenmill"


def parse_bytes(value: str | int, flag: str) -> int:
    """Parse a number of bytes such as `1GB`, `512MiB` or `200000`; units are decimal, those with an `i` binary."""
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        unit = match.group(2).lower() if match else None
        if match is None or unit not in UNITS:
            raise UsageError(f"{flag} {value!r} is not a size; write it like 1GB, 512MiB or 200000")
        size = int(float(match.group(1)) * UNITS[unit])
    if size >= 1 << 62:
        raise UsageError(f"{flag} {value} is more than any machine has")
    return size


def processor_name() -> str:
    """The model name of the processor, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def describe_machine() -> dict[str, Any]:
    """What a measurement depends on: the system, the processor, cores, memory and Python."""
    return {
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "python": platform.python_version(),
    }


def usable_cores() -> int:
    """The number of physical cores that this process may use, within its cgroup's CPU quota."""
    cores = len(physical_cpus())
    with suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def physical_cpus(*, across_nodes: bool = False) -> list[int]:
    """One CPU of each physical core that this process may use; `across_nodes` alternates between NUMA nodes."""
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
    """The CPUs of each NUMA node; empty if the system does not list them."""
    lists = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return [_parse_cpus(path.read_text()) for path in lists]


def _parse_cpus(text: str) -> set[int]:
    """Parse a list of CPUs such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


def available_memory() -> int:
    """The free bytes of the machine, or of the cgroup if that has fewer."""
    limit, used = _cgroup_memory()
    free = int(psutil.virtual_memory().available)
    return free if limit is None else max(0, min(free, limit - used))


def total_memory() -> int:
    """The bytes of the machine, or of the cgroup if that has fewer."""
    limit, _ = _cgroup_memory()
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def _cgroup_memory() -> tuple[int | None, int]:
    """The limit of the cgroup, None if it has none, and how much of it is used."""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError):
            limit, used = (CGROUP / limit_file).read_text().strip(), (CGROUP / used_file).read_text().strip()
            if limit != "max" and int(limit) < 1 << 60:
                return int(limit), int(used)
    return None, 0


def tree_memory(process: psutil.Process) -> int:
    """Memory of a process and all its descendants, in bytes.

    This is the proportional set size, which counts shared pages once over a tree; without Linux, the resident size.
    """
    total = 0
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            try:
                rollup = Path(f"/proc/{member.pid}/smaps_rollup").read_text()
            except OSError:
                total += int(member.memory_info().rss)
                continue
            match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
            total += int(match.group(1)) * 1024 if match else 0
    return total


def _core_siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def own_command() -> str:
    """What was typed, if this program is `tokenmill tokenize`; empty in any other program."""
    program, *arguments = sys.argv or [""]
    is_ours = Path(program).name == "tokenmill" or Path(program).parts[-2:] == ("tokenmill", "__main__.py")
    return shlex.join(["tokenmill", *arguments]) if is_ours and arguments[:1] == ["tokenize"] else ""


def is_full(folder: Path) -> bool:
    """Whether the disk has too little room for the record of a run."""
    return shutil.disk_usage(folder).free < FULL_BYTES
