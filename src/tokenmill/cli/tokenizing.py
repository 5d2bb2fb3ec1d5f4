"""`tokenize`, `finish` and `estimate`: a run, the end of one that many share, or what it would give and take."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenmill.cli import tokenize_flags as flag
from tokenmill.cli.config import merge_config
from tokenmill.cli.flags import (
    AnyStore,
    AsJson,
    Format,
    Inputs,
    Memory,
    TextKey,
    TokenizerSpec,
    Workers,
    count_or_auto,
    switch,
)
from tokenmill.cli.output import print_json

__all__ = ["estimate", "finish", "tokenize"]


def tokenize(
    context: typer.Context,
    inputs: flag.Inputs = None,
    out: flag.Out = None,
    tokenizer: flag.Tokenizer = None,
    config: flag.Config = None,
    text_key: flag.TextKey = None,
    keep_keys: flag.KeepKeys = None,
    format: flag.Format = "auto",
    separator: flag.Separator = None,
    whole_files: flag.WholeFiles = False,
    max_document_bytes: flag.MaxDocumentBytes = "256MB",
    limit: flag.Limit = None,
    messages_key: flag.MessagesKey = None,
    prompt_key: flag.PromptKey = None,
    response_key: flag.ResponseKey = None,
    template: flag.Template = None,
    chat_template: flag.ChatTemplate = None,
    weight_key: flag.WeightKey = None,
    eos: flag.Eos = None,
    bos: flag.Bos = None,
    eos_token: flag.EosToken = None,
    bos_token: flag.BosToken = None,
    special_tokens: flag.SpecialTokens = None,
    engine: flag.Engine = "auto",
    val_fraction: flag.ValFraction = 0.0,
    seed: flag.Seed = 0,
    overwrite: flag.Overwrite = False,
    workers: flag.Workers = "auto",
    memory: flag.Memory = "auto",
    batch_size: flag.BatchSize = None,
    task_bytes: flag.TaskBytes = None,
    on_error: flag.OnError = "fail",
    max_errors: flag.MaxErrors = None,
    executor: flag.Executor = "local",
    rank: flag.Rank = None,
    world_size: flag.WorldSize = None,
    affinity: flag.Affinity = False,
    numa: flag.Numa = False,
    profile: flag.Profile = None,
    scratch: flag.Scratch = None,
    dry_run: flag.DryRun = False,
    monitor: flag.Monitor = False,
    log_json: flag.LogJson = False,
    quiet: flag.Quiet = False,
) -> None:
    """Tokenize text files into a store; run it again to continue after any stop."""
    if dry_run:
        _estimate(merge_config(config, _flags(context), context))
        return
    from tokenmill.executors.local import start_executor

    # First of all, because the worker processes can import while this one does.
    started = start_executor() if executor == "local" else None
    from tokenmill.pipeline.request import Request
    from tokenmill.pipeline.run import run
    from tokenmill.progress import choose_display

    try:
        merged = merge_config(config, _flags(context), context)
        log_json, quiet = switch(merged, "log_json") or log_json, switch(merged, "quiet") or quiet
        monitor = switch(merged, "monitor") or monitor
        request = Request.from_flags(merged)
    except BaseException:
        if started is not None:
            started.close()
        raise
    if request.executor == "ray":
        from tokenmill.executors.ray import keep_stdout_clean

        keep_stdout_clean()
        if started is not None:
            started.close()
            started = None
    display = choose_display(log_json=log_json, quiet=quiet, draw=_monitor() if monitor else None)
    outcome = run(request, display, started)
    from tokenmill.summary import print_summary

    print_summary(outcome, request)


def finish(store: AnyStore) -> None:
    """Write the manifest of a run that many processes share, once all of its tasks are done."""
    from tokenmill.pipeline.finish import Incomplete, finish_store
    from tokenmill.summary import print_finished

    try:
        manifest = finish_store(store)
    except Incomplete as error:
        for line in error.details:
            print(line)
        raise
    print_finished(store, manifest)


def estimate(
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    format: Format = "auto",
    messages_key: Annotated[str | None, typer.Option(help="Supervised data: field with messages.")] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Supervised data: field with the prompt.")] = None,
    response_key: Annotated[str | None, typer.Option(help="Supervised data: field with the response.")] = None,
    workers: Workers = "auto",
    memory: Memory = "auto",
    out: Annotated[str, typer.Option("-o", "--out", help="Where the store would go, to look at its disk.")] = ".",
    sample: Annotated[float | None, typer.Option(help="Share of the text to encode \\[default: 0.02].")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Also the memory of padded arrays of this length.")] = None,
    as_json: AsJson = False,
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
        "workers": count_or_auto(workers, "--workers"),
        "memory": memory,
        "out": out,
    }
    _estimate(flags, sample=sample, seq_len=seq_len, as_json=as_json)


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
    from tokenmill.estimation.table import print_estimate
    from tokenmill.pipeline.request import Request
    from tokenmill.progress import choose_display

    return_plain_arrays()
    for name in ("log_json", "quiet", "monitor"):
        switch(flags, name)
    request = Request.from_flags(flags)
    result = estimate(request, share=sample, seq_len=seq_len, display=choose_display())
    if as_json:
        print_json(result.as_json())
    else:
        print_estimate(result)
    if request.rank is not None:
        print("These are figures of the whole run on this machine, not of one rank.")
