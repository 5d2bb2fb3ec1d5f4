"""Characters in groups, of which every version of Unicode since 3.2 says the same.

Each ASCII character is a group of its own; the others are letters, punctuation marks and symbols.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["HAN", "LOWER", "MARKS", "NUM_GROUPS", "ODD", "OTHER", "REMOTE", "SIGNS", "SPACES", "UPPER", "WILD"]
__all__ += ["LETTERS", "PREPENDED", "Normalize", "apply", "groups_of", "make_groups"]

NUM_GROUPS = 256
LOWER, UPPER, OTHER, HAN, MARKS, SIGNS = 128, 129, 130, 131, 132, 133
"""Letters of category Ll, Lu and Lo, ideographs, punctuation marks, symbols: the same in all versions of Unicode."""
WILD, ODD, REMOTE = 252, 253, 254
"""The rest below U+10000; white space and what attaches to the next character, where nothing is cut; and all above."""

SPACES = frozenset(b"\t\n\v\f\r ")
LETTERS = (LOWER, UPPER, OTHER, HAN)
Normalize = Callable[[str], str]

# White space in any version of Unicode, and what Unicode joins to the next character (Grapheme_Cluster_Break=Prepend).
_ODD = [0x85, 0xA0, 0x1680, 0x180E, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
_PREPENDED = [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0xD4E]
_REMOTE_PREPENDED = [0x110BD, 0x110CD, 0x111C2, 0x111C3, 0x1193F, 0x11941, 0x11A3A, *range(0x11A84, 0x11A8A), 0x11D46]
_REMOTE_PREPENDED += [0x11F02]
# Consonants and vowels of Hangul, which join each other.
_JOINING = range(0x1100, 0x1200)
PREPENDED = (*_PREPENDED, *_REMOTE_PREPENDED)


def apply(normalize: Iterable[Normalize], text: str) -> str:
    """Normalize a single character."""
    for one in normalize:
        text = one(text)
    return text


def groups_of(character: str) -> list[int]:
    """Return the groups that a character can be in, depending on the normalizer."""
    code = ord(character)
    return [code] if code < 128 else [REMOTE] if code > 0xFFFF else [int(_plain_groups()[code]), WILD]


@lru_cache(maxsize=1)
def _plain_groups() -> npt.NDArray[np.uint8]:
    """Return the group of each character as it is in all versions of Unicode since 3.2."""
    old = unicodedata.ucd_3_2_0
    names = {"Ll": LOWER, "Lu": UPPER, "Lo": OTHER}
    names |= dict.fromkeys(("Pd", "Ps", "Pe", "Pi", "Pf", "Po"), MARKS)
    names |= dict.fromkeys(("Sm", "Sc", "Sk", "So"), SIGNS)
    groups = np.full(1 << 16, WILD, np.uint8)
    groups[:128] = np.arange(128)
    for code in range(128, 0xFFFE):
        character = chr(code)
        category = unicodedata.category(character)
        if category in names and category == old.category(character) and not _folds_to_ascii(character):
            groups[code] = names[category]
    groups[0x4E00:0x9FA6] = HAN
    groups[[*_JOINING, ord("▁")]] = WILD
    groups[_ODD + _PREPENDED] = ODD
    return groups


def _folds_to_ascii(character: str) -> bool:
    return any(one < "\x80" for one in character.casefold() + character.lower() + character.upper())


def make_groups(normalize: tuple[Normalize, ...]) -> bytes:
    """Return the group of each character; one that a normalizer changes to something of another group is unknown."""
    groups = _plain_groups().copy()
    if normalize:
        for code in np.flatnonzero((groups >= 128) & (groups < WILD)).tolist():
            text = apply(normalize, chr(code))
            ends = {groups_of(end)[0] for end in (text[:1], text[-1:]) if end}
            if ends != {int(groups[code])}:
                groups[code] = WILD
    return groups.tobytes()
