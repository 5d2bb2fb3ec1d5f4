"""Measure on which code points gigatoken and the reference libraries disagree; write disputes.json.

    python scripts/probe_code_points.py             # about three minutes; run it again when a library changes

A tiny byte-level tokenizer for each supported split pattern encodes every code point in several contexts. Its merges
join bytes across the places where a boundary may be, so the ids of both libraries are equal exactly if all boundaries
are. For NFC the script compares the normalized text: each code point next to marks of known class, and all pairs that
could compose.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import sys
import tempfile
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import gigatoken
import tokenizers

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from tokenmill.engines._disputes import merge_ranges
from tokenmill.engines._eligibility import SCHEMES
from tokenmill.engines.decoder import byte_alphabet

OUTPUT = Path(__file__).parent.parent / "src/tokenmill/engines/disputes.json"
Encode = Callable[[list[str]], list[list[int]]]


class Pair(NamedTuple):
    """The two libraries of a comparison."""

    reference: Encode
    engine: Encode


# Together these distinguish all classes of the patterns: upper and lower case, caseless letters, marks, numbers, white
# space, punctuation and symbols, and the rest. Lower case and caseless letters differ only before capitals, white space
# and unassigned code points only between spaces.
TELLING = ["a{}A", "1{}1", "!!{}!", " {}a", "{}Aa", " {} a"]
# More contexts for the assigned characters of all scripts: contractions in either case (some characters fold to s or
# t), line ends, marks, digits, CJK, doubled characters.
CONTEXTS = [
    *("{}a", "{}{}a", " {}{} ", " {}", "  {}  a", "1{}", "12{}34", "{}1", "!{}a", "({})", "\n{}\n", "\r\n{}a", "\t{}"),
    *("a'{}", "'{}'s", "{}'s", "{}'S", "'{}", "'{}l", "'l{}", "'{}e", "'r{}", "'v{}", "'R{}", "'{}E", "'{}{}", " '{}s"),
    *("a\u0301{}a", "a{}\u0301a", "{}\u0301", "!\u0301{}", "A{}A", "{}Z", "Za{}aZ", "A{}Aa", "!{}Aa", "a{}{}A"),
    *("a{}/\n", "{}/\n a", "-{}\r\n\n", "\u00a0{}a", "\u3000{}\u3000", "{}\u200d{}", "\u4e00{}\u4e00", "\uac00{}"),
    *("\u3042{}a", "{}\u30a2", "_{}_a", "{}\n\n{}", "a{} \n {}", "!{} {}1", " \n{}  \n"),
]
PROBED_BYTES = sorted(set(map(ord, "".join(TELLING + CONTEXTS).replace("{}", ""))) & set(range(128)))
ALL = [code_point for code_point in range(0x80, 0x110000) if not 0xD800 <= code_point < 0xE000]
# Unicode has assigned nothing in planes 4 to 13 and has no plans to; 15 and 16 are private.
NEAR = [code_point for code_point in ALL if code_point < 0x40000 or 0xE0000 <= code_point < 0xF0000]
REMOTE = sorted(set(ALL) - set(NEAR))


def is_written(code_point: int) -> bool:
    """Whether a code point is assigned and not of CJK or Hangul, whose characters are all alike."""
    big = (0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0x20000, 0x3FFFF)
    inside = any(first < code_point < last for first, last in big)
    return unicodedata.category(chr(code_point)) not in ("Cn", "Co", "Cs") and not inside


def probe_config(pre_tokenizer: Any, normalizer: Any = None, *, merging: bool = True) -> dict[str, Any]:
    """Configure a byte-level tokenizer whose merges join the last and first bytes of adjacent characters."""
    stand_in = {byte: character for character, byte in byte_alphabet().items()}
    vocab = {stand_in[byte]: byte for byte in range(256)}
    leading, following = range(0xC2, 0xF5), range(0x80, 0xC0)
    pairs = [*itertools.product(PROBED_BYTES, leading), *itertools.product(following, PROBED_BYTES)]
    pairs += itertools.product(following, leading)
    merges = [[stand_in[left], stand_in[right]] for left, right in pairs] if merging else []
    vocab.update({left + right: 256 + i for i, (left, right) in enumerate(merges)})
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": None}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts, "model": model}


def byte_level(*, splits: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": splits}


def pre_tokenizer_of(patterns: tuple[str, ...]) -> dict[str, Any]:
    splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level(splits=False)]}


def engine_of(tokenizer: Any) -> Encode:
    return lambda texts: tokenizer.encode_batch_list(texts, parallel=False)


def huggingface_pair(config: dict[str, Any]) -> Pair:
    reference = tokenizers.Tokenizer.from_str(json.dumps(config))
    engine = gigatoken.Tokenizer.from_json(json.dumps(config))

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in reference.encode_batch_fast(texts, add_special_tokens=False)]

    return Pair(encode, engine_of(engine))


def tiktoken_pairs() -> Iterator[tuple[str, Pair]]:
    """Load the patterns of OpenAI's encodings with the same tiny vocabulary; nothing is downloaded."""
    import tiktoken
    import tiktoken_ext.openai_public as public

    byte_of = byte_alphabet()
    vocab = probe_config(None)["model"]["vocab"]
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in vocab.items()}
    public.load_tiktoken_bpe = lambda *_, **__: ranks
    for name, scheme in (("r50k_base", "gpt2"), ("cl100k_base", "gpt4"), ("o200k_base", "o200k")):
        pattern = getattr(public, name)()["pat_str"]
        encoding = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.tiktoken"
            path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
            engine = gigatoken.Tokenizer.from_tiktoken(str(path), scheme)
        yield name, Pair(encoding.encode_ordinary_batch, engine_of(engine))


