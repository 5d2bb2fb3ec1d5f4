"""The command line: each command reads flags, calls one function and prints the result.

Results go to stdout, progress and errors to stderr. An error is one sentence and exit code 1
(2 for wrong usage); a run that a signal stopped exits with 128 plus the signal's number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill import __version__
from tokenmill.bench.commands import app as bench
from tokenmill.errors import TokenmillError, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Raw text to training batches: tokenize once, choose everything else when loading.",
)

app.add_typer(bench, name="bench")

READING, SUPERVISED, TOKENS, OUTPUT = "Reading", "Supervised data", "Tokens", "Output"
RUN, SHOW = "Running", "Display"
INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"tokenmill {__version__}")
        raise typer.Exit


@app.command(no_args_is_help=True)
def tokenize(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="INPUT...", help="Files, directories, globs, or @list.txt.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("-o", "--out", help="Directory of the store.", rich_help_panel=OUTPUT)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Directory, tokenizer.json, .model, .tiktoken, tiktoken:NAME, bytes, or a Hub id.",
            rich_help_panel=TOKENS,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file whose keys are these flags; flags here win.", rich_help_panel=RUN)
    ] = None,
    text_key: Annotated[
        str, typer.Option(help="Field that holds the text; dots go into nested objects.", rich_help_panel=READING)
    ] = "text",
    keep_keys: Annotated[
        str | None, typer.Option(help="Fields to keep beside each document: id,source.", rich_help_panel=READING)
    ] = None,
    format: Annotated[str, typer.Option(help="auto, jsonl, json, parquet or text.", rich_help_panel=READING)] = "auto",
    separator: Annotated[
        str | None,
        typer.Option(help="Plain text: what stands between documents (\\n is a line end).", rich_help_panel=READING),
    ] = None,
    whole_files: Annotated[
        bool, typer.Option("--whole-files", help="Plain text: each file is one document.", rich_help_panel=READING)
    ] = False,
    max_document_bytes: Annotated[
        str, typer.Option(help="A longer text is a reject.", rich_help_panel=READING)
    ] = "256MB",
    limit: Annotated[int | None, typer.Option(help="Only the first N documents.", rich_help_panel=READING)] = None,
    messages_key: Annotated[
        str | None, typer.Option(help="Field with a list of messages.", rich_help_panel=SUPERVISED)
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option(help="Field with the prompt, which is not trained on.", rich_help_panel=SUPERVISED)
    ] = None,
    response_key: Annotated[
        str | None, typer.Option(help="Field with the response, which is.", rich_help_panel=SUPERVISED)
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="How both are put together \\[default: {prompt}\\n{response}].", rich_help_panel=SUPERVISED),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Jinja template for messages \\[default: the tokenizer's].", rich_help_panel=SUPERVISED
        ),
    ] = None,
    weight_key: Annotated[
        str | None,
        typer.Option(help="Field with the weight of a record, or of spans of it.", rich_help_panel=SUPERVISED),
    ] = None,
    eos: Annotated[
        bool | None,
        typer.Option(
            "--eos/--no-eos",
            help="End every document with the end-of-text token \\[default: yes, but for messages].",
            rich_help_panel=TOKENS,
        ),
    ] = None,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="Begin every document with the beginning-of-text token \\[default: as the tokenizer does].",
            rich_help_panel=TOKENS,
        ),
    ] = None,
    eos_token: Annotated[
        str | None, typer.Option(help="The end-of-text token, as string or id.", rich_help_panel=TOKENS)
    ] = None,
    bos_token: Annotated[
        str | None, typer.Option(help="The beginning-of-text token, as string or id.", rich_help_panel=TOKENS)
    ] = None,
    special_tokens: Annotated[
        str | None,
        typer.Option(
            help="Special-token strings in texts: as-text, parse or error \\[default: as-text; error with templates].",
            rich_help_panel=TOKENS,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="auto, gigatoken, huggingface, sentencepiece, tiktoken or bytes.", rich_help_panel=TOKENS),
    ] = "auto",
    val_fraction: Annotated[
        float, typer.Option(help="Share of documents for the val split.", rich_help_panel=OUTPUT)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the split.", rich_help_panel=OUTPUT)] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove the store that is there first.", rich_help_panel=OUTPUT)
    ] = False,
    workers: Annotated[str, typer.Option(help="Worker processes.", rich_help_panel=RUN)] = "auto",
    memory: Annotated[str, typer.Option(help="Bound for all processes together: 4GB.", rich_help_panel=RUN)] = "auto",
    batch_size: Annotated[
        int | None, typer.Option(help="Documents per engine call \\[default: by size].", rich_help_panel=RUN)
    ] = None,
    task_bytes: Annotated[
        str | None, typer.Option(help="Text per task and shard \\[default: by input size].", rich_help_panel=RUN)
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="A bad record: fail, or skip and count it.", rich_help_panel=RUN)
    ] = "fail",
    max_errors: Annotated[
        int | None, typer.Option(help="With skip: stop after this many rejects.", rich_help_panel=RUN)
    ] = None,
    affinity: Annotated[
        bool, typer.Option("--affinity", help="Keep each worker on a core of its own.", rich_help_panel=RUN)
    ] = False,
    numa: Annotated[
        bool, typer.Option("--numa", help="The same, over all memory nodes in turn.", rich_help_panel=RUN)
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Profile of one worker: .txt, or for pstats.", rich_help_panel=RUN),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate what it would give and take.", rich_help_panel=RUN)
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Also show cores, stages and workers.", rich_help_panel=SHOW)
    ] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Progress as JSON lines.", rich_help_panel=SHOW)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=SHOW)] = False,
) -> None:
    """Tokenize text files into a store; run it again to continue after any stop."""
    if dry_run:
        _estimate(_merge_config(config, _flags(context), context))
        return
    from tokenmill.executors.local import start_executor

    # First of all, because the worker processes can import while this one does.
    executor = start_executor()
    from tokenmill.pipeline.request import Request
    from tokenmill.pipeline.run import run
    from tokenmill.progress import choose_display
    from tokenmill.summary import print_summary

    try:
        merged = _merge_config(config, _flags(context), context)
        log_json, quiet = _switch(merged, "log_json") or log_json, _switch(merged, "quiet") or quiet
        monitor = _switch(merged, "monitor") or monitor
        request = Request.from_flags(merged)
    except BaseException:
        executor.close()
        raise
    display = choose_display(log_json=log_json, quiet=quiet, draw=_monitor() if monitor else None)
    outcome = run(request, display, executor)
    print_summary(outcome, request)


@app.command(no_args_is_help=True)
def estimate(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, directories, globs, or @list.txt.")],
    tokenizer: Annotated[str, typer.Option(help="As for tokenize.")],
    text_key: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    format: Annotated[str, typer.Option(help="auto, jsonl, json, parquet or text.")] = "auto",
    messages_key: Annotated[str | None, typer.Option(help="Supervised data: field with messages.")] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Supervised data: field with the prompt.")] = None,
    response_key: Annotated[str | None, typer.Option(help="Supervised data: field with the response.")] = None,
    workers: Annotated[str, typer.Option(help="Worker processes.")] = "auto",
    memory: Annotated[str, typer.Option(help="Bound for all processes together: 4GB.")] = "auto",
    out: Annotated[str, typer.Option("-o", "--out", help="Where the store would go, to look at its disk.")] = ".",
    sample: Annotated[float | None, typer.Option(help="Share of the text to encode \\[default: 0.02].")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Also the memory of padded arrays of this length.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate tokens, disk, memory and time of a run from a sample, each with an interval."""
    flags = {
        "inputs": inputs,
        "tokenizer": tokenizer,
        "text_key": text_key,
        "format": format,
        "messages_key": messages_key,
        "prompt_key": prompt_key,
        "response_key": response_key,
        "workers": workers if workers == "auto" else _integer(workers, "--workers"),
        "memory": memory,
        "out": out,
    }
    _estimate(flags, sample=sample, seq_len=seq_len, as_json=as_json)


