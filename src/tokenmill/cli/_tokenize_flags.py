"""The flags of `tokenmill tokenize`: their types, help texts and panels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli._flags import INPUTS

_reading, _supervised, _tokens, _output, _running, _display = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Reading", "Supervised data", "Tokens", "Output", "Running", "Display")
)

Inputs = Annotated[list[str] | None, typer.Argument(metavar="INPUT...", help=INPUTS)]
Out = Annotated[str | None, _output("-o", "--out", help="Directory of the store, or s3://BUCKET/PATH.")]
Tokenizer = Annotated[
    str | None, _tokens(help="Directory, tokenizer.json, .model, .tiktoken, tiktoken:NAME, bytes, or a Hub id.")
]
Config = Annotated[Path | None, _running(help="YAML file whose keys are these flags; flags here win.")]
TextKey = Annotated[
    str | None, _reading(help="Field that holds the text; dots go into nested objects \\[default: text].")
]
KeepKeys = Annotated[str | None, _reading(help="Fields to keep beside each document: id,source.")]
Format = Annotated[str, _reading(help="auto, jsonl, json, parquet or text.")]
Separator = Annotated[str | None, _reading(help="Plain text: what stands between documents (\\n is a line end).")]
WholeFiles = Annotated[bool, _reading("--whole-files", help="Plain text: each file is one document.")]
MaxDocumentBytes = Annotated[str, _reading(help="A longer text is a reject.")]
Limit = Annotated[int | None, _reading(help="Only the first N documents.")]
MessagesKey = Annotated[str | None, _supervised(help="Field with a list of messages.")]
PromptKey = Annotated[str | None, _supervised(help="Field with the prompt, which is not trained on.")]
ResponseKey = Annotated[str | None, _supervised(help="Field with the response, which is.")]
Template = Annotated[str | None, _supervised(help="How both are put together \\[default: {prompt}\\n{response}].")]
ChatTemplate = Annotated[
    str | None, _supervised(metavar="FILE", help="Jinja template for messages \\[default: the tokenizer's].")
]
WeightKey = Annotated[str | None, _supervised(help="Field with the weight of a record, or of spans of it.")]
Eos = Annotated[
    bool | None,
    _tokens("--eos/--no-eos", help="End every document with the end-of-text token \\[default: yes, but for messages]."),
]
Bos = Annotated[
    bool | None,
    _tokens(
        "--bos/--no-bos",
        help="Begin every document with the beginning-of-text token \\[default: as the tokenizer does].",
    ),
]
EosToken = Annotated[str | None, _tokens(help="The end-of-text token, as string or id.")]
BosToken = Annotated[str | None, _tokens(help="The beginning-of-text token, as string or id.")]
SpecialTokens = Annotated[
    str | None,
    _tokens(help="Special-token strings in texts: as-text, parse or error \\[default: as-text; error with templates]."),
]
Engine = Annotated[str, _tokens(help="auto, gigatoken, huggingface, sentencepiece, tiktoken or bytes.")]
ValFraction = Annotated[float, _output(help="Share of documents for the val split.")]
Seed = Annotated[int, _output(help="Seed of the split.")]
Scratch = Annotated[str | None, _running(help="Where shards are made before they go to a bucket \\[default: TMPDIR].")]
Overwrite = Annotated[bool, _output("--overwrite", help="Remove the store that is there first.")]
Workers = Annotated[str, _running(help="Worker processes.")]
Memory = Annotated[str, _running(help="Bound for all processes together: 4GB.")]
BatchSize = Annotated[int | None, _running(help="Documents per engine call \\[default: by size].")]
TaskBytes = Annotated[str | None, _running(help="Text per task and shard \\[default: by input size].")]
OnError = Annotated[str, _running(help="A bad record: fail, or skip and count it.")]
MaxErrors = Annotated[int | None, _running(help="With skip: stop after this many rejects.")]
Rank = Annotated[str | None, _running(metavar="N|slurm|kubernetes", help="Do the share of one of several processes.")]
WorldSize = Annotated[int | None, _running(help="With --rank: how many processes there are.")]
Executor = Annotated[str, _running(help="local, or ray: the cluster at RAY_ADDRESS, else a new one here.")]
Affinity = Annotated[bool, _running("--affinity", help="Keep each worker on a core of its own.")]
Numa = Annotated[bool, _running("--numa", help="The same, over all memory nodes in turn.")]
Profile = Annotated[str | None, _running(metavar="FILE", help="Profile of one worker: .txt, or for pstats.")]
DryRun = Annotated[bool, _running("--dry-run", help="Only estimate what it would produce and need.")]
Monitor = Annotated[bool, _display("--monitor", help="Also show cores, stages and workers.")]
LogJson = Annotated[bool, _display("--log-json", help="Progress as JSON lines.")]
Quiet = Annotated[bool, _display("--quiet", "-q", help="No progress.")]
