"""The fast engine: gigatoken, hosted so that its ids are always the reference's.

What it needs of a host, found by measurement: plain lists of valid `str` (its own file
readers drop documents in silence), no thread pool (one worker process per core), a tokenizer
whose structure it implements exactly (`eligibility`), the reference for documents with
code points that the two libraries classify differently (`disputes`), and a cache that is
thrown away when it has grown (`recycle`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.batch import PackedTexts, TokenBatch, check_range
from tokenmill.engines.base import Engine, SpecialTokens
from tokenmill.engines.disputes import DisputeFilter, Ranges, disputed_ranges
from tokenmill.engines.eligibility import disputed_ranges_of, engine_config, refuses
from tokenmill.engines.piece_models import model_config, refuses_model
from tokenmill.engines.splitting import WORD_GAP, cut_between_words
from tokenmill.engines.tokenizer import Tokenizer

__all__ = ["GigatokenEngine", "return_plain_arrays", "why_not"]

TIKTOKEN_SCHEMES = {"gpt2": "gpt2", "r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}


def why_not(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> str | None:
    """Why this engine may not be used for a tokenizer, or None when it may."""
    if tokenizer.kind == "huggingface":
        return refuses(tokenizer.config, parse_special=special_tokens != "as-text")
    if tokenizer.kind == "sentencepiece":
        return refuses_model(tokenizer.files[tokenizer.main_file])
    if tokenizer.kind == "tiktoken":
        return None if _scheme(tokenizer) else "it does not know the encoding's split pattern"
    return f"it does not encode {tokenizer.kind}"


class GigatokenEngine:
    """Encodes with gigatoken; documents it may get wrong go through `reference`."""

    name = "gigatoken"
    memory_per_character = 16

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens, reference: Callable[[], Engine]) -> None:
        self._load = _loader(tokenizer, special_tokens)
        self._backend = self._load()
        self._make_reference = reference
        self._reference: Engine | None = None
        self._vocab_size = tokenizer.vocab_size
        self._disputes = _dispute_filter(tokenizer, self._backend)
        self._cuts_words = _cuts_words(tokenizer)
        self.takes_packed = _splits_buffers(self._backend)
        self.num_rerouted = 0

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Encode each text, and again with the reference where the two may differ."""
        try:
            encoded = self._backend.encode_batch(self._source(texts), parallel=False)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # A Rust panic is none of the above and leaves the tokenizer unusable.
            self.recycle()
            self.num_rerouted += len(texts)
            return self.reference.encode(texts)
        batch = self._narrow(_flatten(encoded))
        if len(batch) != len(texts):
            if isinstance(texts, PackedTexts):
                # An empty text between two separators is none to gigatoken.
                return self.encode(list(texts))
            raise RuntimeError(f"gigatoken returned {len(batch)} documents for {len(texts)}")
        return self._settle_disputes(texts, batch)

    def split(self, text: str, size: int) -> list[str]:
        """Cut between words, where every split pattern that this engine knows starts one."""
        return cut_between_words(text, size) if self._cuts_words else [text]

    @property
    def reference(self) -> Engine:
        """The reference engine, loaded when the first document needs it."""
        if self._reference is None:
            self._reference = self._make_reference()
        return self._reference

    def recycle(self) -> None:
        """Drop the cache of words, which grows without bound on high-entropy text."""
        del self._backend
        self._backend = self._load()

    def _source(self, texts: Sequence[str]) -> Any:
        """What gigatoken is given: strings, or the buffer that already holds them."""
        if isinstance(texts, PackedTexts) and self.takes_packed:
            return _buffer(texts)
        return texts if isinstance(texts, list) else list(texts)

    def _narrow(self, batch: TokenBatch) -> TokenBatch:
        """The ids in two bytes each where they fit, so that all that looks at them reads half as much."""
        if self._vocab_size <= 1 << 16:
            check_range(batch.ids, self._vocab_size)
            batch.ids = batch.ids.astype(np.uint16)
        return batch

    def _settle_disputes(self, texts: Sequence[str], batch: TokenBatch) -> TokenBatch:
        if self._disputes is None:
            return batch
        flagged = self._disputes.flag(batch.ids, batch.offsets).tolist()
        disputed = [i for i in flagged if self._disputes.confirms(texts[i])]
        if not disputed:
            return batch
        self.num_rerouted += len(disputed)
        return _replace_documents(batch, disputed, self.reference.encode([texts[i] for i in disputed]))


