"""Strings on which tokenizers differ, for the parity gate: about half a megabyte, the same on every machine.

Every script, with each code point after a letter and after a space; then what text is made of at its
worst: runs of white space, contractions in all cases, digits, emoji sequences, marks without a base, code,
and the strings of the tokenizer's own special tokens, whole, broken and repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["awkward_strings"]

RANGES = (
    (0x0000, 0x33FF, 1),
    (0x3400, 0x9FFF, 101),
    (0xA000, 0xABFF, 1),
    (0xAC00, 0xD7A3, 53),
    (0xD7B0, 0xD7FF, 1),
    (0xE000, 0xF8FF, 499),
    (0xF900, 0x11FFF, 1),
    (0x12000, 0x15FFF, 17),
    (0x16000, 0x16FFF, 1),
    (0x17000, 0x1AFFF, 29),
    (0x1B000, 0x1B2FF, 3),
    (0x1BC00, 0x1FFFF, 1),
    (0x20000, 0x3FFFF, 503),
    (0xE0000, 0xE01FF, 1),
    (0x10FF00, 0x10FFFF, 16),
)
"""First and last code point, and the step: every script whole, ideographs and syllables sampled."""
CHARACTERS_PER_STRING = 64

SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2002\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff\u200b\u200c\u200d\u2060"
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'x", "’s", "’ll", "'")
DIGITS = ("0", "7", "42", "123", "1234", "12345", "1,234,567.89", "0x1F", "1e-10", "٣٤٥٦", "१२३४", "Ⅷ", "½", "①②③④", "𝟙𝟚𝟛𝟜")
EMOJI = ("😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇺🇳🇩🇪🇯", "1️⃣", "❤️", "🧑🏿‍🚀", "\U0001fae8", "🏴\U000e0067\U000e0062\U000e007f")
MARKS = ("e\u0301", "\u0301", " \u0301", "a\u0301\u0300\u0323", "\u0323\u0301q", "\u0eba\u0952", "क्षि", "ำ", "한국", "ﬁ", "Å", "\u212b", "İ", "ß", "ǆ", "ﷺ")
CODE = (
    "def f(x):\n\treturn {'a': [x ** 2, -1]}  # no\r\n\r\n",
    "<a href=\"x?y=1&amp;z\">//</a><!-- -->\n",
    "for(int i=0;i<10;++i){a[i]^=~b->c;}/**/\n        }\n\n\n    ",
    "https://example.org/~a/b.c?d=e%20f#g user@host -----BEGIN",
    "\\frac{1}{2}$$\\alpha_{i,j}^{2}$$ C:\\dir\\file.txt \\n\\t\\u00e9",
    "SELECT * FROM t WHERE a<>'b''c'; -- ===============================",
)


def awkward_strings(special_tokens: Sequence[str]) -> list[str]:
    """The texts, given the strings of the tokenizer's special tokens."""
    return ["", *_scripts(), *_white_space(), *_words(), *EMOJI, *MARKS, *CODE, *_runs(), *_specials(special_tokens)]


def _scripts() -> Iterator[str]:
    """Each code point after and before a letter, and after a space."""
    for first, last, step in RANGES:
        characters = [chr(code) for code in range(first, last + 1, step)]
        for start in range(0, len(characters), CHARACTERS_PER_STRING):
            yield "".join(f"a{c} {c}" for c in characters[start : start + CHARACTERS_PER_STRING])


def _white_space() -> Iterator[str]:
    for space in SPACES:
        yield from (space, space * 2 + "a", f"a{space}b{space * 3}c", f" {space} {space}", f"{space}\n{space}1")
    yield from (" " * n + "x" + "\n" * n for n in (1, 2, 3, 4, 7, 8, 16, 31, 100))
    yield from ("\r\n\r\n a", "\n \n \n", "a \n", " a \r b \n\r c", "\t \t\ta", "   \n   x   \n")


def _words() -> Iterator[str]:
    for contraction in CONTRACTIONS:
        yield from (f"I{contraction} {contraction.upper()}we{contraction.title()}", contraction * 3, f"ж{contraction}1")
    yield from DIGITS
    yield from (f"{a}{b}" for a in DIGITS for b in ("a", ".", " ", "日", "%"))
    yield from ("HelloWorld helloWORLD McDonald iPhone ÉCOLE École ЖжЖ", "a_b-c/d.e,f;g:h!i?j", "...!!!???---___", "«„“”‘’»—…•")


def _runs() -> Iterator[str]:
    for piece in ("a", " ", "\n", "0", "!", "ab", "日", "é", "😀", "a ", "\u0301", "\u200d", "<|", "\0"):
        yield from (piece * n for n in (2, 5, 50, 1000))


def _specials(tokens: Sequence[str]) -> Iterator[str]:
    shown = [*tokens[:64], "<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "[INST]", "<|im_start|>", "<0x0A>", "▁", "▁▁a", "##ing"]
    for token in shown:
        yield from (token, f"a{token}b", f" {token} ", token * 2, token[:-1], token[1:], f"{token}\n{token.upper()}")