def disagreements(pair: Pair, code_points: list[int], contexts: Iterable[str]) -> set[int]:
    """Return the code points on which the libraries differ in some context.

    512 probes share a text, one per line. If the ids of the text differ, each of its probes is compared alone.
    """
    found = set()
    for context, start in itertools.product(contexts, range(0, len(code_points), 512 * 64)):
        groups = [code_points[i : i + 512] for i in range(start, min(start + 512 * 64, len(code_points)), 512)]
        texts = ["\n".join([context.replace("{}", chr(c)) for c in group]) for group in groups]
        for group, ours, theirs in zip(groups, pair.engine(texts), pair.reference(texts), strict=True):
            if ours != theirs:
                alone = ["\n" + context.replace("{}", chr(c)) + "\n" for c in group]
                found |= {c for c, x, y in zip(group, pair.engine(alone), pair.reference(alone), strict=True) if x != y}
    return found


def class_disputes() -> tuple[set[int], set[int]]:
    """Return the disputes of patterns that only distinguish letters and numbers, and those of any pattern."""
    pairs = [("bare ByteLevel", huggingface_pair(probe_config(byte_level(splits=True))), "")]
    for name, patterns in SCHEMES.items():
        pairs.append((name, huggingface_pair(probe_config(pre_tokenizer_of(patterns))), "".join(patterns)))
    pairs += [(name, pair, "p{Lu}" if name == "o200k_base" else "") for name, pair in tiktoken_pairs()]
    letters: set[int] = set()
    classes: set[int] = set()
    written = [*range(128), *filter(is_written, NEAR)]
    for name, pair, pattern in pairs:
        start = time.perf_counter()
        found = disagreements(pair, NEAR, TELLING) | disagreements(pair, REMOTE, TELLING[:3])
        more = disagreements(pair, [c for c in written if c not in found], CONTEXTS)
        classes |= found | more
        if not any(finer in pattern for finer in ("p{M}", "p{Lu}", "p{P}")):
            letters |= found | more
        counts = f"{len(found):6,} code points, {len(more)} more in other contexts"
        print(f"  {name:15} {counts} ({time.perf_counter() - start:.0f} s)", flush=True)
    return letters, classes


