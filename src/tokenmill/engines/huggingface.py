"""The reference for `tokenizer.json`: Hugging Face `tokenizers`, before and from version 1 on.

Version 1 has another Python interface, and is ten to fifty times faster. It returns no offsets, so supervised data with
a normalizer needs an older version; it trains no tokenizers either.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any, Protocol

import numpy as np

from tokenmill.engines._guard import guarded
from tokenmill.engines._split import cut_between_words, splits_words
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.errors import UsageError
from tokenmill.text_batch import TokenBatch

__all__ = ["HuggingFaceEngine", "Library", "check_version", "has_old_interface", "open_library"]


class HuggingFaceEngine(Engine):
    """Encodes with `tokenizers`.

    Workers do not use the library's thread pool: there is one worker per core already, and the pool does not survive a
    fork.
    """

    name = "huggingface"
    memory_per_character = 130

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._file = tokenizer.shown
        self._library: Library = tokenizer.open_library(special_tokens)
        self._splits_words = splits_words(tokenizer)

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text without the special tokens of the post-processor."""
        with guarded(self._file, "cannot encode a text"):
            return self._library.encode(list(texts), threads=self.uses_threads)

    def split(self, text: str, size: int) -> list[str]:
        """Cut between words if the tokenizer is known to keep them apart."""
        return cut_between_words(text, size) if self._splits_words else [text]


class Library(Protocol):
    """What is used of `tokenizers`, in any version."""

    def encode(self, texts: list[str], *, threads: bool = False) -> TokenBatch:
        """Encode each text; `threads` lets the library use its thread pool."""
        ...

    def align(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the span of characters of each."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Decode ids, including special tokens."""
        ...

    def token_id(self, token: str, expected: int) -> int | None:
        """Return the id of a token, which is expected to have this one."""
        ...


class _Before1:
    """`tokenizers` 0.21 to 0.23."""

    def __init__(self, data: bytes, special_tokens: str) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_buffer(data)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = special_tokens == "as-text"

    def encode(self, texts: list[str], *, threads: bool = False) -> TokenBatch:
        parallelism = "true" if threads else "false"
        if os.environ.get("TOKENIZERS_PARALLELISM") != parallelism:
            # The library reads the environment at every call, and another engine may have changed it.
            os.environ["TOKENIZERS_PARALLELISM"] = parallelism
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return TokenBatch.from_lists([encoding.ids for encoding in encodings])

    def align(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_id(self, token: str, expected: int) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found


class _From1:
    """`tokenizers` 1.0, as of its third release candidate."""

    def __init__(self, data: bytes, special_tokens: str) -> None:
        import tokenizers

        library: Any = tokenizers.Tokenizer
        # It reads files only.
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(data)
            file.flush()
            self._backend: Any = library.from_file(file.name)
        self._backend.truncation = None
        self._backend.padding = None
        self._settings: dict[str, Any] = {
            "add_special_tokens": False,
            "encode_special_tokens": special_tokens == "as-text",
        }
        # A split pattern that it does not know is an error of the first call.
        self._backend.encode("a", **self._settings)

    def encode(self, texts: list[str], *, threads: bool = False) -> TokenBatch:
        if threads:
            encodings = self._backend.encode_batch(texts, **self._settings)
        else:
            # Each call for one text runs on the calling thread, whatever the environment says.
            encodings = [self._backend.encode(text, **self._settings) for text in texts]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(encoding) for encoding in encodings], out=offsets[1:])
        ids = [encoding.ids_array for encoding in encodings]
        return TokenBatch(np.concatenate(ids) if ids else np.zeros(0, np.uint32), offsets)

    def align(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise UsageError(
            "this version of tokenizers does not tell where the tokens of a text are, which a loss mask needs if the "
            "tokenizer changes texts before it splits them; install 'tokenizers<1'"
        )

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_id(self, token: str, expected: int) -> int | None:
        return expected if self._backend.decode_tokens([expected]) == [token] else None


def open_library(data: bytes, special_tokens: str = "as-text") -> Library:
    """Load a `tokenizer.json` into `tokenizers`, without its truncation and padding."""
    return _Before1(data, special_tokens) if has_old_interface() else _From1(data, special_tokens)


def check_version(file: str, config: Mapping[str, Any], special_tokens: SpecialTokens) -> None:
    """Refuse a tokenizer to which the installed version may give other ids than the versions before 1."""
    if has_old_interface():
        return
    from tokenmill.engines._version_1 import distrusts

    reason = distrusts(config, parse_special=special_tokens != "as-text")
    if reason is not None:
        raise UsageError(
            f"{file}: tokenizers {metadata.version('tokenizers')} may give it other ids than 0.23: {reason}; install "
            "'tokenizers<1'"
        )


@cache
def has_old_interface() -> bool:
    """Whether `tokenizers` is a version before 1, which can train tokenizers and returns offsets."""
    return metadata.version("tokenizers").startswith("0.")
