"""What a run makes of its machine, on a terminal: `tokenize --monitor` and `status --watch`.

Cores, memory, disk, stages and workers in a few lines that fit 80 columns, whatever the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.progress import Machine, Snapshot, WorkerMoment, format_bytes, format_seconds, render, show_safely

__all__ = ["draw_monitor", "render_machine"]

MOST_PERCENTAGES, MOST_WORKERS = 12, 12
CORES_PER_LINE = 64
LEVELS = "▁▂▃▄▅▆▇█"
BAR_COLUMNS = 24
INPUT_COLUMNS = 30
SHADES = {"read": "cyan", "decompress": "magenta", "parse": "blue", "encode": "green", "write": "yellow"}


def draw_monitor(snapshot: Snapshot, width: int) -> RenderableType:
    """The usual bar, and the machine below it."""
    bar: RenderableType = render(snapshot, width)
    return bar if snapshot.machine is None else Group(bar, Text(), render_machine(snapshot))


def render_machine(snapshot: Snapshot) -> RenderableType:
    """Cores, memory, disk, stages and workers."""
    machine = snapshot.machine
    assert machine is not None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in _rows(snapshot, machine):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if machine.workers:
        parts += [Text(), _render_workers(machine.workers)]
    return Group(*parts)


def _rows(snapshot: Snapshot, machine: Machine) -> Iterator[tuple[str, Text]]:
    yield "cores", _render_cores(machine.cores)
    used = snapshot.memory_bytes / max(1, snapshot.memory_limit)
    memory = _bar(used, "red" if used > 0.9 else "green")
    yield "memory", memory.append(f" {format_bytes(snapshot.memory_bytes)} of {format_bytes(snapshot.memory_limit)}")
    yield "disk", Text(f"{format_bytes(machine.disk_free)} free")
    yield "stages", _render_stages(machine.stages)
    if machine.slowest_seconds:
        slowest = (
            f"{machine.slowest_task} of {_shorten(machine.slowest_input)}, {format_seconds(machine.slowest_seconds)}"
        )
        yield "slowest task", Text(slowest)


def _render_cores(cores: list[float]) -> Text:
    """A percentage a core; of many, a block for each that is as high as the core is busy, and what they come to."""
    text = Text()
    if len(cores) <= MOST_PERCENTAGES:
        for core in cores:
            text.append(f"{core:4.0%} ", style=_shade(core))
        return text
    for number, core in enumerate(cores):
        if number % CORES_PER_LINE == 0 and number:
            text.append("\n")
        text.append(LEVELS[min(len(LEVELS) - 1, int(core * len(LEVELS)))], style=_shade(core))
    busy = sum(cores) / len(cores)
    return text.append(f"\n{busy:.0%} of {len(cores)} cores, {sum(core < 0.1 for core in cores)} idle")


def _shade(core: float) -> str:
    return "green" if core > 0.7 else "yellow" if core > 0.3 else "dim"


def _render_stages(stages: dict[str, float]) -> Text:
    text = Text()
    for name, share in stages.items():
        if share >= 0.005:
            text.append(f"{name} {share:.0%}  ", style=SHADES.get(name, ""))
    return text


def _render_workers(workers: list[WorkerMoment]) -> RenderableType:
    """One line a worker; of many, the slowest ones, since these are what is looked for."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold cyan")
    for title, justify in (
        ("worker", "left"),
        ("MB/s", "right"),
        ("task", "left"),
        ("for", "right"),
        ("input", "left"),
    ):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    shown = (
        sorted(workers, key=lambda worker: worker.bytes_per_second)[:MOST_WORKERS]
        if len(workers) > MOST_WORKERS
        else workers
    )
    for worker in shown:
        speed = f"{worker.bytes_per_second / 1e6:.0f}"
        seconds = format_seconds(worker.task_seconds) if worker.task else ""
        table.add_row(
            worker.name, speed, worker.task or "waits", seconds, _shorten(worker.input) if worker.task else ""
        )
    if len(shown) == len(workers):
        return table
    rest = len(workers) - len(shown)
    return Group(table, Text(f"and {rest} faster one{'s' if rest > 1 else ''}", style="dim"))


def _bar(fraction: float, style: str) -> Text:
    filled = round(min(1.0, max(0.0, fraction)) * BAR_COLUMNS)
    return Text.assemble(("█" * filled, style), ("░" * (BAR_COLUMNS - filled), "dim"))


def _shorten(name: str) -> str:
    safe = show_safely(name)
    return safe if len(safe) <= INPUT_COLUMNS else "…" + safe[-INPUT_COLUMNS + 1 :]