def nfc_disputes() -> set[int]:
    """Return the code points that NFC orders or composes differently, closed under the engine's NFC."""
    plain = probe_config(byte_level(splits=True), {"type": "NFC"}, merging=False)
    spell = engine_of(gigatoken.Tokenizer.from_json(json.dumps(plain)))
    reference = tokenizers.normalizers.NFC().normalize_str

    def differing(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield lines that differ, with the result of the engine."""
        remaining = iter(texts)
        while batch := list(itertools.islice(remaining, 200)):
            for text, ids in zip(batch, spell(batch), strict=True):
                if bytes(ids).decode() != reference(text):
                    lines = text.split("\n")
                    for line, ours in zip(lines, (bytes(ids).decode() for ids in spell(lines)), strict=True):
                        if ours != reference(line):
                            yield line, ours

    def in_lines(probes: Iterable[str]) -> Iterator[str]:
        remaining = iter(probes)
        while group := list(itertools.islice(remaining, 512)):
            yield "\n".join(group)

    # U+2D30 composes with nothing. U+0334 has the lowest class and U+0345 the highest, so a code point that only one
    # library treats as a mark changes places with one of them.
    found = set()
    for order in ("\u2d30{}\u0334", "\u2d30\u0345{}", "{}"):
        found |= {ord(c) for line, _ in differing(in_lines(order.replace("{}", chr(c)) for c in ALL)) for c in line}
    found -= set(map(ord, "\u2d30\u0334\u0345"))
    marks = [chr(c) for c in ALL if unicodedata.combining(chr(c)) and c not in found]
    classes = list({unicodedata.combining(mark): mark for mark in marks}.values())
    pairs = ("\u2d30" + "".join(pair) for m in marks for k in classes for pair in ((m, k), (k, m)))
    found |= {ord(c) for line, _ in differing(in_lines(pairs)) for c in line[1:]}
    print(f"  {len(found)} marks are ordered differently", flush=True)
    ordered = frozenset(found)
    disputed = list(differing(composing_pairs()))
    for line, _ in disputed:
        if not ordered & set(map(ord, line)):
            # The reference knows the mark, so the other character must be the new one.
            found |= {ord(c) for c in line if not unicodedata.combining(c)} or set(map(ord, line))
    for line, ours in disputed:
        # The ids show disputed characters only in the composed form of the engine.
        found |= {ord(c) for c in ours} - {ord(c) for character in line for c in character + reference(character)}
    return found


def composing_pairs() -> Iterator[str]:
    """Yield all pairs that could compose: within a block of 256, with a general mark, and Hangul.

    The decompositions of Unicode 17 (ICU 78) contain no other pairs.
    """
    large = (*range(0x34, 0xA0), *range(0xAC, 0xD7), *range(0xD8, 0xE0))
    blocks = [block for block in range(0x200) if block not in large]
    general = [chr(c) for c in (*range(0x300, 0x370), 0x653, 0x654, 0x655, 0x93C, 0x3099, 0x309A)]
    vast = (*range(0xE0, 0xF9), *range(0x120, 0x130), *range(0x140, 0x147), *range(0x170, 0x18D))
    for block in blocks:
        characters = [chr(c) for c in range(block << 8, (block << 8) + 256) if c >= 0x20]
        for character in characters if block not in vast else ():
            yield "\n".join([character + other for other in characters])
        for mark in general:
            yield "\n".join([character + mark for character in characters])
    final = [chr(c) for c in range(0x11A5, 0x11C6)]
    for syllable in range(0xAC00, 0xD7A4):
        yield "\n".join([chr(syllable) + jamo for jamo in final])
    for lead, vowel in itertools.product(range(0x10FF, 0x1115), range(0x1160, 0x1178)):
        yield "\n".join([chr(lead) + chr(vowel) + jamo for jamo in ["", *final]])


def write(path: Path, lists: dict[str, set[int]]) -> None:
    """Write hexadecimal ranges, several per line, so that a diff is readable."""
    versions = {name: metadata.version(name) for name in ("gigatoken", "tokenizers", "tiktoken")}
    parts = [f'"made_for": {json.dumps(versions)}']
    for name, code_points in lists.items():
        ranges = merge_ranges((code_point, code_point) for code_point in code_points)
        items = ", ".join(f'"{a:X}"' if a == b else f'"{a:X}-{b:X}"' for a, b in ranges)
        parts.append(f'"{name}": [\n{textwrap.indent(textwrap.fill(items, 110, break_on_hyphens=False), "  ")}\n ]')
        print(f"  {name}: {len(code_points):,} code points in {len(ranges)} ranges")
    path.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    print("character classes, all code points:")
    letters, classes = class_disputes()
    print("NFC:")
    nfc = nfc_disputes()
    # For other library versions: only newer tables classify what the Unicode version of this Python (14 in 3.11) does
    # not assign. The list does not shrink if a newer Python runs this script.
    cautious = classes | nfc | {c for c in ALL if unicodedata.category(chr(c)) == "Cn"}
    if output.exists():
        for item in json.loads(output.read_text())["cautious"]:
            first, _, last = item.partition("-")
            cautious.update(range(int(first, 16), int(last or first, 16) + 1))
    write(output, {"letters": letters, "classes": classes, "nfc": nfc, "cautious": cautious})
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
