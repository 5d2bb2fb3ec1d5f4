"""The fast engine: gigatoken, used so that its ids are always those of the reference.

Measurements have shown what this takes. It gets lists of valid `str` or packed texts, because its own file readers drop
documents without notice. It gets no thread pool, because there is a worker process for each core. `_eligibility` admits
only tokenizers whose structure it implements exactly. Documents with code points that the two libraries classify
differently go to the reference (`_disputes`). `recycle` drops its cache of words, which grows without bound.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.engines._disputes import DisputeFilter, Ranges, disputed_ranges
from tokenmill.engines._eligibility import disputed_ranges_of, engine_config, refuses
from tokenmill.engines._guard import PanicError, guarded
from tokenmill.engines._piece_models import model_config, refuses_model
from tokenmill.engines._split import cut_between_words, has_gap
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.tokenizer import Tokenizer
from tokenmill.text_batch import PackedTexts, TokenBatch, check_range

__all__ = ["GigatokenEngine", "return_plain_arrays", "why_not"]

TIKTOKEN_SCHEMES = {"gpt2": "gpt2", "r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}


def why_not(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> str | None:
    """Explain why this engine may not be used for a tokenizer, or return None."""
    if tokenizer.kind == "huggingface":
        return refuses(tokenizer.config, parse_special=special_tokens != "as-text")
    if tokenizer.kind == "sentencepiece":
        return refuses_model(tokenizer.files[tokenizer.main_file])
    if tokenizer.kind == "tiktoken":
        return None if _scheme(tokenizer) else "it does not know the encoding's split pattern"
    return f"it does not encode {tokenizer.kind}"


class GigatokenEngine(Engine):
    """Encodes with gigatoken. The `reference` encodes documents on which the two may differ."""

    name = "gigatoken"
    memory_per_character = 16

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self._tokenizer, self._special_tokens = tokenizer, special_tokens
        self._load = _loader(tokenizer, special_tokens)
        with guarded(tokenizer.shown):
            self._backend = self._load()
        self._disputes = _dispute_filter(tokenizer, self._backend)
        is_by_words = tokenizer.kind == "tiktoken" or (
            tokenizer.kind == "huggingface" and not tokenizer.config["model"].get("byte_fallback")
        )
        self._cuts_words = is_by_words and not has_gap(tokenizer)
        self.takes_packed = _splits_buffers(self._backend)

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text, and encode it again with the reference if the two may differ."""
        source = _buffer(texts) if isinstance(texts, PackedTexts) and self.takes_packed else list(texts)
        try:
            with guarded(self._tokenizer.shown, "cannot encode a text"):
                encoded = self._backend.encode_batch(source, parallel=False)
        except PanicError:
            # A Rust panic leaves the tokenizer unusable.
            self.recycle()
            self.num_rerouted += len(texts)
            return self.reference.encode(texts)
        batch = _flatten(encoded)
        if self._tokenizer.vocab_size <= 1 << 16:
            # In two bytes, so that later steps read half as much memory.
            check_range(batch.ids, self._tokenizer.vocab_size)
            batch.ids = batch.ids.astype(np.uint16)
        if len(batch) != len(texts):
            if isinstance(texts, PackedTexts):
                # gigatoken drops an empty text between two separators.
                return self.encode(list(texts))
            raise RuntimeError(f"gigatoken returned {len(batch)} documents for {len(texts)}")
        return self._settle_disputes(texts, batch)

    def split(self, text: str, size: int) -> list[str]:
        """Cut between words: every split pattern that this engine knows starts one there."""
        return cut_between_words(text, size) if self._cuts_words else [text]

    @cached_property
    def reference(self) -> Engine:
        """The reference engine, which is loaded for the first document that needs it."""
        from tokenmill.engines import REFERENCES, create

        return create(REFERENCES[self._tokenizer.kind], self._tokenizer, self._special_tokens)

    def recycle(self) -> None:
        """Drop the cache of words, which grows without bound on high-entropy text."""
        del self._backend
        self._backend = self._load()

    def _settle_disputes(self, texts: Sequence[str], batch: TokenBatch) -> TokenBatch:
        if self._disputes is None or (isinstance(texts, PackedTexts) and not texts.leads & self._disputes.leads):
            return batch
        flagged = self._disputes.flag(batch.ids, batch.offsets).tolist()
        disputed = [i for i in flagged if self._disputes.confirms(texts[i])]
        if not disputed:
            return batch
        self.num_rerouted += len(disputed)
        return _replace_documents(batch, disputed, self.reference.encode([texts[i] for i in disputed]))


