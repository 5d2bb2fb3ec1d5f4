"""Texts that tokenizers often get wrong, for the parity check before every run.

A sample of the user's documents contains what is common. These texts contain what is rare: every assigned character of
every alphabet beside a letter and beside a space, all ways to end a text, combining marks in any order, complete and
broken special-token strings. They are about 450 kB, generated from ranges, and always the same. Disputed code points
are in separate texts: the reference encodes such a text, so the rest of it would not be tested.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise, product

from tokenmill.engines._disputes import disputed_ranges

__all__ = ["make_probe_strings"]

# Planes and blocks with characters. CJK and Hangul, whose tens of thousands of characters are alike, and the private
# areas are sampled.
_BLOCKS = (
    *(range(0x80, 0x3400), range(0x4DC0, 0x4E00), range(0xA000, 0xAC00), range(0xD7B0, 0xD800)),
    *(range(0xF900, 0x1FC00), range(0xE0000, 0xE0200)),
)
_SAMPLED = (
    *(range(0x3400, 0x9FFF, 97), range(0xAC00, 0xD7A4, 97), range(0x20000, 0x33480, 397)),
    *(range(0xE000, 0xF900, 997), range(0xF0000, 0x10FFFE, 9973)),
)
_SPACES = [
    *map(chr, (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F)),
    # These are not white space in Unicode, but are often treated as such.
    *"\u205f\u3000\u180e\u200b\u200c\u2060\ufeff\u2800\u2581",
]
_KNOWN_SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|im_start|>", "[CLS]", "[MASK]", "<0x0A>"]


def make_probe_strings(special_tokens: Sequence[str]) -> list[str]:
    """Generate the texts. If there are very many special tokens, only the first are also broken up."""
    return [
        *("", *map(chr, range(128))),
        *_every_character(),
        *_disputed_characters(),
        *_ascii_pairs(),
        *_white_space(),
        *_contractions_and_case(),
        *_digits(),
        *_marks(),
        *_emoji_and_controls(),
        *_code(),
        *_special_strings([*special_tokens, *_KNOWN_SPECIALS]),
        *_long_runs(),
    ]


def _every_character() -> Iterator[str]:
    """Yield all assigned characters except the disputed ones."""
    characters = _undisputed()
    for start in range(0, len(characters), 48):
        # Outside the BMP one occurrence serves both contexts, to save time.
        yield "".join([f"a{c} {c}" if c < "\U00010000" else f"a {c}" for c in characters[start : start + 48]]) + "a1"


@lru_cache(maxsize=1)
def _undisputed() -> list[str]:
    skipped = {code_point for first, last in disputed_ranges(True) for code_point in range(first, last + 1)}
    candidates = map(chr, (code_point for block in (*_BLOCKS, *_SAMPLED) for code_point in block))
    return [c for c in candidates if unicodedata.category(c) != "Cn" and ord(c) not in skipped]


def _disputed_characters() -> Iterator[str]:
    """Yield newly assigned characters: the first of each range, and some after it."""
    for first, last in disputed_ranges(True, exact=True):
        for code_point in range(first, min(last, first + 700) + 1, 37):
            character = chr(code_point)
            yield f"a{character}b {character}{character} 1{character}'s\u0301{character}\u0334"
    # Unassigned and private code points, and noncharacters.
    yield from (f"a{character} {character}1" for character in "\u0378\ue000\ufdd0\uffff\U0001fffe\U000e0fff\U0010ffff")


def _ascii_pairs() -> Iterator[str]:
    """Yield every ASCII character before and after every other."""
    for left in map(chr, range(128)):
        yield "".join([left + chr(right) for right in range(128)])


def _white_space() -> Iterator[str]:
    for space in _SPACES:
        yield from (f"a{space}b{space * 2}c{space * 5}1{space * 17}!{space}\n{space}\n\n{space}d", space, space * 3)
        yield from (f"x {space}y{space} z\t{space}\t{space}.", f"{space}a", f"a{space}", f"a\n{space}", f"a{space}\r\n")
    # The end of a text decides which branch of a pattern matches its last white space.
    for length in range(1, 5):
        for ends in product(("\n", "\r", " ", "\t"), repeat=length):
            yield "a" + "".join(ends)
    for length in range(2, 5):
        yield "".join(["b" + "".join(ends) for ends in product(("\n", "\r\n", " ", "\u3000"), repeat=length)])
    for step in (1, 3, 4, 8):
        yield "\n".join([" " * (step * depth) + "if x:" + "\t" * (depth % 5) for depth in range(40)])
        yield "\r\n".join(["\t" * depth + " " * step + "}" for depth in range(20)])


def _contractions_and_case() -> Iterator[str]:
    # U+017F folds to s and U+212A to k: some patterns that ignore case treat them as contractions.
    endings = [*"stmd", "re", "ve", "ll", *"STMD", "RE", "Ve", "LL", "lL", *"\u017f\u212axl"]
    for mark, ending in product("'\u2019`\u02bc", endings):
        befores = ["", "a", "Z", "1", " ", "\n", "!", "\u00e9", "\u4e2d", "don"]
        afters = ["", "a", "S", " ", "1", "'", "\u0301"]
        yield "".join([before + mark + ending + after for before, after in product(befores, afters)])
        yield mark + ending
    words = ["camelCaseHTTPServer", "ABCdefGHI", "iPhone", "McDonald", "x1Y2z3"]
    words += ["\u01c5a\u01c6A\u01c4", "\u00dfa\u1e9eB"]
    words += ["\u10d0\u1c90\u10d1", "\u13a0\uab70\u13f8", "\u0130I\u0131i", "\u03a3\u03c3\u03c2A"]
    words += ["aBcDe\u02b0F\u05d0G"]
    yield " ".join(words) + "".join(words)
    for first, second, third in product(["a", "B", "\u05d0", "\u02b0", "\u0301", "1", "!", " "], repeat=3):
        yield first + second + third + "Cd" + third + second + first


def _digits() -> Iterator[str]:
    zeros = [ord(c) for c in ["0", *_undisputed()] if unicodedata.decimal(c, None) == 0]
    yield from (f"a{'1234567890' * 3}"[:length] for length in range(2, 20))
    for length in range(1, 12):
        yield " ".join(["".join(chr(zero + (i * 7 + 3) % 10) for i in range(length)) for zero in zeros[:24]])
    yield "".join([f"1{chr(zero + 5)}23{chr(zero)}{chr(zero)}456" for zero in zeros])
    yield "3.14159 1,234,567.89 1e-10 0xDEADBEEF 1_000 12:34:56 2024-02-29 +1 (555) 010-9999 $5 50% 1/2 7th 10\u00b2"
    numbers = [c for c in _undisputed() if unicodedata.category(c) in ("Nl", "No")]
    yield from (f"1{left}{right}2 {left}a{right}" for left, right in pairwise(numbers))


def _marks() -> Iterator[str]:
    """Yield what normalization changes: decomposed letters, marks in any order and number, Hangul in parts."""
    composed = [character for character in _undisputed() if unicodedata.normalize("NFD", character) != character]
    for start in range(0, len(composed), 40):
        group = composed[start : start + 40]
        yield " ".join([unicodedata.normalize("NFD", character) + "x" for character in group])
        yield "".join([character + "\u0323\u0301" for character in group[::4]])
    marks = "\u0334\u0327\u0323\u0345\u0301\u0308\u0338\u05b0\u064b\u0e38\u0f71\u302a\u3099\u20d0\u1dca\ufe20"
    yield from (
        f"e{first}{second}{third} {third}o{first}"
        for first, second, third in islice(product(marks, repeat=3), 0, None, 29)
    )
    yield from (mark for mark in marks)
    yield from (marks, "a" + marks * 4, "\u0301" * 70 + "\u0323" * 40 + "a", "\n\u0301a\u0301\n\u0301")
    yield "\u1112\u1161\u11ab\u1100\u1173\u11af \uac00\u11a8 \u1100\uac00 \u1161\u11a7\uac00\u11a7 \uac00\u11a7 \u3131"
    yield "\u212a\u212b\u2126\u037e\u1fef\u0340\u0374\u0387\u2000\u2329 \ufb01\u01c4\u00b5 <\u0338 >\u0338 ;\u0301"


def _emoji_and_controls() -> Iterator[str]:
    people = "\U0001f468\U0001f469\U0001f466\U0001f9d1"
    yield (
        "\u200d".join(people) + " " + "".join(f"{person}{chr(0x1F3FB + i % 5)}" for i, person in enumerate(people * 3))
    )
    yield (
        "".join(chr(0x1F1E6 + (i * 5) % 26) for i in range(53))
        + " \U0001f3f4"
        + "".join(map(chr, range(0xE0061, 0xE0080)))
    )
    yield "".join(f"{key}\ufe0f\u20e3 " for key in "0123456789*#") + "\u2764\ufe0f\u2764\ufe0e\u2764 \U0001f44d" * 3
    yield "\U0001f600a\U0001f6001\U0001f600!\U0001f600\n\U0001f600'\U0001f600\u200d\u2642\ufe0f"
    yield "a\u200db \u200d\u200dc\u200c \u0915\u094d\u200d\u0937 \u0633\u200c\u0644\u0627\u0645"
    yield "\u202babc\u202c \u05e9\u05dc\u05d5\u05dd 123 \u0645\u0631\u062d\u0628\u0627 \u2067x\u2069\u200f!\u061c1"
    yield from ("\ufeffa", "a\ufeffb\ufeff", "\ufeff \ufeff\n", "\x00", "a\x00b\x00\x00 \x00", "\x00" * 50 + "end")
    yield "".join(f"a{chr(control)} {chr(control)}1" for control in (*range(32), *range(0x7F, 0xA0)))
    yield "\u2581a \u2581\u2581 b\u2581\u2581\u2581c \u2581 d\u2581 \u2581"
    yield from ("\u2581", "\u2581 ", " \u2581", "\u2581\u2581\u2581", " a", "  a", "a ", "a  ", "\u2581a", "a\u2581")
    yield "".join(map(chr, range(0x4E00, 0x9FFF, 61))) + "\u3002" + "".join(map(chr, range(0xAC00, 0xD7A3, 83)))
    yield "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u30ab\uff11\u5e74A\u4e2d1\u56fd\u3000\u300c\u9fa5\u9fa6\u300d"


def _code() -> Iterator[str]:
    yield "def f(x: int = 0) -> list[str]:\n    return [f'{i:>{x}}' for i in range(x) if i % 2 != 0]  # done\n\n\n"
    yield '#include <stdio.h>\n\tint main(void) {\r\n\t\tprintf("%s\\n", "a\\\\b");\r\n\t}\n/** x **/ a->b++ <<= 2;'
    yield "<div class=\"a-b_c\" id='x'>&nbsp;&#x27;</div><!-- -->\n\n<br/>https://example.org/a?b=c&d=%20#e\n"
    yield "SELECT * FROM t WHERE a<>'it''s' AND b IN (1,2,3);--\n$ ls -la ~/*.txt | grep -v '^#' > /dev/null 2>&1\n"
    yield '{"k": [1.5e3, null, true, "\\u00e9\\n"]}\n# T\n\n- *a* **b** `c`\n\n| a | b |\n|---|:-:|\n```py\nx\n```\n'
    yield "\\frac{a_{1}^{2}}{\\sqrt{b}} $x\\in\\mathbb{R}$ @@ -1,2 +3,4 @@ +++ === //// ;;; ((([[[{{{}}}]]]))) \\\\\\n"


def _special_strings(tokens: Sequence[str]) -> Iterator[str]:
    """Yield special tokens alone, embedded, repeated, broken and nested."""
    for token in tokens[:64]:
        yield from (token, f"a{token}b", f" {token} ", f"{token}{token} {token}\n{token}")
        yield from (f"{token}\u0301", f"1{token}1")
        yield f"\u00e9{token}\u4e2d \u200b{token}\n\n{token}'s " + token.upper() + " " + token.replace("|", " | ")
    for token in tokens[:16]:
        middle = len(token) // 2
        left, right = token[:middle], token[middle:]
        yield from (token[:-1], token[1:], left + token + right, f"{left}\n{right}")
        yield " ".join(token[:stop] for stop in range(1, len(token))) + token + token[::-1]
    for start in range(64, len(tokens), 64):
        yield " ".join(tokens[start : start + 64])
    yield "".join(tokens[:256])


def _long_runs() -> Iterator[str]:
    for unit in (*"aZ1 \n\t", "\r\n", *"!=-_", "ab", " a", *"\u00e9\u4e2d\u2581", "'s"):
        yield unit * 700
        yield "x" + unit * 65 + "y"
    yield "\U0001f44d" * 300 + "e\u0301" * 300 + "\u0e01\u0e33" * 200
    yield "".join(chr(97 + (i * i) % 26) for i in range(4000))
    yield " ".join("".join(chr(97 + (i * j) % 26) for j in range(1, i % 17 + 2)) for i in range(400))
