"""`train-tokenizer`: a byte-level BPE vocabulary from the user's own text.

The trainer is Hugging Face's; the text comes through tokenmill's readers, so it accepts every input that `tokenize`
accepts. The trainer counts words in memory, so it gets a sample of bounded size, spread over the inputs. The same
inputs give the same tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tokenmill.arguments import local_path
from tokenmill.display import Display, Silence
from tokenmill.engines.huggingface import has_old_interface
from tokenmill.errors import UsageError
from tokenmill.files import write_durably
from tokenmill.formatting import format_bytes, plural
from tokenmill.tools._input_sample import InputSample, open_inputs

__all__ = ["TrainedTokenizer", "train_tokenizer"]

NUM_BYTES = 256
"""A byte-level vocabulary begins with all bytes, so that it can encode any text."""
LARGEST_VOCABULARY = 1_000_000
SAMPLE_BYTES = 200_000_000
FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TrainedTokenizer:
    """The tokenizer that was written, and how much text it was trained on."""

    path: Path
    vocab_size: int
    num_documents: int
    num_bytes: int
    num_rejects: int
    """Records that could not be read and were skipped."""


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
    """Train a byte-level BPE tokenizer on at most `limit_bytes` of text and write its two files into `out`.

    The first special token is the end-of-text token.
    """
    display = display or Silence()
    _check(out, vocab_size, special_tokens, limit_bytes, overwrite)
    files, options = open_inputs(inputs, display, text_key, format)
    sample = InputSample(files, options, limit_bytes, spread=True)
    on_disk = f"{plural(len(files), 'file')} ({format_bytes(sum(file.bytes for file in files))})"
    about = f"about {format_bytes(limit_bytes)} of text, spread over"
    display.say(f"training on {'all text of' if sample.takes_all else about} {on_disk}")
    trained = _train(sample, vocab_size, special_tokens)
    _write(out, trained, special_tokens[0])
    size = int(trained.get_vocab_size())
    if sample.num_rejects:
        display.say(f"{plural(sample.num_rejects, 'record')} could not be read and were skipped", style="yellow")
    if size < vocab_size:
        display.say(f"the text gives only {plural(size, 'token')}, not {vocab_size:,}; use more text", style="yellow")
    return TrainedTokenizer(out, size, sample.num_documents, sample.num_bytes, sample.num_rejects)


def _check(out: Path, vocab_size: int, special_tokens: Sequence[str], limit_bytes: int, overwrite: bool) -> None:
    """Refuse wrong arguments before reading any text."""
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


def _train(sample: InputSample, vocab_size: int, special_tokens: Sequence[str]) -> Any:
    import tokenizers

    if not has_old_interface():
        raise UsageError(
            f"tokenizers {tokenizers.__version__} cannot train tokenizers; install 'tokenizers<1' for train-tokenizer"
        )
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