class _Rows(NamedTuple):
    """The ids of a batch, and the number of ids of each document."""

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]


def return_plain_arrays() -> None:
    """Make gigatoken return two arrays instead of an awkward Array, in a process that belongs to tokenmill.

    gigatoken calls one function of the `awkward` package, to wrap ids and lengths. Importing awkward takes 0.25 s and
    50 MB, and wrapping a batch takes 0.3 ms, a twentieth of the time to encode it. So workers replace the package by a
    module whose function returns the arrays.
    """
    stand_in = ModuleType("awkward")
    stand_in.Array = type("Array", (), {})  # type: ignore[attr-defined]
    stand_in.unflatten = _Rows  # type: ignore[attr-defined]
    sys.modules.setdefault("awkward", stand_in)


def _buffer(texts: PackedTexts) -> Any:
    import gigatoken

    return gigatoken.BytesSource(texts.data, PackedTexts.SEPARATOR)


def _splits_buffers(backend: Any) -> bool:
    """Whether gigatoken splits a buffer at our separator; with byte fallback, only a character can separate texts."""
    try:
        return len(_flatten(backend.encode_batch(_buffer(PackedTexts.of(["a", "b"])), parallel=False))) == 2
    except ValueError:
        return False


def _flatten(encoded: Any) -> TokenBatch:
    if not isinstance(encoded, _Rows):
        return TokenBatch(np.asarray(encoded.layout.content.data), np.asarray(encoded.layout.offsets.data))
    return TokenBatch(encoded.ids, np.append(0, np.cumsum(encoded.lengths, dtype=np.int64)))


def _replace_documents(batch: TokenBatch, which: list[int], replacement: TokenBatch) -> TokenBatch:
    """Replace the documents `which` by those of another batch."""
    documents = np.split(batch.ids, batch.offsets[1:-1])
    for number, ids in zip(which, np.split(replacement.ids, replacement.offsets[1:-1]), strict=True):
        documents[number] = ids
    return TokenBatch(np.concatenate(documents), np.cumsum([0, *map(len, documents)]))


def _dispute_filter(tokenizer: Tokenizer, backend: Any) -> DisputeFilter | None:
    """Create the filter of a tokenizer; None if no character class affects how it splits."""
    ranges: Ranges = ()
    if tokenizer.kind == "huggingface":
        ranges = disputed_ranges_of(tokenizer.config)
    elif tokenizer.kind == "tiktoken":
        # Only the pattern of o200k distinguishes upper and lower case.
        letters_only = _scheme(tokenizer) != "o200k"
        ranges = disputed_ranges(False, letters_only=letters_only, reference="tiktoken")
    return DisputeFilter(ranges, backend.vocab) if ranges else None


def _scheme(tokenizer: Tokenizer) -> str | None:
    """Return gigatoken's name for the split pattern of one of OpenAI's encodings, or None."""
    return TIKTOKEN_SCHEMES.get(json.loads(tokenizer.files["tiktoken.json"])["name"])


def _loader(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> Callable[[], Any]:
    import gigatoken

    if tokenizer.kind == "tiktoken":
        return lambda: _load_tiktoken(tokenizer, special_tokens)
    if tokenizer.kind == "sentencepiece":
        config = model_config(tokenizer.files[tokenizer.main_file])
    else:
        config = engine_config(tokenizer.config, parse_special=special_tokens != "as-text")
    data = msgspec.json.encode(config)
    return lambda: gigatoken.Tokenizer.from_json(data)


def _load_tiktoken(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> Any:
    import gigatoken

    specials = {} if special_tokens == "as-text" else dict(tokenizer.special_tokens)
    with tempfile.TemporaryDirectory() as folder:
        ranks = Path(folder) / tokenizer.main_file
        ranks.write_bytes(tokenizer.files[tokenizer.main_file])
        return gigatoken.Tokenizer.from_tiktoken(str(ranks), pretokenizer=_scheme(tokenizer), special_tokens=specials)
