"""`tokenmill estimate`, and `tokenize --dry-run`: what a run would produce and need."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from tokenmill.cli._flags import AsJson, Format, Inputs, Memory, TextKey, TokenizerSpec, Workers, count_or_auto, switch
from tokenmill.cli._output import print_json

__all__ = ["estimate", "run_estimate"]


def estimate(
    context: typer.Context,
    inputs: Inputs,
    tokenizer: TokenizerSpec,
    text_key: TextKey = None,
    format: Format = "auto",
    messages_key: Annotated[str | None, typer.Option(help="Supervised data: field with messages.")] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Supervised data: field with the prompt.")] = None,
    response_key: Annotated[str | None, typer.Option(help="Supervised data: field with the response.")] = None,
    chosen_key: Annotated[str | None, typer.Option(help="Preference pairs: field with the better answer.")] = None,
    rejected_key: Annotated[str | None, typer.Option(help="Preference pairs: field with the other answer.")] = None,
    prompts_only: Annotated[bool, typer.Option("--prompts-only", help="Records are prompts.")] = False,
    workers: Workers = "auto",
    memory: Memory = "auto",
    out: Annotated[str, typer.Option("-o", "--out", help="Where the store would go; checks the space there.")] = ".",
    sample: Annotated[float | None, typer.Option(help="Share of the text to encode \\[default: 0.02].")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Also the memory of padded arrays of this length.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate tokens, disk, memory and time of a run from a sample, each with an interval."""
    flags = {key: value for key, value in context.params.items() if key not in ("sample", "seq_len", "as_json")}
    flags["workers"] = count_or_auto(workers, "--workers")
    run_estimate(flags, sample=sample, seq_len=seq_len, as_json=as_json)


def run_estimate(
    flags: dict[str, Any], *, sample: float | None = None, seq_len: int | None = None, as_json: bool = False
) -> None:
    """Estimate a run and print the table or the JSON object."""
    from tokenmill.display import choose_display
    from tokenmill.engines.gigatoken import return_plain_arrays
    from tokenmill.pipeline.request import Request
    from tokenmill.tools.estimate import estimate_run

    return_plain_arrays()
    for name in ("log_json", "quiet", "monitor"):
        switch(flags, name)
    request = Request.from_flags(flags)
    with closing(choose_display()) as display:
        result = estimate_run(request, share=sample, seq_len=seq_len, display=display)
    if as_json:
        print_json(result.as_json())
    else:
        print(result)
    if request.rank is not None:
        print("These are figures of the whole run on this machine, not of one rank.")