@app.command(no_args_is_help=True)
def status(
    store: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")],
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is done, speed, ETA and memory of a run, from any terminal, also after it has died."""
    import time

    from rich.live import Live

    from tokenmill.status import read_status, render_status

    if as_json:
        _print_json(read_status(store))
    elif not watch:
        _console().print(render_status(read_status(store)))
    else:
        with Live(render_status(read_status(store)), console=_console(), refresh_per_second=4) as live:
            while (now := read_status(store)).state == "running":
                live.update(render_status(now))
                time.sleep(0.5)
            live.update(render_status(now))


ROWS = "Rows"


@app.command(no_args_is_help=True)
def inspect(
    store: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")],
    document: Annotated[int | None, typer.Option(help="Show one document with its tokens in colour.")] = None,
    row: Annotated[int | None, typer.Option(help="Show one training row, by the number that trace has for it.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.", rich_help_panel=ROWS)] = 2048,
    packing: Annotated[str, typer.Option(help="concat, best-fit or pad.", rich_help_panel=ROWS)] = "concat",
    long_documents: Annotated[str, typer.Option(help="split, truncate or drop.", rich_help_panel=ROWS)] = "split",
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", rich_help_panel=ROWS)] = True,
    seed: Annotated[int, typer.Option(help="Of the packing and the shuffle.", rich_help_panel=ROWS)] = 0,
    split: Annotated[str, typer.Option(help="Split of the document or row.")] = "train",
    max_tokens: Annotated[int, typer.Option(help="Show at most this many tokens of a document.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show totals and document lengths, one document with its tokens and ids, or one training row.

    The flags of rows are those of trace and of tokenmill.load, and have the same defaults.
    """
    from tokenmill import inspection
    from tokenmill.loaders import make_rows
    from tokenmill.store.store import TokenStore

    if row is not None and document is not None:
        raise UsageError("say either --row N or --document N, to see one of them")
    opened = TokenStore(store)
    shown: Any
    if row is not None:
        rows = make_rows(
            opened.split(split),
            seq_len=seq_len,
            packing=packing,
            long_documents=long_documents,
            shuffle=shuffle,
            seed=seed,
        )
        show_row = inspection.row_json if as_json else partial(inspection.render_row, max_tokens=max_tokens)
        shown = show_row(opened, rows, row)
    elif document is not None:
        show_one = inspection.document_json if as_json else partial(inspection.render_document, max_tokens=max_tokens)
        shown = show_one(opened, document, split)
    else:
        shown = inspection.overview_json(opened) if as_json else inspection.render_overview(opened)
    _print_json(shown) if as_json else _console().print(shown)


@app.command(no_args_is_help=True)
def trace(
    store: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")],
    step: Annotated[int | None, typer.Option(help="List the documents of this step, counted from 0.")] = None,
    document: Annotated[int | None, typer.Option(help="List the steps that see this document.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens in a row.", rich_help_panel=ROWS)] = 2048,
    batch_size: Annotated[int, typer.Option(help="Rows per rank.", rich_help_panel=ROWS)] = 8,
    world_size: Annotated[int, typer.Option(help="Number of ranks.", rich_help_panel=ROWS)] = 1,
    packing: Annotated[str, typer.Option(help="concat, best-fit or pad.", rich_help_panel=ROWS)] = "concat",
    long_documents: Annotated[str, typer.Option(help="split, truncate or drop.", rich_help_panel=ROWS)] = "split",
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", rich_help_panel=ROWS)] = True,
    seed: Annotated[int, typer.Option(help="Of the packing and the shuffle.", rich_help_panel=ROWS)] = 0,
    split: Annotated[str, typer.Option(help="Split of the store.", rich_help_panel=ROWS)] = "train",
    epochs: Annotated[float, typer.Option(help="With --document: how many epochs to look at.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell which documents a training step saw, or which steps see a document.

    The flags of rows are those of tokenmill.load and have the same defaults.
    """
    from tokenmill.loaders import make_rows
    from tokenmill.store.store import TokenStore
    from tokenmill.tracing import render_sightings, render_step, trace_document, trace_step

    if (step is None) == (document is None):
        raise UsageError("say either --step N, to see its documents, or --document N, to see its steps")
    opened = TokenStore(store)
    rows = make_rows(
        opened.split(split), seq_len=seq_len, packing=packing, long_documents=long_documents, shuffle=shuffle, seed=seed
    )
    if step is not None:
        inputs = [file.path for file in opened.manifest.inputs]
        found = trace_step(rows, step, batch_size=batch_size, world_size=world_size, inputs=inputs)
        _print_json(found) if as_json else _console().print(render_step(found))
    elif document is not None:
        sightings = trace_document(rows, document, batch_size=batch_size, world_size=world_size, epochs=epochs)
        _print_json(sightings) if as_json else _console().print(render_sightings(document, sightings, epochs))


@app.command(no_args_is_help=True)
def verify(
    store: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="[INPUT...]", help="More inputs for --against.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT...", help="Compare ids of a sample with the reference's, from these inputs."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With --against: compare every document.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every byte and every document of a store, and its ids against the reference."""
    from tokenmill.verification import verify as check

    if (more or every) and not against:
        raise UsageError("the inputs to compare with come after --against: tokenmill verify OUT --against INPUT...")
    with _progress() as advance:
        result = check(store, against=[*(against or []), *(more or [])], every=every, advance=advance)
    if as_json:
        _print_json(result)
    elif not result.num_files:
        # Without a manifest nothing was checked.
        raise TokenmillError(result.problems[0])
    else:
        for name, value in result.rows():
            print(f"{name:<12} {value}")
    for problem in result.problems:
        print(problem, file=sys.stderr)
    if not result.is_sound:
        raise TokenmillError(f"{store} has {len(result.problems)} problem{'s' if len(result.problems) > 1 else ''}")
    if not as_json:
        print("sound")


@app.command(no_args_is_help=True)
def report(
    store: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write, such as report.html.")],
    seq_len: Annotated[int, typer.Option(help="Tokens in a row, for the packings.")] = 2048,
    sample_tokens: Annotated[
        int | None, typer.Option(help="Look at about this many tokens \\[default: 64 million].")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of the store first.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures as JSON.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write one page about a store: totals, lengths, packing, tokens, odd documents, checks, the run, a browser."""
    from tokenmill.report import SAMPLE_TOKENS, write_report
    from tokenmill.store.store import TokenStore

    with _progress() as advance:
        figures = write_report(
            TokenStore(store),
            out,
            seq_len=seq_len,
            sample_tokens=SAMPLE_TOKENS if sample_tokens is None else sample_tokens,
            verify=verify,
            json=json,
            overwrite=overwrite,
            advance=advance,
        )
    plural = "s" if figures.num_documents != 1 else ""
    print(f"{out}: {figures.num_documents:,} document{plural}, {figures.num_tokens:,} tokens")
    problems = figures.checks.problems
    if problems:
        raise TokenmillError(f"{store} has {len(problems)} problem{'s' if len(problems) > 1 else ''}; {out} lists them")


@app.command("train-tokenizer", no_args_is_help=True)
def train_tokenizer(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files, directories, globs, or @list.txt.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="How many tokens it shall have.")],
    text_key: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    format: Annotated[str, typer.Option(help="auto, jsonl, json, parquet or text.")] = "auto",
    special_tokens: Annotated[str, typer.Option(help="Comma-separated; the first ends documents.")] = "<|endoftext|>",
    sample: Annotated[str, typer.Option(help="Use at most this much text.")] = "200MB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tokenizer that is there.")] = False,
) -> None:
    """Train a byte-level BPE tokenizer on your own text."""
    from tokenmill.machine import parse_bytes
    from tokenmill.progress import choose_display
    from tokenmill.training import train_tokenizer as train

    trained = train(
        inputs,
        out,
        vocab_size=vocab_size,
        text_key=text_key,
        format=format,
        special_tokens=special_tokens.split(","),
        limit_bytes=parse_bytes(sample, "--sample"),
        overwrite=overwrite,
        display=choose_display(),
    )
    size = f"{trained.num_bytes / 1e6:.1f} MB of text"
    print(f"{trained.path / 'tokenizer.json'}: {trained.vocab_size:,} tokens from {size}")
    print(f"Next: tokenmill tokenize INPUT... -o OUT --tokenizer {trained.path}")


@app.command(no_args_is_help=True)
def export(
    store: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the store.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make.")],
    to: Annotated[
        str,
        typer.Option(
            help="megatron, nanogpt, llmc, datatrove or olmo (whole documents); parquet, hf, pt, mds, litdata or "
            "arrayrecord (rows); npy (one document a row, padded)."
        ),
    ],
    seq_len: Annotated[int | None, typer.Option(help="Tokens per row, for formats of rows.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split \\[default: all].")] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links", help="megatron, datatrove, olmo: hard links to the shards instead of one file for all."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write a store in another trainer's format, and compare what was written with the store."""
    from tokenmill.exporters import export as write

    with _progress() as advance:
        done = write(
            store,
            dest,
            to=to,
            seq_len=seq_len,
            split=split,
            links=links,
            overwrite=overwrite,
            advance=advance,
            note=lambda text: print(f"note: {text}", file=sys.stderr),
        )
    print(done.line(dest))


@app.command()
def demo(
    folder: Annotated[Path | None, typer.Argument(help="Where to work \\[default: a temporary folder].")] = None,
) -> None:
    """Go the whole way on text that every machine has, offline, in under a minute."""
    from tokenmill.demo import run_demo

    run_demo(folder, _console())


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for stages of known size; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description:<20}"), BarColumn(30), TaskProgressColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage)
            bar.update(tasks[stage], completed=done, total=total)

        yield advance


def _monitor() -> Any:
    from tokenmill.monitoring import draw_monitor

    return draw_monitor


def _flags(context: typer.Context) -> dict[str, Any]:
    """What `tokenize` was asked for, without what only says how to show it."""
    shown = {"config", "log_json", "quiet", "dry_run", "monitor"}
    return {key: value for key, value in context.params.items() if key not in shown}


def _estimate(
    flags: dict[str, Any], *, sample: float | None = None, seq_len: int | None = None, as_json: bool = False
) -> None:
    from tokenmill.engines.gigatoken import return_plain_arrays
    from tokenmill.estimation import estimate
    from tokenmill.pipeline.request import Request
    from tokenmill.summary import print_estimate

    return_plain_arrays()
    for name in ("log_json", "quiet", "monitor"):
        _switch(flags, name)
    result = estimate(Request.from_flags(flags), share=sample)
    if as_json:
        _print_json(result.as_json())
    else:
        print_estimate(result, seq_len=seq_len)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _merge_config(config: Path | None, flags: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Flags given on the command line over those of the file, over the defaults."""
    sources = {key: context.get_parameter_source(key) for key in flags}
    merged = {key: flags[key] for key, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    for key, value in (_read_config(config) if config else {}).items():
        name = str(key).replace("-", "_")
        if name in ("no_eos", "no_bos"):
            merged.setdefault(name.removeprefix("no_"), not _switch({name: value}, name))
        else:
            merged.setdefault("inputs" if name == "input" else name, value)
    if isinstance(merged.get("keep_keys"), str):
        merged["keep_keys"] = [key.strip() for key in merged["keep_keys"].split(",") if key.strip()]
    if isinstance(merged.get("inputs"), str):
        merged["inputs"] = [merged["inputs"]]
    if isinstance(merged.get("workers"), str) and merged["workers"] != "auto":
        merged["workers"] = _integer(merged["workers"], "--workers")
    if isinstance(merged.get("separator"), str):
        merged["separator"] = merged["separator"].replace("\\n", "\n").replace("\\t", "\t").replace("\\0", "\0")
    for key, flag in (("inputs", "INPUT"), ("out", "-o OUT"), ("tokenizer", "--tokenizer SPEC")):
        if not merged.get(key):
            raise UsageError(f"{flag} is missing: tokenmill tokenize INPUT... -o OUT --tokenizer SPEC")
    return merged


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"--config {path} is not valid YAML{where}: {said}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"--config {path} must be a mapping of flags to values, such as  tokenizer: gpt2")
    return loaded


def _switch(flags: dict[str, Any], name: str) -> bool:
    """Take a flag that is on or off out of the others."""
    value = flags.pop(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"{name.replace('_', '-')}: {value!r} is neither true nor false, written without quotes")
    return value


def _integer(text: str, flag: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{flag} {text!r} is neither a number nor auto")
    return int(text)


def main() -> None:
    """Run the command line; turn errors into a sentence and an exit code."""
    try:
        code = app(standalone_mode=False)
        # typer turns Ctrl-C into an exit code, which it returns.
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except TokenmillError as error:
        _fail(str(error), getattr(error, "signal_number", None), isinstance(error, UsageError))
    except KeyboardInterrupt:
        _fail("stopped", 2, usage=False)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", None, usage=False)
    except Exception as error:
        # typer raises click's exceptions, or those of its own copy of click: known by what they can do.
        if not hasattr(error, "exit_code"):
            raise
        if hasattr(error, "show"):
            error.show()
        sys.exit(error.exit_code)


def _fail(message: str, signal_number: int | None, usage: bool) -> None:
    bold, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{bold}error:{plain} {message}", file=sys.stderr)
    sys.exit(128 + signal_number if signal_number else 2 if usage else 1)
