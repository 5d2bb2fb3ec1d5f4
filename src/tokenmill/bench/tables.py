"""The columns of each benchmark's table; with the names of contenders they fit 80 characters."""

from __future__ import annotations

from tokenmill.bench.figures import Figure
from tokenmill.bench.reporting import Column, Row
from tokenmill.progress import format_count

__all__ = ["ENGINES", "LOADERS", "STRATEGIES", "WORKERS"]


def _number(value: float) -> str:
    """Three figures that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _median(head: str, key: str, scale: float = 1.0) -> Column:
    return Column(head, lambda row: _show(row.figures.get(key), scale))


def _show(figure: Figure | None, scale: float) -> str:
    return "" if figure is None else _number(figure.median * scale)


def _spread(key: str, scale: float = 1.0) -> Column:
    return Column(
        "spread", lambda row: f"{_number(row.figures[key].low * scale)}-{_number(row.figures[key].high * scale)}"
    )


def _count(head: str, key: str) -> Column:
    return Column(head, lambda row: format_count(row.figures[key].median))


def _peak(row: Row) -> str:
    return f"{row.facts['peak_memory_bytes'] / 1e6:,.0f}"


def _growth(row: Row) -> str:
    growth = row.facts["memory_growth"]
    return "?" if growth is None else f"{max(0.0, growth):.1f}"


STRATEGIES = (
    _median("MB/s", "mb_per_second"),
    _spread("mb_per_second"),
    _count("docs/s", "documents_per_second"),
    _count("tok/s", "tokens_per_second"),
    _median("CPU s/GB", "cpu_seconds_per_gb"),
    Column("peak MB", _peak),
    Column("+MB/MB", _growth),
)
ENGINES = (
    _median("MB/s", "mb_per_second"),
    _spread("mb_per_second"),
    _median("1st pass", "first_mb_per_second"),
    _count("tok/s", "tokens_per_second"),
    Column("peak MB", _peak),
    Column("ids", lambda row: str(row.facts.get("parity", ""))),
)
WORKERS = (
    _median("MB/s", "mb_per_second"),
    _spread("mb_per_second"),
    _count("tokens/s", "tokens_per_second"),
    _median("speedup", "speedup"),
    Column("efficiency", lambda row: f"{row.figures['efficiency'].median:.0%}" if "efficiency" in row.figures else ""),
    _median("CPU s", "cpu_seconds"),
    Column("peak MB", _peak),
)
LOADERS = (
    _median("batches/s", "batches_per_second"),
    _median("Mtok/s", "tokens_per_second", 1e-6),
    _spread("tokens_per_second", 1e-6),
    _median("first ms", "first_seconds", 1e3),
    _median("memory MB", "memory_bytes", 1e-6),
)
