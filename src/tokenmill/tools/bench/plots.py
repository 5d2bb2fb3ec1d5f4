"""Plots of a report, as PNG or SVG.

Speeds of contenders differ by a factor of a hundred, so they are dots on a logarithmic scale, with a line from the
slowest to the fastest run. Bars would have to start at zero, which a logarithmic scale does not have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.formatting import format_count
from tokenmill.tools.bench.bench_report import BenchReport, BenchResult
from tokenmill.tools.bench.measurement import Measurement

__all__ = ["check_plot", "save_plot"]

SUFFIXES = (".png", ".svg")
OURS, OTHERS, IDEAL = "#d1495b", "#30638e", "#9a9a9a"
SETTINGS = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenmill",
}
UNITS = {"tokens_per_second": "tokens per second", "mb_per_second": "MB of text per second"}


def check_plot(path: Path | None) -> None:
    """Refuse a file that could not be saved, before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: a plot is a .png or .svg file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"--plot {path} cannot be written")
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot", "plot")


def save_plot(report: BenchReport, path: Path) -> None:
    """Draw a report: speed over workers as a curve, everything else as dots."""
    import matplotlib
    from matplotlib.figure import Figure as Picture

    with matplotlib.rc_context(SETTINGS):
        is_curve = report.benchmark == "workers"
        height = 4.5 if is_curve else 1.4 + 0.34 * len(report.rows) + 0.6 * len(report.groups)
        picture = Picture(figsize=(8, height), layout="constrained")
        if is_curve:
            _draw_workers(picture, report.rows)
        else:
            _draw_dots(picture, report)
        picture.suptitle(_title(report), fontsize=9, x=0.01, ha="left", color="#555555")
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        picture.savefig(path, dpi=150, format=path.suffix[1:].lower(), metadata=metadata)


def _title(report: BenchReport) -> str:
    machine = report.machine
    size = f"{report.input['num_bytes'] / 1e6:.1f} MB"
    what = report.input.get("tokenizer") or f"{format_count(report.input['num_tokens'])} tokens"
    return f"tokenmill bench {report.benchmark}: {what}, {size}; {machine.processor}, {machine.cores} cores"


def _draw_dots(picture: Any, report: BenchReport) -> None:
    """Draw speed on the left, and memory on the right if it was measured for the whole process."""
    key = "tokens_per_second" if report.benchmark == "loaders" else "mb_per_second"
    groups = report.groups
    has_memory = all("peak_memory_bytes" in row.facts for row in report.rows)
    heights = [sum(row.group == group for row in report.rows) for group in groups]
    widths = [3, 2] if has_memory else [1]
    grid = picture.subplots(len(groups), len(widths), squeeze=False, height_ratios=heights, width_ratios=widths)
    low = min(row.figures[key].low for row in report.rows)
    high = max(row.figures[key].high for row in report.rows)
    for group, axes in zip(groups, grid, strict=True):
        rows = sorted((row for row in report.rows if row.group == group), key=lambda row: row.figures[key].median)
        _draw_speeds(axes[0], rows, key)
        # Leave room on the right for the figure after the last dot.
        axes[0].set_xlim(low / 1.6, high * (high / low) ** 0.2 * 1.6)
        axes[0].set_title(group, fontsize=10, loc="left")
        if has_memory:
            _draw_memory(axes[1], rows)
    grid[-1][0].set_xlabel(f"{UNITS[key]} (line: slowest to fastest run)", loc="left")


def _draw_speeds(axes: Any, rows: Sequence[BenchResult], key: str) -> None:
    for place, row in enumerate(rows):
        figure, colour = row.figures[key], _colour(row)
        axes.plot([figure.low, figure.high], [place, place], color=colour, linewidth=2, solid_capstyle="round")
        axes.plot(figure.median, place, "o", color=colour, markersize=7)
        axes.annotate(
            f"{figure.median:.3g}" if key == "mb_per_second" else format_count(figure.median),
            (figure.high, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(
        lambda value, _: format_count(value).replace(".0", "") if value >= 1 else f"{value:g}"
    )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)


def _draw_memory(axes: Any, rows: Sequence[BenchResult]) -> None:
    sizes = [row.facts["peak_memory_bytes"] / 1e6 for row in rows]
    axes.barh(range(len(rows)), sizes, color=[_colour(row) for row in rows], height=0.5)
    for place, size in enumerate(sizes):
        axes.annotate(f"{size:,.0f}", (size, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, 1.25 * max(sizes))
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("peak memory, MB", loc="left")


def _draw_workers(picture: Any, rows: Sequence[BenchResult]) -> None:
    left, right = picture.subplots(1, 2)
    counts = [row.facts["workers"] for row in rows]
    _draw_curve(left, counts, [row.figures["mb_per_second"] for row in rows])
    left.set_ylabel("MB of text per second")
    speedups = [row.figures["speedup"] for row in rows if "speedup" in row.figures]
    right.plot(counts, counts, "--", color=IDEAL, label="ideal")
    _draw_curve(right, counts[: len(speedups)], speedups)
    right.set_ylabel("times as fast as one worker")
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.set_xlabel("workers")
        axes.set_xticks(counts)
        axes.set_xlim(0.5, counts[-1] + 0.5)
        axes.set_ylim(bottom=0)


def _draw_curve(axes: Any, counts: Sequence[int], figures: Sequence[Measurement]) -> None:
    medians = [figure.median for figure in figures]
    below = [figure.median - figure.low for figure in figures]
    above = [figure.high - figure.median for figure in figures]
    axes.errorbar(counts, medians, yerr=[below, above], fmt="o-", color=OURS, capsize=3)


def _colour(row: BenchResult) -> str:
    return OURS if row.name.startswith(("tokenmill", "gigatoken")) else OTHERS
