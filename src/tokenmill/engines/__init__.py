"""Engines by name, and the choice between them.

Each kind of tokenizer has one *reference*, the library that defines its ids, and may have a faster engine. `choose`
returns the fastest engine that is known to implement the structure of a tokenizer. Before a run publishes anything,
`pipeline/task/parity.py` compares its ids with the reference on the user's own documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

import msgspec

from tokenmill.engines._checks import check_added, check_function, find_patterns, try_encoding
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from tokenmill.errors import UsageError

__all__ = [
    "ENGINES",
    "REFERENCES",
    "Engine",
    "EngineChoice",
    "EngineName",
    "SpecialTokens",
    "Tokenizer",
    "choose",
    "create",
    "load_tokenizer",
    "open_tokenizer",
]

EngineName = Literal["gigatoken", "huggingface", "sentencepiece", "tiktoken", "bytes"]
ENGINES: dict[EngineName, str] = {
    "gigatoken": "GigatokenEngine",
    "huggingface": "HuggingFaceEngine",
    "sentencepiece": "SentencePieceEngine",
    "tiktoken": "TiktokenEngine",
    "bytes": "BytesEngine",
}
"""The class of each engine, in a module with the engine's name."""
REFERENCES: dict[str, EngineName] = {name: name for name in ENGINES if name != "gigatoken"}
"""The engine that defines the ids of each kind of tokenizer; kinds are named after it."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run, and why a faster one is not used."""

    engine: EngineName
    reference: EngineName
    note: str | None = None
    """Tells the user why the fastest engine cannot be used."""
    named: bool = False
    """Whether the user named this engine. Then a mismatch is an error, and the run does not fall back."""


def create(
    name: EngineName, tokenizer: Tokenizer, special_tokens: SpecialTokens = "as-text", *, threads: bool = False
) -> Engine:
    """Load an engine for a tokenizer. `threads` lets a reference use the thread pool of its library."""
    kind = getattr(import_module(f"tokenmill.engines.{name}"), ENGINES[name])
    engine: Engine = kind(tokenizer, special_tokens)
    engine.uses_threads = threads
    return engine


def choose(tokenizer: Tokenizer, engine: str = "auto", special_tokens: SpecialTokens = "as-text") -> EngineChoice:
    """Return the engine that the user named, or the fastest one that implements the structure of the tokenizer."""
    reference, name = REFERENCES[tokenizer.kind], tokenizer.name
    if special_tokens != "as-text" and not tokenizer.special_tokens:
        raise UsageError(f"--special-tokens {special_tokens}: {name} declares no special tokens")
    if special_tokens != "as-text" and tokenizer.kind in {"sentencepiece", "bytes"}:
        raise UsageError(
            f"--special-tokens {special_tokens} is not possible with {name}: the {reference} library always treats "
            "special-token strings as text; use a tokenizer.json, or --special-tokens as-text"
        )
    if engine not in ("auto", *ENGINES):
        raise UsageError(f"--engine {engine} is not one of auto, {', '.join(ENGINES)}")
    if engine not in ("auto", "gigatoken", reference):
        raise UsageError(f"--engine {engine} cannot load {name}; use auto, gigatoken or {reference}")
    if tokenizer.kind == "huggingface":
        check_function(tokenizer.shown, tokenizer.config)
    if engine == reference:
        _try_reference(tokenizer, special_tokens)
        return EngineChoice(reference, reference, named=True)
    if tokenizer.kind == "bytes":
        if engine == "gigatoken":
            raise UsageError("--engine gigatoken cannot be used for bytes, which are ids already; use --engine auto")
        return EngineChoice("bytes", "bytes")
    from tokenmill.engines.gigatoken import why_not

    reason = why_not(tokenizer, special_tokens)
    if reason is None:
        _try_rest(tokenizer)
        return EngineChoice("gigatoken", reference, named=engine == "gigatoken")
    if engine == "gigatoken":
        raise UsageError(f"--engine gigatoken cannot be used for {name}: {reason}; use --engine auto")
    _try_reference(tokenizer, special_tokens)
    return EngineChoice(reference, reference, note=f"gigatoken is not used for {name}: {reason}")


def _try_reference(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
    """Refuse a tokenizer that its library cannot load or use, or to whose added tokens it gives other ids.

    The other kinds were tried when they were loaded, because only their libraries can read them.
    """
    if tokenizer.kind == "huggingface":
        engine = create("huggingface", tokenizer, special_tokens)
        check_added(tokenizer.shown, tokenizer.config, tokenizer.open_library())
        try_encoding(tokenizer.shown, engine.encode, tokenizer.vocab_size, find_patterns(tokenizer.config))


def _try_rest(tokenizer: Tokenizer) -> None:
    """Let the library read the parts that no check of the fast engine covers: everything but vocabulary and merges.

    Loading these as well would delay the start by a quarter of a second for 128,000 tokens.
    """
    if tokenizer.kind == "huggingface":
        config = {**tokenizer.config, "model": {**tokenizer.config["model"], "vocab": {}, "merges": []}}
        replace(tokenizer, files={tokenizer.main_file: msgspec.json.encode(config)}).open_library()
