"""`tokenmill bench`: measurements on the user's data, as tables, JSON and plots."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli._flags import AsJson, Inputs, TextKey, TokenizerSpec
from tokenmill.cli._output import exit_when_interrupted, print_json
from tokenmill.errors import TokenmillError, UsageError

if TYPE_CHECKING:
    from tokenmill.tools.bench.bench_report import BenchReport
    from tokenmill.tools.bench.contenders import Effort

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure on your own data and machine: tables, JSON, plots.")

STRATEGIES = "Compare the ways people tokenize: speed, memory, and what breaks."
ENGINES = "Compare the engines that load a tokenizer: speed, and whether their ids equal the reference's."

MaxMb = Annotated[float | None, typer.Option(help="How much text to use \\[default: enough for about a minute].")]
MaxTokensMb = Annotated[float | None, typer.Option("--max-mb", help="How much of the tokens to use \\[default: 256].")]
Repeat = Annotated[int, typer.Option(help="How often each contender runs, in turns.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Save a plot.")]


@app.command("engines", no_args_is_help=True, help=ENGINES)
@app.command("strategies", no_args_is_help=True, help=STRATEGIES)
def _compare(
    context: typer.Context,
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    max_mb: MaxMb = None,
    repeat: Repeat = 3,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    from tokenmill.tools.bench.corpus import BenchInput
    from tokenmill.tools.bench.engine_race import bench_engines
    from tokenmill.tools.bench.strategy_race import bench_strategies

    bench = bench_engines if context.info_name == "engines" else bench_strategies
    _measure(partial(bench, BenchInput(inputs, tokenizer, text_key)), repeat, max_mb, plot, as_json)


@app.command(no_args_is_help=True)
def workers(
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    max_workers: Annotated[int | None, typer.Option(help="Largest number of workers \\[default: all cores].")] = None,
    max_mb: MaxMb = None,
    repeat: Repeat = 3,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much each further worker gains: speed, speedup and efficiency."""
    from tokenmill.tools.bench.corpus import BenchInput
    from tokenmill.tools.bench.worker_race import bench_workers

    bench = partial(bench_workers, BenchInput(inputs, tokenizer, text_key), max_workers=max_workers)
    _measure(bench, repeat, max_mb, plot, as_json)


@app.command(no_args_is_help=True)
def loaders(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A store, or token files that tokenmill.open reads.")],
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows of a batch; several are measured apart \\[default: 8, 64].")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    num_batches: Annotated[
        int | None, typer.Option(help="Batches per measurement \\[default: as many as half a second takes].")
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
    from tokenmill.tools.bench.loader_race import LoaderChoice, bench_loaders

    sizes = batch_size or [8, 64]
    for flag, value in (("batch-size", min(sizes)), ("seq-len", seq_len), ("num-batches", num_batches)):
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value} must be at least 1")
    flags = {"torch": skip_torch, "jax": skip_jax, "grain": skip_grain, "tf": skip_tf}
    skip = [name for name, is_skipped in flags.items() if is_skipped]
    choice = LoaderChoice(list(dict.fromkeys(sizes)), seq_len, num_batches, skip)
    _measure(partial(bench_loaders, data, choice), repeat, max_mb, plot, as_json)


def _measure(
    bench: Callable[[Effort], BenchReport], repeat: int, max_mb: float | None, plot: Path | None, as_json: bool
) -> None:
    """Check the flags, show on stderr what is being measured, and print the report on stdout."""
    from rich.console import Console

    from tokenmill.tools.bench.bench_report import print_report
    from tokenmill.tools.bench.contenders import Effort
    from tokenmill.tools.bench.plots import check_plot, save_plot

    if repeat < 1:
        raise UsageError(f"--repeat {repeat} must be at least 1")
    if max_mb is not None and not 0 < max_mb < float("inf"):
        raise UsageError(f"--max-mb {max_mb:g} must be above 0")
    check_plot(plot)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    effort = Effort(None if max_mb is None else max(1, int(max_mb * 1e6)), repeat)
    with exit_when_interrupted():
        if sys.stderr.isatty():
            with Console(stderr=True).status("looking at the inputs") as status:
                report = bench(replace(effort, on_stage=lambda text: status.update(text)))
        else:
            report = bench(effort)
    if not report.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in report.left_out.items())
        raise TokenmillError(f"nothing could be measured: {reasons}")
    if plot is not None:
        save_plot(report, plot)
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report)


def _stop(number: int, _frame: FrameType | None) -> None:
    """Raise an error, which kills the running contender and removes the folder on its way out."""
    from tokenmill.pipeline.signals import Interrupted

    raise Interrupted(f"stopped by {signal.Signals(number).name}; nothing is left behind", number)
