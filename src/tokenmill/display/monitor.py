"""Draw how a run uses its machine: `tokenize --monitor` and `status --watch`.

Cores, memory, disk, stages and workers fit 80 columns, for any number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from tokenmill.display import Machine, Snapshot, WorkerMoment, render
from tokenmill.display.tables import make_facts, make_table
from tokenmill.formatting import format_bytes, format_seconds, plural, show_safely

__all__ = ["draw_monitor", "render_machine"]

MOST_PERCENTAGES, MOST_WORKERS = 12, 12
CORES_PER_LINE = 64
LEVELS = "▁▂▃▄▅▆▇█"
BAR_COLUMNS = 24
INPUT_COLUMNS = 30
SHADES = {"read": "cyan", "decompress": "magenta", "parse": "blue", "encode": "green", "write": "yellow"}


def draw_monitor(snapshot: Snapshot, width: int) -> RenderableType:
    """Draw the usual bar with the machine below it."""
    bar: RenderableType = render(snapshot, width)
    return bar if snapshot.machine is None else Group(bar, Text(), render_machine(snapshot))


def render_machine(snapshot: Snapshot) -> RenderableType:
    """Draw cores, memory, disk, stages and workers."""
    machine = snapshot.machine
    assert machine is not None
    parts: list[RenderableType] = [make_facts(_facts(snapshot, machine))]
    if machine.workers:
        parts += [Text(), _render_workers(machine.workers)]
    return Group(*parts)


def _facts(snapshot: Snapshot, machine: Machine) -> Iterator[tuple[str, str | Text]]:
    yield "cores", _render_cores(machine.cores)
    used = snapshot.memory_bytes / max(1, snapshot.memory_limit)
    filled = round(min(1.0, max(0.0, used)) * BAR_COLUMNS)
    memory = f" {format_bytes(snapshot.memory_bytes)} of {format_bytes(snapshot.memory_limit)}"
    style = "red" if used > 0.9 else "green"
    yield "memory", Text.assemble(("█" * filled, style), ("░" * (BAR_COLUMNS - filled), "dim"), memory)
    yield "disk", f"{format_bytes(machine.disk_free)} free"
    stages = (
        (f"{name} {share:.0%}  ", SHADES.get(name, "")) for name, share in machine.stages.items() if share >= 0.005
    )
    yield "stages", Text.assemble(*stages)
    if machine.slowest_seconds:
        seconds = format_seconds(machine.slowest_seconds)
        yield "slowest task", f"{machine.slowest_task} of {_shorten(machine.slowest_input)}, {seconds}"


def _render_cores(cores: list[float]) -> Text:
    """A percentage per core; if there are many cores, one block each whose height is the load, and a summary."""
    if len(cores) <= MOST_PERCENTAGES:
        return Text.assemble(*((f"{core:4.0%} ", _shade(core)) for core in cores))
    text = Text()
    for number, core in enumerate(cores):
        if number % CORES_PER_LINE == 0 and number:
            text.append("\n")
        text.append(LEVELS[min(len(LEVELS) - 1, int(core * len(LEVELS)))], style=_shade(core))
    busy = sum(cores) / len(cores)
    return text.append(f"\n{busy:.0%} of {len(cores)} cores, {sum(core < 0.1 for core in cores)} idle")


def _shade(core: float) -> str:
    return "green" if core > 0.7 else "yellow" if core > 0.3 else "dim"


def _render_workers(workers: list[WorkerMoment]) -> RenderableType:
    """One line per worker; if there are many, only the slowest, because these need attention."""
    shown = workers
    if len(workers) > MOST_WORKERS:
        shown = sorted(workers, key=lambda worker: worker.bytes_per_second)[:MOST_WORKERS]
    rows = []
    for worker in shown:
        at = (worker.task, format_seconds(worker.task_seconds), _shorten(worker.input)) if worker.task else ("idle",)
        rows.append((worker.name, f"{worker.bytes_per_second / 1e6:.0f}", *at))
    table = make_table(("worker", "MB/s", "task", "for", "input"), rows, left=("worker", "task", "input"))
    if len(shown) == len(workers):
        return table
    return Group(table, Text(f"and {plural(len(workers) - len(shown), 'faster worker')}", style="dim"))


def _shorten(name: str) -> str:
    safe = show_safely(name)
    return safe if len(safe) <= INPUT_COLUMNS else "…" + safe[-INPUT_COLUMNS + 1 :]
