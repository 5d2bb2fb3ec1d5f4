"""The commands of `tokenmill bench`: flags in; tables, JSON and pictures out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.flags import AsJson, Inputs, TextKey, TokenizerSpec
from tokenmill.cli.output import print_json
from tokenmill.errors import TokenmillError, UsageError

if TYPE_CHECKING:
    from tokenmill.bench.measuring import Effort
    from tokenmill.bench.reporting import Column, Report

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure on your own data and machine: tables, JSON, pictures.")

MaxMb = Annotated[float | None, typer.Option(help="How much text to use \\[default: enough for about a minute].")]
MaxTokensMb = Annotated[float | None, typer.Option("--max-mb", help="How much of the tokens to use \\[default: 256].")]
Repeat = Annotated[int, typer.Option(help="How often everybody runs, in turns.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Save a picture.")]


@app.command(no_args_is_help=True)
def strategies(
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    max_mb: MaxMb = None,
    repeat: Repeat = 3,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ways people tokenize: speed, memory, and what breaks."""
    from tokenmill.bench.documents import Source
    from tokenmill.bench.strategies import bench_strategies
    from tokenmill.bench.tables import STRATEGIES

    with _prepared(repeat, max_mb, plot) as effort:
        report = bench_strategies(Source(inputs, tokenizer, text_key), effort)
    _show(report, STRATEGIES, plot, as_json)


@app.command(no_args_is_help=True)
def engines(
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    max_mb: MaxMb = None,
    repeat: Repeat = 3,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare the engines that load a tokenizer: speed, and whether their ids are the reference's."""
    from tokenmill.bench.documents import Source
    from tokenmill.bench.engines import bench_engines
    from tokenmill.bench.tables import ENGINES

    with _prepared(repeat, max_mb, plot) as effort:
        report = bench_engines(Source(inputs, tokenizer, text_key), effort)
    _show(report, ENGINES, plot, as_json)


@app.command(no_args_is_help=True)
def workers(
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    max_workers: Annotated[int | None, typer.Option(help="The most to try \\[default: all cores].")] = None,
    max_mb: MaxMb = None,
    repeat: Repeat = 3,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Tell what each further worker is worth: speed, speedup and efficiency."""
    from tokenmill.bench.documents import Source
    from tokenmill.bench.tables import WORKERS
    from tokenmill.bench.workers import bench_workers

    with _prepared(repeat, max_mb, plot) as effort:
        report = bench_workers(Source(inputs, tokenizer, text_key), effort, max_workers)
    _show(report, WORKERS, plot, as_json)


@app.command(no_args_is_help=True)
def loaders(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A store, or token files that tokenmill.open reads.")],
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows of a batch; several are measured apart \\[default: 8, 64].")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    num_batches: Annotated[
        int | None, typer.Option(help="Batches of a measurement \\[default: as many as come in half a second].")
    ] = None,
    skip_torch: Annotated[bool, typer.Option("--skip-torch", help="Leave PyTorch out.")] = False,
    skip_jax: Annotated[bool, typer.Option("--skip-jax", help="Leave JAX out.")] = False,
    skip_grain: Annotated[bool, typer.Option("--skip-grain", help="Leave Grain out.")] = False,
    skip_tf: Annotated[bool, typer.Option("--skip-tf", help="Leave TensorFlow out.")] = False,
    max_mb: MaxTokensMb = None,
    repeat: Repeat = 3,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Compare loaders: batches and tokens per second, time to the first batch, memory."""
    from tokenmill.bench.loaders import Wanted, bench_loaders
    from tokenmill.bench.tables import LOADERS

    sizes = batch_size or [8, 64]
    for flag, value in (("batch-size", min(sizes)), ("seq-len", seq_len), ("num-batches", num_batches)):
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value} must be at least 1")
    flags = {"torch": skip_torch, "jax": skip_jax, "grain": skip_grain, "tf": skip_tf}
    skip = [name for name, is_skipped in flags.items() if is_skipped]
    with _prepared(repeat, max_mb, plot) as effort:
        report = bench_loaders(data, Wanted(list(dict.fromkeys(sizes)), seq_len, num_batches, skip), effort)
    _show(report, LOADERS, plot, as_json)


@contextmanager
def _prepared(repeat: int, max_mb: float | None, plot: Path | None) -> Iterator[Effort]:
    """Refuse what cannot work; then a line on stderr says what is going on."""
    from rich.console import Console

    from tokenmill.bench.measuring import Effort
    from tokenmill.bench.plots import check_plot

    if repeat < 1:
        raise UsageError(f"--repeat {repeat} must be at least 1")
    if max_mb is not None and not 0 < max_mb < float("inf"):
        raise UsageError(f"--max-mb {max_mb:g} must be above 0")
    check_plot(plot)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    effort = Effort(None if max_mb is None else max(1, int(max_mb * 1e6)), repeat)
    if not sys.stderr.isatty():
        yield effort
        return
    with Console(stderr=True).status("looking at the inputs") as status:
        yield replace(effort, tell=lambda text: status.update(text))


def _stop(number: int, _frame: FrameType | None) -> None:
    """An error unwinds: the contender that runs is ended and the folder is removed."""
    from tokenmill.pipeline.ending import Interrupted

    raise Interrupted(f"stopped by {signal.Signals(number).name}; nothing is left behind", number)


def _show(report: Report, columns: Sequence[Column], plot: Path | None, as_json: bool) -> None:
    from tokenmill.bench.plots import save_plot
    from tokenmill.bench.reporting import print_report

    if not report.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in report.left_out.items())
        raise TokenmillError(f"nothing could be measured: {reasons}")
    if plot is not None:
        save_plot(report, plot)
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, columns)
