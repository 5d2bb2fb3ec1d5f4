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
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.engines._checks import check_ids, try_encoding
from tokenmill.engines._guard import guarded
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
    """Encodes with tiktoken on the calling thread; it does not split texts, as safe places depend on the encoding."""

    name = "tiktoken"
    memory_per_character = 60

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._file, encoding = tokenizer.shown, tokenizer.open_library()
        as_tokens = partial(encoding.encode, allowed_special="all")
        self._encode = encoding.encode_ordinary if special_tokens == "as-text" else as_tokens

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text, with special-token strings as text or as tokens."""
        with guarded(self._file, "cannot encode a text"):
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


def load_ranks(name: str, path: Path, files: dict[str, bytes]) -> Tokenizer:
    """Load a file of ranks, which the `tiktoken.json` beside it or its own name defines."""
    main_file = path.name
    if "tiktoken.json" not in files:
        definition = _published_definition(main_file, _parse_ranks(str(path), files[main_file]))
        return _tokenizer(name, main_file, files[main_file], definition, path)
    beside = str(path.with_name("tiktoken.json"))
    try:
        definition = msgspec.json.decode(files["tiktoken.json"], type=EncodingDefinition)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            beside, f"is not a description of an encoding, which has name, pattern and special_tokens: {error}"
        ) from None
    check_ids(beside, definition.special_tokens)
    return _tokenizer(name, main_file, files[main_file], definition, path)


def _tokenizer(
    name: str, main_file: str, ranks: bytes, definition: EncodingDefinition, source: Path | None = None
) -> Tokenizer:
    files = {main_file: ranks, "tiktoken.json": msgspec.json.encode(definition)}
    specials, eos = definition.special_tokens, definition.special_tokens.get("<|endoftext|>")
    tokenizer = Tokenizer(name, "tiktoken", main_file, files, 0, specials, None, eos, False, source)
    _check_ranks(tokenizer.shown, _parse_ranks(tokenizer.shown, ranks), specials)
    encoding = open_encoding(tokenizer)
    with guarded(tokenizer.shown):
        size = encoding.n_vocab
    try_encoding(
        tokenizer.shown,
        lambda texts: TokenBatch.from_lists(list(map(encoding.encode_ordinary, texts))),
        size,
        [definition.pattern],
    )
    return replace(tokenizer, vocab_size=size)


def open_encoding(tokenizer: Tokenizer) -> Any:
    """Load a tokenizer into tiktoken."""
    definition = msgspec.json.decode(tokenizer.files["tiktoken.json"], type=EncodingDefinition)
    ranks = _parse_ranks(tokenizer.shown, tokenizer.files[tokenizer.main_file])
    tiktoken = _import_tiktoken()
    with guarded(tokenizer.shown):
        return tiktoken.Encoding(
            name=definition.name,
            pat_str=definition.pattern,
            mergeable_ranks=ranks,
            special_tokens=definition.special_tokens,
        )


def _check_ranks(file: str, ranks: Mapping[bytes, int], specials: Mapping[str, int]) -> None:
    """Refuse ranks that no store can hold or that two tokens have, and a file that lacks a byte."""
    check_ids(file, ranks)
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise DataError(file, f"has no rank for the byte 0x{byte:02X}, so texts that have it cannot be encoded")
    ordinary = set(ranks.values())
    for token, number in specials.items():
        if number in ordinary:
            raise DataError(file, f"has a token of rank {number}, which tiktoken.json gives to {token!r}")


def _published_definition(main_file: str, parsed: dict[bytes, int]) -> EncodingDefinition:
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
    download = openai_public.load_tiktoken_bpe
    openai_public.load_tiktoken_bpe = lambda *_args, **_kwargs: parsed
    try:
        arguments = constructor()
    finally:
        openai_public.load_tiktoken_bpe = download
    return EncodingDefinition(name, arguments["pat_str"], dict(arguments["special_tokens"]))


def _parse_ranks(file: str, data: bytes) -> dict[bytes, int]:
    try:
        return {
            base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines() if line)
        }
    except ValueError:
        raise DataError(file, "is not a .tiktoken file: expected lines of a base64 token and its rank") from None


def _dump_ranks(ranks: Mapping[bytes, int]) -> bytes:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda kv: kv[1]))
    return b"".join(lines)


def _import_tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError:
        raise MissingDependencyError("a tiktoken encoding", "tiktoken") from None
    return tiktoken