class _Rows(NamedTuple):
    """What gigatoken has to say of a batch."""

    ids: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]


def return_plain_arrays() -> None:
    """Let gigatoken return two arrays instead of an awkward Array, in a process that belongs to tokenmill.

    gigatoken asks the `awkward` module for one thing, to wrap ids and lengths. Importing awkward takes
    0.25 s and 50 MB, and wrapping a batch takes 0.3 ms, a twentieth of encoding it; so workers answer
    that one call with the arrays themselves.
    """
    stand_in = ModuleType("awkward")
    stand_in.Array = type("Array", (), {})  # type: ignore[attr-defined]
    stand_in.unflatten = _Rows  # type: ignore[attr-defined]
    sys.modules.setdefault("awkward", stand_in)


def _buffer(texts: PackedTexts) -> Any:
    import gigatoken

    return gigatoken.BytesSource(texts.data, PackedTexts.SEPARATOR)


def _splits_buffers(backend: Any) -> bool:
    """Models with byte fallback do not: gigatoken wants a separator for them that is a character."""
    try:
        return len(_flatten(backend.encode_batch(_buffer(PackedTexts.of(["a", "b"])), parallel=False))) == 2
    except ValueError:
        return False


def _flatten(encoded: Any) -> TokenBatch:
    if not isinstance(encoded, _Rows):
        return TokenBatch(np.asarray(encoded.layout.content.data), np.asarray(encoded.layout.offsets.data))
    offsets = np.zeros(len(encoded.lengths) + 1, np.int64)
    np.cumsum(encoded.lengths, out=offsets[1:])
    return TokenBatch(encoded.ids, offsets)


def _replace_documents(batch: TokenBatch, which: list[int], replacement: TokenBatch) -> TokenBatch:
    """The batch with the documents `which`, in ascending order, taken from `replacement`."""
    lengths = np.diff(batch.offsets)
    lengths[which] = np.diff(replacement.offsets)
    pieces = []
    done = 0
    for number, document in enumerate(which):
        pieces.append(batch.ids[batch.offsets[done] : batch.offsets[document]])
        pieces.append(replacement.ids[replacement.offsets[number] : replacement.offsets[number + 1]])
        done = document + 1
    pieces.append(batch.ids[batch.offsets[done] :])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return TokenBatch(np.concatenate(pieces), offsets)


def _dispute_filter(tokenizer: Tokenizer, backend: Any) -> DisputeFilter | None:
    """None where no character class takes part in how the tokenizer splits."""
    ranges: Ranges = ()
    if tokenizer.kind == "huggingface":
        ranges = disputed_ranges_of(tokenizer.config)
    elif tokenizer.kind == "tiktoken":
        # Only o200k's pattern tells letters by case.
        letters_only = _scheme(tokenizer) != "o200k"
        ranges = disputed_ranges(False, letters_only=letters_only, reference="tiktoken")
    return DisputeFilter(ranges, backend.vocab) if ranges else None


def _scheme(tokenizer: Tokenizer) -> str | None:
    """gigatoken's name for the split pattern of one of OpenAI's encodings."""
    return TIKTOKEN_SCHEMES.get(json.loads(tokenizer.files["tiktoken.json"])["name"])


def _cuts_words(tokenizer: Tokenizer) -> bool:
    if tokenizer.kind == "huggingface":
        added = [token["content"] for token in tokenizer.config.get("added_tokens") or []]
        return not tokenizer.config["model"].get("byte_fallback") and not any(map(WORD_GAP.search, added))
    return tokenizer.kind == "tiktoken" and not any(map(WORD_GAP.search, tokenizer.special_tokens))


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
