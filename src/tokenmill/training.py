"""`train-tokenizer`: a byte-level BPE vocabulary from the user's own text.

The trainer is Hugging Face's; the text comes through tokenmill's readers, so every input
that can be tokenized can be trained on. It counts words in memory, so the text is a sample of
bounded size, spread over the inputs; the same inputs give the same tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.arguments import local_path
from tokenmill.errors import DataError, UsageError
from tokenmill.files import write_durably
from tokenmill.inputs import expand_inputs, text_key_of
from tokenmill.pipeline.plan import InputFile, Span, inspect_inputs
from tokenmill.pipeline.reading import read_span
from tokenmill.progress import Display, Silence, format_bytes
from tokenmill.readers.base import ReadOptions

__all__ = ["TrainedTokenizer", "train_tokenizer"]

NUM_BYTES = 256
"""A byte-level vocabulary begins with all bytes, so that no text is unknown."""
LARGEST_VOCABULARY = 1_000_000
SAMPLE_BYTES = 200_000_000
PLACES, PLACE_BYTES = 32, 4096
"""Plain files are read from this many places, so that a sample is not just their beginning."""
FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TrainedTokenizer:
    """What was made, and from how much text."""

    path: Path
    vocab_size: int
    num_documents: int
    num_bytes: int
    num_rejects: int
    """Records that could not be read, and were passed over."""


def train_tokenizer(
    inputs: Sequence[str],
    out: Path,
    *,
    vocab_size: int,
    text_key: str | None = None,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    limit_bytes: int = SAMPLE_BYTES,
    format: str = "auto",
    overwrite: bool = False,
    display: Display | None = None,
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer and write its two files into the directory `out`.

    The first special token is the end-of-text token. At most `limit_bytes` of text are used.
    """
    display = display or Silence()
    _check(out, vocab_size, special_tokens, limit_bytes, overwrite)
    found = expand_inputs(inputs, display)
    options = ReadOptions(text_key=text_key_of(found, text_key, display))
    sample = _Sample(inspect_inputs(found, format, options), options, limit_bytes)
    display.say(f"training on {sample.describe()}")
    trained = _train(sample, vocab_size, special_tokens)
    _write(out, trained, special_tokens[0])
    size = int(trained.get_vocab_size())
    if sample.num_rejects:
        display.say(f"{sample.num_rejects:,} records could not be read and were passed over", style="yellow")
    if size < vocab_size:
        display.say(f"the text gives only {size:,} tokens, not {vocab_size:,}; use more text", style="yellow")
    return TrainedTokenizer(out, size, sample.num_documents, sample.num_bytes, sample.num_rejects)


def _check(out: Path, vocab_size: int, special_tokens: Sequence[str], limit_bytes: int, overwrite: bool) -> None:
    """Refuse what cannot work, before any text is read."""
    local_path(out, "-o")
    if not special_tokens or not all(special_tokens):
        raise UsageError("--special-tokens is empty; the first one becomes the end-of-text token")
    if len(set(special_tokens)) < len(special_tokens):
        raise UsageError(f"--special-tokens names a token twice: {', '.join(special_tokens)}")
    smallest = NUM_BYTES + len(special_tokens)
    if not smallest <= vocab_size <= LARGEST_VOCABULARY:
        raise UsageError(
            f"--vocab-size {vocab_size} must be from {smallest} (all bytes and {len(special_tokens)} special tokens) "
            f"to {LARGEST_VOCABULARY:,}"
        )
    if limit_bytes < 1:
        raise UsageError(f"--sample {limit_bytes} must be positive")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; choose a directory with -o")
    present = [name for name in FILES if (out / name).exists()]
    if present and not overwrite:
        raise UsageError(f"{out / present[0]} exists; choose another directory with -o, or pass --overwrite")


class _Sample:
    """Texts from all inputs, in a fixed order: of each its share of the bytes, from several places."""

    def __init__(self, files: list[InputFile], options: ReadOptions, limit_bytes: int) -> None:
        self._files = files
        self._options = options
        self._limit_bytes = limit_bytes
        self._total = max(1, sum(file.text_bytes for file in files))
        self.num_documents = 0
        self.num_bytes = 0
        self.num_rejects = 0
        self.first_reject: DataError | None = None

    def describe(self) -> str:
        """What will be read, as far as sizes on disk foretell it."""
        plural = "s" if len(self._files) > 1 else ""
        size = format_bytes(sum(file.bytes for file in self._files))
        if self._total <= self._limit_bytes:
            return f"all text of {len(self._files):,} file{plural} ({size})"
        return (
            f"about {format_bytes(self._limit_bytes)} of text, spread over {len(self._files):,} file{plural} ({size})"
        )

    def texts(self) -> Iterator[str]:
        """The texts; what an input has too little of is not taken from another."""
        for number, file in enumerate(self._files):
            if self._total <= self._limit_bytes:
                yield from self._read(file, Span(number), self._limit_bytes - self.num_bytes)
                continue
            share = max(1, file.text_bytes * self._limit_bytes // self._total)
            before = self.num_bytes
            spans = _places(number, file, share)
            for count, span in enumerate(spans, 1):
                # What one place did not have, the next ones may give.
                yield from self._read(file, span, before + share * count // len(spans) - self.num_bytes)

    def _read(self, file: InputFile, span: Span, quota: int) -> Iterator[str]:
        if quota <= 0:
            return
        for batch in read_span(file, span, self._options):
            self.num_rejects += sum(reject.num_documents for reject in batch.rejects)
            if batch.rejects and self.first_reject is None:
                self.first_reject = DataError(file.shown, batch.rejects[0].detail)
            for text in batch.texts:
                size = len(text.encode())
                if size > quota:
                    text = text[: max(1, len(text) * quota // size)]
                    size = quota
                self.num_documents += 1
                self.num_bytes += size
                quota -= size
                yield text
                if quota <= 0:
                    return


def _places(number: int, file: InputFile, share: int) -> list[Span]:
    """Where to read `share` bytes of one input: in many places of a plain file, at the start of any other."""
    if file.compression != "none" or file.format not in {"jsonl", "text"}:
        return [Span(number)]
    edges = np.linspace(0, file.bytes, max(1, min(PLACES, share // PLACE_BYTES)) + 1).astype(np.int64).tolist()
    return [Span(number, start, stop) for start, stop in pairwise(edges) if stop > start]


def _train(sample: _Sample, vocab_size: int, special_tokens: Sequence[str]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    texts = sample.texts()
    first = next(texts, None)
    if first is None:
        raise sample.first_reject or UsageError("the inputs hold no text to train on")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain([first], texts), trainer)
    return tokenizer


def _write(out: Path, tokenizer: Any, end: str) -> None:
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": end,
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": end,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_durably(out / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n")
        write_durably(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}; choose another directory with -o") from None
