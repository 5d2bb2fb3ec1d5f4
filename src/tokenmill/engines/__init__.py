"""Engines by name, and the choice between them.

Each kind of tokenizer has one *reference*, the library that defines its ids, and may have a faster engine. `choose`
returns the fastest engine that is known to implement the structure of a tokenizer. Before a run publishes anything,
`pipeline/parity.py` compares its ids with the reference on the user's own documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

import msgspec

from tokenmill.engines._checks import check_added, check_function, find_patterns, try_encoding
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.huggingface import check_version, has_old_interface
from tokenmill.engines.proofs import Proof
from tokenmill.engines.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from tokenmill.errors import UsageError

__all__ = [
    "ENGINES",
    "FAST_ENGINES",
    "REFERENCES",
    "Engine",
    "EngineChoice",
    "EngineName",
    "SpecialTokens",
    "Tokenizer",
    "choose",
    "create",
    "load_tokenizer",
    "make_reference",
    "open_tokenizer",
]

EngineName = Literal["gigatoken", "wordcache", "huggingface", "sentencepiece", "tiktoken", "bytes"]
ENGINES: dict[EngineName, str] = {
    "gigatoken": "GigatokenEngine",
    "wordcache": "WordCacheEngine",
    "huggingface": "HuggingFaceEngine",
    "sentencepiece": "SentencePieceEngine",
    "tiktoken": "TiktokenEngine",
    "bytes": "BytesEngine",
}
"""The class of each engine, in a module with the engine's name."""
FAST_ENGINES: tuple[EngineName, ...] = ("gigatoken", "wordcache")
"""The engines that define no ids, the fastest first."""
REFERENCES: dict[str, EngineName] = {name: name for name in ENGINES if name not in FAST_ENGINES}
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


def make_reference(tokenizer: Tokenizer, special_tokens: SpecialTokens = "as-text") -> Engine:
    """Load the engine that defines the ids of a tokenizer."""
    return create(REFERENCES[tokenizer.kind], tokenizer, special_tokens)


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
    if engine not in ("auto", *FAST_ENGINES, reference):
        raise UsageError(f"--engine {engine} cannot load {name}; use auto, {', '.join(FAST_ENGINES)} or {reference}")
    if tokenizer.kind == "huggingface":
        check_function(tokenizer.shown, tokenizer.config)
        check_version(tokenizer.shown, tokenizer.config, special_tokens)
    if tokenizer.kind == "bytes" and engine in FAST_ENGINES:
        raise UsageError(f"--engine {engine} cannot be used for bytes, which are ids already; use --engine auto")
    if tokenizer.kind == "bytes":
        return EngineChoice(reference, reference, named=engine == reference)
    if engine == reference:
        _try_reference(tokenizer, special_tokens)
        return EngineChoice(reference, reference, named=True)
    note = None
    for fast in FAST_ENGINES:
        if engine in ("auto", fast):
            reason = _find_reason(tokenizer, fast, special_tokens)
            if reason is None:
                return EngineChoice(fast, reference, note=note, named=engine == fast)
            if engine == fast:
                raise UsageError(f"--engine {engine} cannot be used for {name}: {reason}; use --engine auto")
            note = f"{note}, and {fast} neither: {reason}" if note else f"{fast} is not used for {name}: {reason}"
    _try_reference(tokenizer, special_tokens)
    return EngineChoice(reference, reference, note=note)


def _find_reason(tokenizer: Tokenizer, engine: EngineName, special_tokens: SpecialTokens) -> str | None:
    """Explain why a fast engine may not be used, or return None."""
    proof = Proof(f"the choice of {engine}", tokenizer, engine, special_tokens)
    is_proven = proof.find() is not None
    if engine == "wordcache":
        # Its words are the reference's, which is therefore needed in any case.
        from tokenmill.engines.wordcache import why_no_words

        reason = None if is_proven else why_no_words(tokenizer, special_tokens)
        if reason is None and not is_proven:
            _try_reference(tokenizer, special_tokens)
    else:
        from tokenmill.engines.gigatoken import why_not

        reason = None if is_proven else why_not(tokenizer, special_tokens)
        if reason is None and not is_proven:
            _try_rest(tokenizer, special_tokens)
    if reason is None and not is_proven:
        proof.keep({})
    return reason


def _try_reference(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
    """Refuse a tokenizer that its library cannot load or use, or to whose added tokens it gives other ids.

    The other kinds were tried when they were loaded, because only their libraries can read them.
    """
    if tokenizer.kind == "huggingface":
        engine = create("huggingface", tokenizer, special_tokens)
        check_added(tokenizer.shown, tokenizer.config, tokenizer.open_library())
        try_encoding(tokenizer.shown, engine.encode, tokenizer.vocab_size, find_patterns(tokenizer.config))


def _try_rest(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
    """Let the library read the parts that no check of the fast engine covers: everything but vocabulary and merges.

    Loading these as well would delay the start by a quarter of a second for 128,000 tokens.
    """
    if tokenizer.kind == "huggingface" and not has_old_interface():
        # It loads a large tokenizer in no time, and none without a vocabulary.
        _try_reference(tokenizer, special_tokens)
    elif tokenizer.kind == "huggingface":
        config = {**tokenizer.config, "model": {**tokenizer.config["model"], "vocab": {}, "merges": []}}
        replace(tokenizer, files={tokenizer.main_file: msgspec.json.encode(config)}).open_library()
