"""What a benchmark found: for people as tables of 80 columns, for programs as one JSON object.

A figure without its machine, versions and command is a rumour, so all of these are part of the report.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from tokenmill import __version__
from tokenmill.bench.documents import Corpus, Workplace
from tokenmill.bench.figures import Figure
from tokenmill.machine import processor_name, usable_cores
from tokenmill.progress import format_bytes, format_count

__all__ = ["Column", "Machine", "Report", "Row", "describe_input", "print_report"]

WIDTH = 80
PACKAGES = ("gigatoken", "tokenizers", "sentencepiece", "tiktoken", "numpy")
FRAMEWORKS = ("numpy", "torch", "jax", "grain", "tensorflow", "tensorflow_cpu")
BUSY = 0.5
"""Processes that want a core, for each core there is, above which a machine counts as busy."""


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured."""

    processor: str
    cores: int
    """Physical ones that this process may use."""
    memory_bytes: int
    system: str
    python: str
    load: float
    """Processes that wanted a core, on average over the last minute."""

    @classmethod
    def here(cls) -> Machine:
        """This machine as it is."""
        return cls(
            processor_name(),
            usable_cores(),
            int(psutil.virtual_memory().total),
            platform.platform(),
            platform.python_version(),
            round(os.getloadavg()[0], 2),
        )

    def line(self) -> str:
        """The machine in one line."""
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return f"{self.processor}, {cores}, {format_bytes(self.memory_bytes)}, Python {self.python}"


@dataclass
class Row:
    """One contender: what was measured several times, and what is known about it. A group is a table of its own."""

    name: str
    figures: dict[str, Figure]
    facts: dict[str, Any] = field(default_factory=dict)
    group: str = ""


@dataclass
class Report:
    """All that a benchmark has to say; `input` tells what it was measured on."""

    benchmark: str
    input: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine.here)

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Name contenders without figures, and why they have none."""
        self.left_out |= reasons

    @property
    def groups(self) -> list[str]:
        """The tables there are."""
        return list(dict.fromkeys(row.group for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        """The report as one object; a figure has its median, lowest, highest and all runs."""
        return {
            "benchmark": self.benchmark,
            "command": command(),
            "machine": self.machine,
            "versions": versions(self.benchmark),
            "input": self.input,
            "results": [
                {"name": row.name, **({"group": row.group} if row.group else {}), **row.figures, **row.facts}
                for row in self.rows
            ],
            "verdicts": self.verdicts,
            "notes": self.notes,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Column:
    """One column of a table: its head, and what a row shows there."""

    head: str
    show: Callable[[Row], str]


def describe_input(place: Workplace, corpus: Corpus) -> dict[str, Any]:
    """Which documents were used."""
    return {
        "files": len(place.files),
        "is_whole": corpus.is_whole,
        "num_documents": corpus.num_documents,
        "num_bytes": corpus.num_bytes,
        "num_rejects": corpus.num_rejects,
        "tokenizer": place.tokenizer.name,
        "vocab_size": place.tokenizer.vocab_size,
    }


def command() -> str:
    """What was typed."""
    return shlex.join(["tokenmill", *sys.argv[1:]])


def versions(benchmark: str) -> dict[str, str]:
    """Of tokenmill and the libraries that are compared."""
    found = {"tokenmill": __version__}
    for name in FRAMEWORKS if benchmark == "loaders" else PACKAGES:
        try:
            found[name.removesuffix("_cpu")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def print_report(report: Report, columns: Sequence[Column]) -> None:
    """Print the tables, what they mean, and where and how it was measured, on stdout."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal or console.width > WIDTH:
        console = Console(highlight=False, width=WIDTH)
    for group in report.groups:
        console.print(_make_table([row for row in report.rows if row.group == group], columns, group))
        console.print()
    for verdict in report.verdicts:
        _print_item(console, verdict, "bold")
    for note in report.notes:
        _print_item(console, note)
    for name, reason in report.left_out.items():
        _print_item(console, f"left out: {name}: {reason}", "yellow")
    console.print()
    for name, value in _provenance(report):
        _print_item(console, value, "dim", label=f"{name:<8}")
    # Not folded, so that it can be copied.
    console.print(f"command  {command()}", style="dim", markup=False, soft_wrap=True)


def _make_table(rows: Sequence[Row], columns: Sequence[Column], title: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.title, table.title_justify = title or None, "left"
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *(column.show(row) for column in columns))
    return table


def _print_item(console: Any, text: str, style: str = "", label: str = "-") -> None:
    from rich.table import Table
    from rich.text import Text

    item = Table.grid(padding=(0, 1))
    item.add_row(Text(label, style="dim"), Text(text, style=style))
    console.print(item)


def _provenance(report: Report) -> list[tuple[str, str]]:
    machine = report.machine
    lines = [
        ("input", _describe(report.input)),
        ("machine", machine.line()),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions(report.benchmark).items())),
    ]
    if machine.load > BUSY * machine.cores:
        busy = f"others were at work when this began (load {machine.load:.1f} on {machine.cores} cores)"
        lines.append(("busy", f"{busy}: look at ratios, not at absolute figures"))
    return lines


def _describe(input: Mapping[str, Any]) -> str:
    if "num_documents" not in input:
        return f"{input['path']}: {format_count(input['num_tokens'])} tokens ({format_bytes(input['num_bytes'])})"
    size = f"{input['num_documents']:,} documents, {input['num_bytes'] / 1e6:.1f} MB of text"
    part = "" if input["is_whole"] else " (a part of the input; --max-mb takes more)"
    rejects = f", {input['num_rejects']:,} bad records passed over" if input["num_rejects"] else ""
    return f"{size}{part}, {input['tokenizer']}{rejects}"
