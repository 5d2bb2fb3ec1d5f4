"""`tokenmill train-tokenizer`: a vocabulary from the user's own text."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from tokenmill.cli._flags import Format, Inputs, TextKey
from tokenmill.formatting import plural

__all__ = ["train_tokenizer"]


def train_tokenizer(
    inputs: Inputs,
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, special tokens included.")],
    text_key: TextKey = None,
    format: Format = "auto",
    special_tokens: Annotated[str, typer.Option(help="Comma-separated; the first ends documents.")] = "<|endoftext|>",
    sample: Annotated[str, typer.Option(help="Use at most this much text.")] = "200MB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing tokenizer.")] = False,
) -> None:
    """Train a byte-level BPE tokenizer on your own text."""
    from tokenmill.display import choose_display
    from tokenmill.machine import parse_bytes
    from tokenmill.tools.train_tokenizer import train_tokenizer as train

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
    print(f"{trained.path / 'tokenizer.json'}: {plural(trained.vocab_size, 'token')} from {size}")
    print(f"Next: tokenmill tokenize INPUT... -o OUT --tokenizer {quote(str(trained.path))}")
