"""The flags of `tokenmill tokenize`, as types that say their words and the panel where help shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.flags import INPUTS

__all__ = [
    "Affinity",
    "BatchSize",
    "Bos",
    "BosToken",
    "ChatTemplate",
    "Config",
    "DryRun",
    "Engine",
    "Eos",
    "EosToken",
    "Executor",
    "Format",
    "Inputs",
    "KeepKeys",
    "Limit",
    "LogJson",
    "MaxDocumentBytes",
    "MaxErrors",
    "Memory",
    "MessagesKey",
    "Monitor",
    "Numa",
    "OnError",
    "Out",
    "Overwrite",
    "Profile",
    "PromptKey",
    "Quiet",
    "Rank",
    "ResponseKey",
    "Scratch",
    "Seed",
    "Separator",
    "SpecialTokens",
    "TaskBytes",
    "Template",
    "TextKey",
    "Tokenizer",
    "ValFraction",
    "WeightKey",
    "WholeFiles",
    "Workers",
    "WorldSize",
]

READING, SUPERVISED, TOKENS, OUTPUT = "Reading", "Supervised data", "Tokens", "Output"
RUN, SHOW = "Running", "Display"

Inputs = Annotated[list[str] | None, typer.Argument(metavar="INPUT...", help=INPUTS)]
Out = Annotated[
    str | None,
    typer.Option("-o", "--out", help="Directory of the store, or s3://BUCKET/PATH.", rich_help_panel=OUTPUT),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Directory, tokenizer.json, .model, .tiktoken, tiktoken:NAME, bytes, or a Hub id.", rich_help_panel=TOKENS
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="YAML file whose keys are these flags; flags here win.", rich_help_panel=RUN)
]
TextKey = Annotated[
    str | None,
    typer.Option(
        help="Field that holds the text; dots go into nested objects \\[default: text].", rich_help_panel=READING
    ),
]
KeepKeys = Annotated[
    str | None, typer.Option(help="Fields to keep beside each document: id,source.", rich_help_panel=READING)
]
Format = Annotated[str, typer.Option(help="auto, jsonl, json, parquet or text.", rich_help_panel=READING)]
Separator = Annotated[
    str | None,
    typer.Option(help="Plain text: what stands between documents (\\n is a line end).", rich_help_panel=READING),
]
WholeFiles = Annotated[
    bool, typer.Option("--whole-files", help="Plain text: each file is one document.", rich_help_panel=READING)
]
MaxDocumentBytes = Annotated[str, typer.Option(help="A longer text is a reject.", rich_help_panel=READING)]
Limit = Annotated[int | None, typer.Option(help="Only the first N documents.", rich_help_panel=READING)]
MessagesKey = Annotated[str | None, typer.Option(help="Field with a list of messages.", rich_help_panel=SUPERVISED)]
PromptKey = Annotated[
    str | None, typer.Option(help="Field with the prompt, which is not trained on.", rich_help_panel=SUPERVISED)
]
ResponseKey = Annotated[str | None, typer.Option(help="Field with the response, which is.", rich_help_panel=SUPERVISED)]
Template = Annotated[
    str | None,
    typer.Option(help="How both are put together \\[default: {prompt}\\n{response}].", rich_help_panel=SUPERVISED),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Jinja template for messages \\[default: the tokenizer's].", rich_help_panel=SUPERVISED
    ),
]
WeightKey = Annotated[
    str | None, typer.Option(help="Field with the weight of a record, or of spans of it.", rich_help_panel=SUPERVISED)
]
Eos = Annotated[
    bool | None,
    typer.Option(
        "--eos/--no-eos",
        help="End every document with the end-of-text token \\[default: yes, but for messages].",
        rich_help_panel=TOKENS,
    ),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Begin every document with the beginning-of-text token \\[default: as the tokenizer does].",
        rich_help_panel=TOKENS,
    ),
]
EosToken = Annotated[str | None, typer.Option(help="The end-of-text token, as string or id.", rich_help_panel=TOKENS)]
BosToken = Annotated[
    str | None, typer.Option(help="The beginning-of-text token, as string or id.", rich_help_panel=TOKENS)
]
SpecialTokens = Annotated[
    str | None,
    typer.Option(
        help="Special-token strings in texts: as-text, parse or error \\[default: as-text; error with templates].",
        rich_help_panel=TOKENS,
    ),
]
Engine = Annotated[
    str, typer.Option(help="auto, gigatoken, huggingface, sentencepiece, tiktoken or bytes.", rich_help_panel=TOKENS)
]
ValFraction = Annotated[float, typer.Option(help="Share of documents for the val split.", rich_help_panel=OUTPUT)]
Seed = Annotated[int, typer.Option(help="Seed of the split.", rich_help_panel=OUTPUT)]
Scratch = Annotated[
    str | None,
    typer.Option(help="Where shards are made before they go to a bucket \\[default: TMPDIR].", rich_help_panel=RUN),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Remove the store that is there first.", rich_help_panel=OUTPUT)
]
Workers = Annotated[str, typer.Option(help="Worker processes.", rich_help_panel=RUN)]
Memory = Annotated[str, typer.Option(help="Bound for all processes together: 4GB.", rich_help_panel=RUN)]
BatchSize = Annotated[
    int | None, typer.Option(help="Documents per engine call \\[default: by size].", rich_help_panel=RUN)
]
TaskBytes = Annotated[
    str | None, typer.Option(help="Text per task and shard \\[default: by input size].", rich_help_panel=RUN)
]
OnError = Annotated[str, typer.Option(help="A bad record: fail, or skip and count it.", rich_help_panel=RUN)]
MaxErrors = Annotated[int | None, typer.Option(help="With skip: stop after this many rejects.", rich_help_panel=RUN)]
Rank = Annotated[
    str | None,
    typer.Option(metavar="N|slurm|kubernetes", help="Do the share of one of several processes.", rich_help_panel=RUN),
]
WorldSize = Annotated[int | None, typer.Option(help="With --rank: how many processes there are.", rich_help_panel=RUN)]
Executor = Annotated[
    str, typer.Option(help="local, or ray: the cluster at RAY_ADDRESS, else a new one here.", rich_help_panel=RUN)
]
Affinity = Annotated[
    bool, typer.Option("--affinity", help="Keep each worker on a core of its own.", rich_help_panel=RUN)
]
Numa = Annotated[bool, typer.Option("--numa", help="The same, over all memory nodes in turn.", rich_help_panel=RUN)]
Profile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Profile of one worker: .txt, or for pstats.", rich_help_panel=RUN)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only estimate what it would give and take.", rich_help_panel=RUN)
]
Monitor = Annotated[bool, typer.Option("--monitor", help="Also show cores, stages and workers.", rich_help_panel=SHOW)]
LogJson = Annotated[bool, typer.Option("--log-json", help="Progress as JSON lines.", rich_help_panel=SHOW)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=SHOW)]
