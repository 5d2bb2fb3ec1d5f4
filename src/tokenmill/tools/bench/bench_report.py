"""The result of a benchmark: what a race gives, as tables of 80 columns for people and one JSON object for programs.

Figures mean little without the machine, the versions and the command, so all of these are part of the report.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill import __version__
from tokenmill.formatting import format_bytes, format_count, plural
from tokenmill.machine import describe_machine
from tokenmill.tools.bench.contenders import Contender, Effort, Finisher, race
from tokenmill.tools.bench.measurement import Measurement, judge

__all__ = ["TABLES", "BenchReport", "BenchResult", "MachineInfo", "print_report"]

WIDTH = 80
PACKAGES = ("gigatoken", "tokenizers", "sentencepiece", "tiktoken", "numpy")
FRAMEWORKS = ("numpy", "torch", "jax", "grain", "tensorflow", "tensorflow_cpu")
BUSY = 0.5
"""A machine is called busy if more processes than this, per core, want to run."""


class MachineInfo(msgspec.Struct, frozen=True):
    """The machine of a measurement."""

    processor: str
    cores: int
    """Physical cores that this process may use."""
    memory_bytes: int
    system: str
    python: str
    load: float
    """The load average of the last minute."""

    @classmethod
    def here(cls) -> MachineInfo:
        """Describe this machine."""
        return cls(**describe_machine(), load=round(os.getloadavg()[0], 2))

    def line(self) -> str:
        """Describe the machine in one line."""
        cores = plural(self.cores, "core")
        return f"{self.processor}, {cores}, {format_bytes(self.memory_bytes)}, Python {self.python}"


@dataclass
class BenchResult:
    """One contender: what was measured several times, and other facts. Each group is a table of its own."""

    name: str
    figures: dict[str, Measurement]
    facts: dict[str, Any] = field(default_factory=dict)
    group: str = ""


Cell = Callable[[BenchResult], str]
"""Shows a result in one column of a table."""


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _median(key: str, scale: float = 1.0, show: Callable[[float], str] = _number) -> Cell:
    """Show the median of a figure; leave the cell empty if a contender has no such figure."""
    return lambda row: show(row.figures[key].median * scale) if key in row.figures else ""


def _spread(key: str, scale: float = 1.0) -> Cell:
    """Show the lowest and the highest run."""
    return lambda row: "-".join(_number(run * scale) for run in (row.figures[key].low, row.figures[key].high))


def _growth(row: BenchResult) -> str:
    growth = row.facts["memory_growth"]
    return "?" if growth is None else f"{max(0.0, growth):.1f}"


SPEED: dict[str, Cell] = {"MB/s": _median("mb_per_second"), "spread": _spread("mb_per_second")}
PEAK: dict[str, Cell] = {"peak MB": lambda row: f"{row.facts['peak_memory_bytes'] / 1e6:,.0f}"}
TABLES: dict[str, dict[str, Cell]] = {
    "strategies": {
        **SPEED,
        "docs/s": _median("documents_per_second", show=format_count),
        "tok/s": _median("tokens_per_second", show=format_count),
        "CPU s/GB": _median("cpu_seconds_per_gb"),
        **PEAK,
        "+MB/MB": _growth,
    },
    "engines": {
        **SPEED,
        "1st pass": _median("first_mb_per_second"),
        "tok/s": _median("tokens_per_second", show=format_count),
        **PEAK,
        "ids": lambda row: str(row.facts.get("parity", "")),
    },
    "workers": {
        **SPEED,
        "tokens/s": _median("tokens_per_second", show=format_count),
        "speedup": _median("speedup"),
        "efficiency": _median("efficiency", show="{:.0%}".format),
        "CPU s": _median("cpu_seconds"),
        **PEAK,
    },
    "loaders": {
        "batches/s": _median("batches_per_second"),
        "Mtok/s": _median("tokens_per_second", 1e-6),
        "spread": _spread("tokens_per_second", 1e-6),
        "first ms": _median("first_seconds", 1e3),
        "memory MB": _median("memory_bytes", 1e-6),
    },
}
"""The columns of each benchmark's table, by their heads. With the names of contenders they fit 80 characters."""


