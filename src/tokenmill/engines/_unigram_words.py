"""Words of Unigram models without the library, for the cache of words: `unigram.c` does it ten times as fast.

It takes words of known characters alone, each of which is normalized to one character whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenmill.engines._characters import SPACES, WILD, apply
from tokenmill.engines._cutting import Cuts
from tokenmill.text_batch import TokenBatch

try:
    from tokenmill.engines.unigram import Unigram
except ImportError:
    Unigram = None  # type: ignore[assignment, misc]

__all__ = ["UnigramWords", "open_unigram"]

Config = Mapping[str, Any]
SPACE, UNKNOWN = 1, 0
_WHITE = tuple(map(chr, SPACES))
_RUNS = {"Regex": " {2,}"}
LARGEST_SCORE = 10_000
"""The scores of trained models are above -20. Sums of larger ones could round by more than the `TIE` of `unigram.c`."""


class UnigramWords:
    """Encodes the words of which it knows all characters."""

    def __init__(self, config: Config, cuts: Cuts, *, drops_spaces: bool) -> None:
        vocab = config["model"]["vocab"]
        spelled = [piece.encode() for piece, _ in vocab]
        edges = np.cumsum([0, *map(len, spelled)], dtype=np.int64)
        scores = np.array([score for _, score in vocab], np.float64)
        joins = drops_spaces or any(step.get("pattern") == _RUNS for step in _normalizers(config))
        if not (np.abs(scores) <= LARGEST_SCORE).all():
            raise ValueError("scores are too large")
        unknown = config["model"].get("unk_id")
        table = _tabulate(cuts, drops_spaces)
        self._model = Unigram(
            b"".join(spelled), edges, scores, table, len(vocab) if unknown is None else unknown, joins, drops_spaces
        )

    def encode(self, words: list[str], encode: Any) -> TokenBatch:
        """Encode words; `encode` encodes those that are left to the library."""
        found, counted = self._model.encode(words)
        ids, counts = np.frombuffer(found, np.uint32), np.frombuffer(counted, np.int64).copy()
        is_left = counts < 0
        if is_left.any():
            rest = encode([words[i] for i in np.flatnonzero(is_left).tolist()])
            counts[is_left] = np.diff(rest.offsets)
            joined = np.empty(int(counts.sum()), np.uint32)
            is_rest = np.repeat(is_left, counts)
            joined[is_rest], joined[~is_rest] = rest.ids, ids
            ids = joined
        return TokenBatch(ids, np.concatenate([[0], np.cumsum(counts)]))


def open_unigram(config: Config, cuts: Cuts, *, parse_special: bool) -> UnigramWords | None:
    """Load a Unigram model whose words begin with a mark; None for other tokenizers."""
    if Unigram is None or config["model"].get("type") != "Unigram":
        return None
    pre_tokenizer = config["pre_tokenizer"]
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *before, last = steps
    is_known = before in ([], [{"type": "WhitespaceSplit"}]) and last["type"] == "Metaspace"
    marks = last.get("prepend_scheme", "always" if last.get("add_prefix_space", True) else "never") == "always"
    is_kept = any(parse_special or not token["special"] for token in config.get("added_tokens") or [])
    if not is_known or not marks or is_kept or not (before or last.get("split", True)):
        return None
    try:
        return UnigramWords(config, cuts, drops_spaces=bool(before))
    except ValueError:
        # It has an empty piece, one that is there twice, or a score that is too large.
        return None


def _normalizers(config: Config) -> list[Config]:
    normalizer = config.get("normalizer")
    if normalizer is None:
        return []
    return list(normalizer["normalizers"]) if normalizer["type"] == "Sequence" else [normalizer]


def _tabulate(cuts: Cuts, drops_spaces: bool) -> Any:
    """Return what each character below U+10000 is normalized to."""
    table = np.full(1 << 16, UNKNOWN, np.uint16)
    groups = np.frombuffer(cuts.groups, np.uint8)
    for code in np.flatnonzero(groups < WILD).tolist():
        text = apply(cuts.normalize, chr(code))
        if text == " " or (drops_spaces and text in _WHITE):
            table[code] = SPACE
        elif len(text) == 1 and text > chr(SPACE) and groups[min(ord(text), 0xFFFF)] < WILD:
            table[code] = ord(text)
    return table
