"""`tokenmill tokenize`, and `tokenmill finish`, which completes a run that several jobs share."""

from __future__ import annotations

from typing import Any

import typer

from tokenmill.cli import _tokenize_flags as flag
from tokenmill.cli._config import merge_config
from tokenmill.cli._flags import Store, switch
from tokenmill.cli.estimate import run_estimate

__all__ = ["finish", "tokenize"]


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
    """Tokenize text files into a store; run it again to resume after any stop."""
    if dry_run:
        run_estimate(merge_config(config, _flags(context), context))
        return
    from tokenmill.executors import create
    from tokenmill.pipeline import PRELOAD

    # The worker processes start first, so that they import while this process does.
    started = create("local", PRELOAD) if executor == "local" else None
    from tokenmill.display import choose_display
    from tokenmill.pipeline.request import Request
    from tokenmill.pipeline.run import run

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
    draw: Any = None
    if monitor:
        from tokenmill.display.monitor import draw_monitor as draw
    display = choose_display(log_json=log_json, quiet=quiet, draw=draw)
    outcome = run(request, display, started)
    from tokenmill.tools.summary import print_summary

    print_summary(outcome, request)


def finish(store: Store) -> None:
    """Write the manifest of a run that many processes share, once all of its tasks are done."""
    from tokenmill.pipeline.journal.finish import Incomplete, finish_store
    from tokenmill.tools.summary import print_finished

    try:
        manifest = finish_store(store)
    except Incomplete as error:
        for line in error.details:
            print(line)
        raise
    print_finished(store, manifest)


def _flags(context: typer.Context) -> dict[str, Any]:
    """The flags that define a run, without those that define its display."""
    shown = {"config", "log_json", "quiet", "dry_run", "monitor"}
    return {key: value for key, value in context.params.items() if key not in shown}