@dataclass
class BenchReport:
    """Everything that a benchmark found; `input` describes the data."""

    benchmark: str
    input: dict[str, Any]
    rows: list[BenchResult] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contenders without figures, and why they have none."""
    machine: MachineInfo = field(default_factory=MachineInfo.here)

    @property
    def groups(self) -> list[str]:
        """The titles of the tables."""
        return list(dict.fromkeys(row.group for row in self.rows))

    def race(
        self,
        contenders: Sequence[Contender],
        effort: Effort,
        make_result: Callable[[Finisher], BenchResult],
        key: str = "mb_per_second",
    ) -> None:
        """Measure contenders; add a row for each that finished, and for each table the verdicts about a speed."""
        self.rows += [make_result(finisher) for finisher in race(contenders, effort, self.left_out)]
        for group in self.groups:
            start = f"{group}: " if len(self.groups) > 1 else ""
            speeds = {row.name: row.figures[key] for row in self.rows if row.group == group}
            self.verdicts += [start + verdict for verdict in judge(speeds)]

    def to_json(self) -> dict[str, Any]:
        """The report as one object; a figure has its median, lowest, highest and all runs."""
        return {
            "benchmark": self.benchmark,
            "command": _command(),
            "machine": self.machine,
            "versions": _versions(self.benchmark),
            "input": self.input,
            "results": [
                {"name": row.name, **({"group": row.group} if row.group else {}), **row.figures, **row.facts}
                for row in self.rows
            ],
            "verdicts": self.verdicts,
            "notes": self.notes,
            "left_out": self.left_out,
        }


def print_report(report: BenchReport) -> None:
    """Print the tables, what they mean, and where and how they were measured, on stdout."""
    from rich.console import Console

    from tokenmill.display.tables import make_table

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal or console.width > WIDTH:
        console = Console(highlight=False, width=WIDTH)
    columns = TABLES[report.benchmark]
    for group in report.groups:
        rows = [row for row in report.rows if row.group == group]
        cells = [[row.name, *(show(row) for show in columns.values())] for row in rows]
        console.print(make_table(["", *columns], cells, left=[""], gap=1, title=group))
        console.print()
    items = [("-", verdict, "bold") for verdict in report.verdicts]
    items += [("-", note, "") for note in report.notes]
    items += [("-", f"left out: {name}: {reason}", "yellow") for name, reason in report.left_out.items()]
    console.print(_make_grid(items))
    console.print()
    console.print(_make_grid((f"{name:<8}", value, "dim") for name, value in _provenance(report)))
    # The command is not wrapped, so that it can be copied.
    console.print(f"command  {_command()}", style="dim", markup=False, soft_wrap=True)


def _make_grid(items: Iterable[tuple[str, str, str]]) -> Any:
    """Labels, texts and the styles of texts, in two columns."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    for label, text, style in items:
        grid.add_row(Text(label, style="dim"), Text(text, style=style))
    return grid


def _provenance(report: BenchReport) -> list[tuple[str, str]]:
    machine = report.machine
    lines = [
        ("input", _describe(report.input)),
        ("machine", machine.line()),
        ("versions", ", ".join(f"{name} {version}" for name, version in _versions(report.benchmark).items())),
    ]
    if machine.load > BUSY * machine.cores:
        busy = f"other processes were running at the start (load {machine.load:.1f} on {machine.cores} cores)"
        lines.append(("busy", f"{busy}: compare ratios, not absolute figures"))
    return lines


def _command() -> str:
    return shlex.join(["tokenmill", *sys.argv[1:]])


def _versions(benchmark: str) -> dict[str, str]:
    """Versions of tokenmill and of the libraries that are compared."""
    found = {"tokenmill": __version__}
    for name in FRAMEWORKS if benchmark == "loaders" else PACKAGES:
        try:
            found[name.removesuffix("_cpu")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _describe(input: Mapping[str, Any]) -> str:
    if "num_documents" not in input:
        return f"{input['path']}: {format_count(input['num_tokens'])} tokens ({format_bytes(input['num_bytes'])})"
    size = f"{input['num_documents']:,} documents, {input['num_bytes'] / 1e6:.1f} MB of text"
    part = "" if input["is_whole"] else " (a part of the input; --max-mb takes more)"
    rejects = f", {input['num_rejects']:,} bad records skipped" if input["num_rejects"] else ""
    return f"{size}{part}, {input['tokenizer']}{rejects}"
