"""The reference for OpenAI's encodings: `tiktoken`, by name or from a `.tiktoken` rank file.

A rank file contains neither the split pattern nor the special tokens; the code that defines an encoding does. For
OpenAI's own names they come from tiktoken. A store saves them beside the ranks as `tiktoken.json`, so that later it
needs neither the name nor the network.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import DataError, MissingDependencyError, UsageError
from tokenmill.text_batch import TokenBatch

__all__ = ["EncodingDefinition", "TiktokenEngine", "load_named", "load_ranks", "open_encoding"]


class EncodingDefinition(msgspec.Struct, frozen=True):
    """What a rank file does not contain: the name, split pattern and special tokens of the encoding."""

    name: str
    pattern: str
    special_tokens: dict[str, int]


class TiktokenEngine(Engine):
    """Encodes with tiktoken on the calling thread. It does not split texts: where depends on the encoding."""

    name = "tiktoken"
    memory_per_character = 60

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        encoding = tokenizer.open_library()
        as_tokens = partial(encoding.encode, allowed_special="all")
        self._encode = encoding.encode_ordinary if special_tokens == "as-text" else as_tokens

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text, with special-token strings as text or as tokens."""
        return TokenBatch.from_lists([self._encode(text) for text in texts])


def load_named(name: str) -> Tokenizer:
    """Load an encoding that tiktoken knows, from its cache or the network."""
    tiktoken = _import_tiktoken()
    if name not in tiktoken.list_encoding_names():
        raise UsageError(
            f"--tokenizer tiktoken:{name}: tiktoken has no such encoding; it has "
            f"{', '.join(tiktoken.list_encoding_names())}"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:
        raise UsageError(
            f"--tokenizer tiktoken:{name} could not be downloaded ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to "
            f"a folder that has it, or pass a {name}.tiktoken file"
        ) from None
    definition = EncodingDefinition(name, encoding._pat_str, dict(encoding._special_tokens))
    return _tokenizer(name, f"{name}.tiktoken", _dump_ranks(encoding._mergeable_ranks), definition)


def load_ranks(name: str, main_file: str, files: dict[str, bytes]) -> Tokenizer:
    """Load a `.tiktoken` file, which the `tiktoken.json` beside it or its own name defines."""
    if "tiktoken.json" in files:
        definition = msgspec.json.decode(files["tiktoken.json"], type=EncodingDefinition)
    else:
        definition = _published_definition(main_file, files[main_file])
    return _tokenizer(name, main_file, files[main_file], definition)


def _tokenizer(name: str, main_file: str, ranks: bytes, definition: EncodingDefinition) -> Tokenizer:
    files = {main_file: ranks, "tiktoken.json": msgspec.json.encode(definition)}
    specials = definition.special_tokens
    tokenizer = Tokenizer(name, "tiktoken", main_file, files, 0, specials, None, specials.get("<|endoftext|>"), False)
    return replace(tokenizer, vocab_size=open_encoding(tokenizer).n_vocab)


def open_encoding(tokenizer: Tokenizer) -> Any:
    """Load a tokenizer into tiktoken."""
    definition = msgspec.json.decode(tokenizer.files["tiktoken.json"], type=EncodingDefinition)
    return _import_tiktoken().Encoding(
        name=definition.name,
        pat_str=definition.pattern,
        mergeable_ranks=_parse_ranks(tokenizer.main_file, tokenizer.files[tokenizer.main_file]),
        special_tokens=definition.special_tokens,
    )


def _published_definition(main_file: str, ranks: bytes) -> EncodingDefinition:
    """Call tiktoken's own definition of the encoding, with these ranks in place of a download."""
    _import_tiktoken()
    from tiktoken_ext import openai_public

    name = main_file.removesuffix(".tiktoken")
    constructor = openai_public.ENCODING_CONSTRUCTORS.get(name)
    if constructor is None:
        raise UsageError(
            f"--tokenizer {main_file}: a rank file does not carry its split pattern, and {name!r} is not one of "
            f"OpenAI's encodings ({', '.join(openai_public.ENCODING_CONSTRUCTORS)}); put a tiktoken.json with "
            "name, pattern and special_tokens beside it"
        )
    parsed = _parse_ranks(main_file, ranks)
    download = openai_public.load_tiktoken_bpe
    openai_public.load_tiktoken_bpe = lambda *_args, **_kwargs: parsed
    try:
        arguments = constructor()
    finally:
        openai_public.load_tiktoken_bpe = download
    return EncodingDefinition(name, arguments["pat_str"], dict(arguments["special_tokens"]))


def _parse_ranks(main_file: str, data: bytes) -> dict[bytes, int]:
    try:
        return {
            base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines() if line)
        }
    except ValueError:
        raise DataError(main_file, "is not a .tiktoken file: expected lines of a base64 token and its rank") from None


def _dump_ranks(ranks: Mapping[bytes, int]) -> bytes:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda kv: kv[1]))
    return b"".join(lines)


def _import_tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise MissingDependencyError("a tiktoken encoding", "tiktoken") from None
    return tiktoken
