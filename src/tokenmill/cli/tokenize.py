"""`tokenmill tokenize`, and `tokenmill finish`, which completes a run that several jobs share."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli._config import merge_config
from tokenmill.cli._flags import INPUTS, Store, switch
from tokenmill.cli._output import exit_when_interrupted
from tokenmill.cli.estimate import run_estimate

if TYPE_CHECKING:
    from tokenmill.executors.base import Executor

__all__ = ["finish", "tokenize"]

_reading, _supervised, _tokens, _output, _running, _display = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Reading", "Supervised data", "Tokens", "Output", "Running", "Display")
)


def tokenize(
    context: typer.Context,
    inputs: Annotated[list[str] | None, typer.Argument(metavar="INPUT...", help=INPUTS)] = None,
    out: Annotated[str | None, _output("-o", "--out", help="Directory of the store, or s3://BUCKET/PATH.")] = None,
    tokenizer: Annotated[
        str | None, _tokens(help="Directory, tokenizer.json, .model, .tiktoken, tiktoken:NAME, bytes, or a Hub id.")
    ] = None,
    config: Annotated[Path | None, _running(help="YAML file whose keys are these flags; flags here win.")] = None,
    text_key: Annotated[
        str | None, _reading(help="Field that holds the text; dots go into nested objects \\[default: text].")
    ] = None,
    keep_keys: Annotated[str | None, _reading(help="Fields to keep beside each document: id,source.")] = None,
    format: Annotated[str, _reading(help="auto, jsonl, json, parquet or text.")] = "auto",
    separator: Annotated[
        str | None, _reading(help="Plain text: the separator of documents (\\n is a line end).")
    ] = None,
    whole_files: Annotated[bool, _reading("--whole-files", help="Plain text: each file is one document.")] = False,
    max_document_bytes: Annotated[str, _reading(help="A longer text is a reject.")] = "256MB",
    limit: Annotated[int | None, _reading(help="Only the first N documents.")] = None,
    messages_key: Annotated[str | None, _supervised(help="Field with a list of messages.")] = None,
    prompt_key: Annotated[str | None, _supervised(help="Field with the prompt, which is not trained on.")] = None,
    response_key: Annotated[str | None, _supervised(help="Field with the response, which is.")] = None,
    chosen_key: Annotated[str | None, _supervised(help="Preference pairs: field with the better answer.")] = None,
    rejected_key: Annotated[str | None, _supervised(help="Field with the other answer.")] = None,
    prompts_only: Annotated[
        bool, _supervised("--prompts-only", help="Records are prompts, for reinforcement learning.")
    ] = False,
    template: Annotated[
        str | None, _supervised(help="How both are put together \\[default: {prompt}\\n{response}].")
    ] = None,
    chat_template: Annotated[
        str | None, _supervised(metavar="FILE", help="Jinja template for messages \\[default: the tokenizer's].")
    ] = None,
    weight_key: Annotated[str | None, _supervised(help="Field with the weight of a record, or of spans of it.")] = None,
    template_date: Annotated[
        str | None, _supervised(metavar="DATE", help="The day that a chat template writes: 2026-01-31.")
    ] = None,
    template_values: Annotated[
        str | None, _supervised(metavar="JSON", help="""Names for a chat template: '{"enable_thinking": false}'.""")
    ] = None,
    train_on: Annotated[
        str | None, _supervised(metavar="all|last|TURNS", help="Turns to train on, such as 1,-1 \\[default: all].")
    ] = None,
    train_roles: Annotated[str | None, _supervised(help="Roles to train on \\[default: assistant].")] = None,
    mask_reasoning: Annotated[bool, _supervised("--mask-reasoning", help="No loss on reasoning fields.")] = False,
    mask_tool_calls: Annotated[bool, _supervised("--mask-tool-calls", help="No loss on calls of tools.")] = False,
    allow_no_stop: Annotated[
        bool, _supervised("--allow-no-stop", help="Also if no trained token would ever end a turn.")
    ] = False,
    eos: Annotated[
        bool | None,
        _tokens(
            "--eos/--no-eos", help="End every document with the end-of-text token \\[default: yes, but for messages]."
        ),
    ] = None,
    bos: Annotated[
        bool | None,
        _tokens(
            "--bos/--no-bos",
            help="Begin every document with the beginning-of-text token \\[default: as the tokenizer does].",
        ),
    ] = None,
    eos_token: Annotated[str | None, _tokens(help="The end-of-text token, as string or id.")] = None,
    bos_token: Annotated[str | None, _tokens(help="The beginning-of-text token, as string or id.")] = None,
    special_tokens: Annotated[
        str | None,
        _tokens(
            help="Special-token strings in texts: as-text, parse or error \\[default: as-text; error with templates]."
        ),
    ] = None,
    engine: Annotated[
        str, _tokens(help="auto, gigatoken, wordcache, huggingface, sentencepiece, tiktoken or bytes.")
    ] = "auto",
    val_fraction: Annotated[float, _output(help="Share of documents for the val split.")] = 0.0,
    seed: Annotated[int, _output(help="Seed of the split.")] = 0,
    overwrite: Annotated[bool, _output("--overwrite", help="Remove an existing store first.")] = False,
    workers: Annotated[str, _running(help="Worker processes.")] = "auto",
    memory: Annotated[str, _running(help="Bound for all processes together: 4GB.")] = "auto",
    batch_size: Annotated[int | None, _running(help="Documents per engine call \\[default: by size].")] = None,
    task_bytes: Annotated[str | None, _running(help="Text per task and shard \\[default: by input size].")] = None,
    on_error: Annotated[
        str,
        _running(help="A bad record: fail, or skip and count it; keep-damaged also keeps text of damaged archives."),
    ] = "fail",
    max_errors: Annotated[int | None, _running(help="With skip: stop after this many rejects.")] = None,
    executor: Annotated[
        str, _running(help="local, or ray: the cluster at RAY_ADDRESS, else a new one here.")
    ] = "local",
    rank: Annotated[
        str | None, _running(metavar="N|slurm|kubernetes", help="Do the share of one of several processes.")
    ] = None,
    world_size: Annotated[int | None, _running(help="With --rank: how many processes there are.")] = None,
    affinity: Annotated[bool, _running("--affinity", help="Keep each worker on a core of its own.")] = False,
    numa: Annotated[bool, _running("--numa", help="The same, over all memory nodes in turn.")] = False,
    profile: Annotated[str | None, _running(metavar="FILE", help="Profile of one worker: .txt, or for pstats.")] = None,
    scratch: Annotated[
        str | None, _running(help="Where shards are made before they go to a bucket \\[default: TMPDIR].")
    ] = None,
    dry_run: Annotated[bool, _running("--dry-run", help="Only estimate what it would produce and need.")] = False,
    monitor: Annotated[bool, _display("--monitor", help="Also show cores, stages and workers.")] = False,
    log_json: Annotated[bool, _display("--log-json", help="Progress as JSON lines.")] = False,
    quiet: Annotated[bool, _display("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Tokenize text files into a store; run it again to resume after any stop."""
    started: Executor | None = context.obj
    if dry_run:
        if started is not None:
            started.close()
        run_estimate(merge_config(config, _flags(context), context))
        return
    from tokenmill.pipeline import GUESS_ENGINE

    if started is not None and tokenizer is not None and engine == "auto":
        started.warm(GUESS_ENGINE, tokenizer.encode(errors="replace"))
    from tokenmill.display import Display, Preparation, Silence, choose_display

    display: Display = Silence()
    try:
        merged = merge_config(config, _flags(context), context)
        log_json, quiet = switch(merged, "log_json") or log_json, switch(merged, "quiet") or quiet
        draw: Any = None
        if switch(merged, "monitor") or monitor:
            from tokenmill.display.monitor import draw_monitor as draw
        display = choose_display(log_json=log_json, quiet=quiet, draw=draw)
        if sys.stderr.isatty():
            display.update(Preparation.step("starting"))
        from tokenmill.pipeline.request import Request
        from tokenmill.pipeline.run import run

        request = Request.from_flags(merged)
    except BaseException:
        display.close()
        raise
    if request.executor == "ray":
        from tokenmill.executors.ray import keep_stdout_clean

        keep_stdout_clean()
        if started is not None:
            started.close()
            started = None
    with exit_when_interrupted():
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
