"""The documents that readers find by the end-of-text token, compared with those of the store.

Such readers cut wherever the token is. A document without one is joined to the next, and one with several, as a
conversation whose turns all end with it, becomes several documents. Neither raises an error there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.formats._token_blocks import token_blocks
from tokenmill.formats.base import SplitSource
from tokenmill.store.table import Integers

__all__ = ["check_boundaries"]


def check_boundaries(split: SplitSource, reader: str, token: int | None, *, is_first: bool = False) -> None:
    """Refuse a split unless every document has this token once, at its end, or with `is_first` at its start."""
    finds = f"{reader} finds documents by their end-of-text token"
    if is_first:
        finds = f"{reader} finds documents by the token that they begin with"
    if token is None:
        raise UsageError(
            f"{finds}, and those of {split.path} have none; tokenize with --eos, or pass --no-eos-check to export "
            "them all the same"
        )
    wrong = _find_wrong(split, token, is_first=is_first)
    if wrong is None:
        return
    document, is_inside = wrong
    if is_inside:
        # What is before the next document's first token is in this one.
        document -= is_first
        raise UsageError(
            f"{finds}, and document {document} of split {split.name} has id {token} in other places, too, so it would "
            "become several; tokenize with --eos --eos-token TOKEN, a token that no text has, or pass --no-eos-check"
        )
    place = "begin" if is_first else "end"
    raise UsageError(
        f"{finds}, and document {document} of split {split.name} does not {place} with id {token}, so it would be "
        f"joined to another; tokenize with --{'bos' if is_first else 'eos'}, or pass --no-eos-check"
    )


def _find_wrong(split: SplitSource, token: int, *, is_first: bool) -> tuple[int, bool] | None:
    """Find the first document that has the token elsewhere, or (False) not where it should; None if there is none."""
    start, number = 0, 0
    for lengths in split.documents.lengths():
        ends = start + np.cumsum(lengths)
        places = ends - lengths if is_first else ends - 1
        done = 0
        for first, found in _find_token(split, token, start, int(ends[-1])):
            stop = done + int(np.searchsorted(places[done:], first, "left"))
            wrong = _compare(found, places[done:stop])
            if wrong is not None:
                return number + done + wrong[0], wrong[1]
            done = stop
        if done < len(places):
            # What is left are documents without tokens at the end.
            return number + done, False
        start, number = int(ends[-1]), number + len(lengths)
    return None


def _find_token(split: SplitSource, token: int, start: int, stop: int) -> Iterator[tuple[int, Integers]]:
    """Yield the end of each block of tokens, and where in it the token is."""
    first = start
    for block in token_blocks(split, start, stop, split.documents.dtype):
        yield first + len(block), first + np.flatnonzero(block == token)
        first += len(block)


def _compare(found: Integers, expected: Integers) -> tuple[int, bool] | None:
    """Compare places; return which expected one is the first that differs, and whether there is a token before it."""
    if np.array_equal(found, expected):
        return None
    both = min(len(found), len(expected))
    differing = np.flatnonzero(found[:both] != expected[:both])
    place = int(differing[0]) if len(differing) else both
    is_inside = place < len(found) and (place == len(expected) or found[place] < expected[place])
    return place, bool(is_inside)
