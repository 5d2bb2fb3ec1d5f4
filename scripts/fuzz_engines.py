"""Compare the fast engines with the reference on many strings, tokenizer by tokenizer.

    python scripts/fuzz_engines.py ../shared/data/tokenizers/* --corpus ../shared/data/*.jsonl.zst

The script loads gigatoken as tokenmill does, and does not compare documents that its filter sends to the reference.
Strings are random Unicode, difficult fragments, pieces of the vocabulary, mutated text and special-token strings. For
the cache of words, all code points in several contexts are added. It prints one line per tokenizer and engine, and
exits with 1 on any mismatch or if the filter misses a document. Tokenizers that an engine does not encode are named and
skipped. `--structures DIR` trains a tokenizer of every structure in tests/support/structures.py there, and adds them.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from tokenmill.engines import Tokenizer, create, load_tokenizer, make_reference
from tokenmill.engines._disputes import DisputeFilter
from tokenmill.engines._eligibility import disputed_ranges_of, engine_config, refuses
from tokenmill.engines._piece_models import model_config, refuses_model
from tokenmill.engines.decoder import Decoder
from tokenmill.engines.huggingface import open_library
from tokenmill.engines.probe_strings import make_probe_strings
from tokenmill.engines.wordcache import why_no_words
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.text_batch import PackedTexts

BATCH = 2000
FRAGMENTS = [
    *("'s", "'S", "'ll", "'LL", "'re", "'Ve", "'t", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " ", "a", " the"),
    *("The", "1", "123", "1234", "!", "...", "?!", "-", "/", "\u0301", "\u0308", "\u0323", "\u200d", "\ufeff"),
    *("\x00", "\u00a0", "\u2003", "\u3000", "\u2028", "\x85", "\u2581", "\u2581\u2581", "<s>", "</s>", "<unk>"),
    *("<|endoftext|>", "<0x0A>", "\u00e9", "e\u0301", "\u017f", "\u212a", "\u0130", "\u00df", "\u4e2d\u6587"),
    *("\u30ab", "\ud55c\uad6d", "\u1112\u1161\u11ab", "\U0001f600", "\U0001f469\u200d\U0001f467"),
    *("\U0001f1e9\U0001f1ea", "x" * 40, "ab" * 30, "\u0915\u094d\u0937", "\u05e9\u05dc"),
]
CHARACTERS = [chr(c) for c in range(0x34000) if not 0xD800 <= c < 0xE000]
ASSIGNED = [c for c in CHARACTERS if unicodedata.category(c) not in ("Cn", "Co")]
COMMON = [c for c in ASSIGNED if c < "\u3000"]
REMOTE = [*map(chr, range(0xE0000, 0xE0200)), *map(chr, range(0x34000, 0x110000, 997))]


@dataclass
class Side:
    """One tokenizer, loaded into both libraries."""

    reference: Callable[[list[str]], list[list[int]]]
    engine: Any
    disputes: DisputeFilter
    specials: list[str]

    @cached_property
    def takes_packed(self) -> bool:
        """Whether the engine reads packed texts."""
        return takes_packed(self.engine)


@dataclass
class Tally:
    """Counts of a comparison, and the texts that went wrong."""

    num_texts: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    num_flagged: int = 0
    num_rerouted: int = 0
    missed: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)


def load(path: Path, *, parse_special: bool) -> Side | str:
    """Load the tokenizer at `path` into both libraries, or say why the engine may not be used for it."""
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.json.zst", "tokenizer.model")
        path = next(path / name for name in names if (path / name).exists())
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    return load_model(data) if path.suffix == ".model" else load_json(data, parse_special=parse_special)


def load_json(data: bytes, *, parse_special: bool) -> Side | str:
    config = json.loads(data)
    if reason := refuses(config, parse_special=parse_special):
        return reason
    library = open_library(data, "parse" if parse_special else "as-text")
    engine = gigatoken.Tokenizer.from_json(json.dumps(engine_config(config, parse_special=parse_special)))
    specials = [token["content"] for token in config["added_tokens"]]

    def encode(texts: list[str]) -> list[list[int]]:
        batch = library.encode(texts, threads=True)
        return [ids.tolist() for ids in np.split(batch.ids, batch.offsets[1:-1])] if texts else []

    return Side(encode, engine, DisputeFilter(disputed_ranges_of(config), engine.vocab), specials)


def load_model(data: bytes) -> Side | str:
    import sentencepiece

    if reason := refuses_model(data):
        return reason
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    engine = gigatoken.Tokenizer.from_json(json.dumps(model_config(data)))
    specials = [processor.id_to_piece(i) for i in range(processor.vocab_size()) if processor.is_control(i)]
    return Side(processor.encode, engine, DisputeFilter((), engine.vocab), specials)


def compare(side: Side, texts: list[str], tally: Tally) -> None:
    """Encode a batch with both libraries and add the result to the tally."""
    encoded = side.engine.encode_batch(texts, parallel=False)
    ids, offsets = np.asarray(encoded.layout.content.data), np.asarray(encoded.layout.offsets.data)
    flagged = set(side.disputes.flag(ids, offsets).tolist())
    disputed = {i for i, text in enumerate(texts) if side.disputes.confirms(text)}
    tally.missed += [texts[i] for i in disputed - flagged]
    if not same_when_packed(side, texts, ids):
        tally.mismatched.append(f"{len(texts)} texts in one buffer, of which the first is {texts[0]!r}")
    expected = side.reference(texts)
    for i, text in enumerate(texts):
        if i not in disputed and ids[offsets[i] : offsets[i + 1]].tolist() != expected[i]:
            tally.mismatched.append(text)
    tally.num_texts += len(texts)
    tally.num_bytes += sum(len(text.encode()) for text in texts)
    tally.num_tokens += len(ids)
    tally.num_flagged += len(flagged)
    tally.num_rerouted += len(disputed)


def same_when_packed(side: Side, texts: list[str], ids: np.ndarray[Any, Any]) -> bool:
    """Whether texts that are read from JSON lines into one buffer, as in workers, get the same ids."""
    if not side.takes_packed:
        return True
    lines = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts if text)
    found = []
    for batch in JsonlReader(ReadOptions(packed=True)).read_stream(io.BytesIO(lines)):
        if isinstance(batch.texts, PackedTexts):
            source = gigatoken.BytesSource(batch.texts.data, PackedTexts.SEPARATOR)
            encoded = side.engine.encode_batch(source, parallel=False)
        else:
            encoded = side.engine.encode_batch(list(batch.texts), parallel=False)
        found.append(np.asarray(encoded.layout.content.data))
    return bool(np.array_equal(np.concatenate(found), ids))


def takes_packed(engine: Any) -> bool:
    """Whether the engine reads packed texts; with byte fallback it requires a separator that is a character."""
    try:
        engine.encode_batch(gigatoken.BytesSource(b"a", PackedTexts.SEPARATOR), parallel=False)
    except ValueError:
        return False
    return True


class Strings:
    """Generates random strings without end."""

    def __init__(self, specials: list[str], pieces: Iterable[bytes], texts: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._texts = [text for text in texts if text]
        self._specials = specials[:64] or ["<s>"]
        self._pieces: list[str] = [piece.decode(errors="ignore").replace("\u2581", " ") for piece in pieces]

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        choose = self._random.choice
        return "".join([choose(self._makers)(self) for _ in range(choose([1, 1, 2, 3, 5, 8, 20, 60]))])

    def _fragment(self) -> str:
        return self._random.choice(FRAGMENTS) * self._random.choice([1, 1, 1, 2, 3])

    def _character(self) -> str:
        kind = self._random.choices([COMMON, ASSIGNED, CHARACTERS, REMOTE], [12, 6, 3, 1])[0]
        return self._random.choice(kind) * self._random.choice([1, 1, 2])

    def _ascii(self) -> str:
        return chr(self._random.randrange(128))

    def _excerpt(self) -> str:
        text = self._random.choice(self._texts)
        start = self._random.randrange(len(text))
        excerpt = text[start : start + self._random.choice([1, 3, 10, 40])]
        match self._random.randrange(5):
            case 0:
                return excerpt.swapcase()
            case 1:
                return unicodedata.normalize("NFD", excerpt)
            case 2:
                return excerpt[::-1]
            case _:
                return excerpt

    def _special(self) -> str:
        token = self._random.choice(self._specials)
        return self._random.choice([token, token, token[: self._random.randrange(len(token) + 1)], token[1:]])

    def _vocabulary(self) -> str:
        """Join pieces of the vocabulary, also in runs, so that merges compete."""
        left, right = self._random.choices(self._pieces, k=2)
        kinds = [left + right, left * self._random.randrange(1, 9) + right, (left + right) * 3]
        return kinds[self._random.randrange(3)]

    _makers: tuple[Callable[[Any], str], ...] = (
        *(_fragment, _fragment, _character, _ascii, _excerpt, _excerpt, _special, _vocabulary, _vocabulary),
    )


def read_corpora(paths: list[Path]) -> list[str]:
    texts = []
    for path in paths:
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(data).read()
        for line in io.StringIO(data.decode(), newline="\n"):
            record = json.loads(line)
            parts = [message["content"] for message in record.get("messages", ())]
            parts += [record[key] for key in ("text", "prompt", "response") if key in record]
            texts += parts
    return texts


def fuzz(path: Path, corpus: list[str], arguments: argparse.Namespace) -> bool:
    """Compare one tokenizer and print a line; return whether everything agrees."""
    start = time.perf_counter()
    side = load(path, parse_special=arguments.parse_special)
    if isinstance(side, str):
        print(f"{path.name:16} gigatoken is not eligible: {side}", flush=True)
        return True
    tally = Tally()
    probes = make_probe_strings(side.specials)
    strings = Strings(side.specials, side.engine.vocab.values(), corpus or probes, arguments.seed)
    texts = [*probes, *corpus, *(next(strings) for _ in range(arguments.strings))]
    for i in range(0, len(texts), BATCH):
        compare(side, texts[i : i + BATCH], tally)
    seconds = time.perf_counter() - start
    print(
        f"{path.name:16} gigatoken: {tally.num_texts:,} texts, {tally.num_bytes / 1e6:.1f} MB, {tally.num_tokens:,} "
        f"tokens, {len(side.disputes.suspects)} suspects, {tally.num_flagged:,} flagged, {tally.num_rerouted:,} to the "
        f"reference, {len(tally.missed)} missed, {len(tally.mismatched)} MISMATCHES, {seconds:.0f} s",
        flush=True,
    )
    for text in sorted(tally.mismatched + tally.missed, key=len)[:5]:
        print(f"    {text[:100]!r}", flush=True)
    return not tally.mismatched and not tally.missed


CONTEXTS = ("a{}b", "{} x", "x {}", "({}", "{})", "1{}2", "A{} B", " {}{} ", "{}\n", "'{}s")


def every_code_point() -> Iterator[str]:
    """Yield texts with each code point in several contexts, one per line; in two where Unicode has no characters."""
    for start in range(0, 0x110000, 256):
        for context in CONTEXTS if start < 0x34000 or start >> 8 == 0xE00 else CONTEXTS[:2]:
            if not 0xD800 <= start < 0xE000:
                yield "\n".join([context.replace("{}", chr(c)) for c in range(start, start + 256)])


def fuzz_words(path: Path, corpus: list[str], arguments: argparse.Namespace) -> bool:
    """Compare the cache of words with the reference, and print a line; return whether everything agrees."""
    start = time.perf_counter()
    mode = "parse" if arguments.parse_special else "as-text"
    tokenizer = load_words(path)
    if isinstance(tokenizer, str) or (reason := why_no_words(tokenizer, mode)):
        print(f"{path.name:16} wordcache is not eligible: {tokenizer if isinstance(tokenizer, str) else reason}")
        return True
    engine, reference = create("wordcache", tokenizer, mode), make_reference(tokenizer, mode)
    reference.uses_threads = True
    decoder = Decoder(tokenizer)
    probes = make_probe_strings(tokenizer.added_tokens)
    pieces = map(decoder.token_bytes, range(tokenizer.vocab_size))
    strings = Strings(tokenizer.added_tokens, pieces, corpus or probes, arguments.seed)
    texts = [*probes, *corpus, *(next(strings) for _ in range(arguments.strings)), *every_code_point()]
    mismatched = []
    for i in range(0, len(texts), BATCH):
        some = texts[i : i + BATCH]
        found, expected = engine.encode(PackedTexts.of(some)), reference.encode(some)
        if np.array_equal(found.ids, expected.ids) and np.array_equal(found.offsets, expected.offsets):
            continue
        mismatched += [
            text for text in some if not np.array_equal(engine.encode([text]).ids, reference.encode([text]).ids)
        ]
        mismatched = mismatched or [f"{len(some)} texts together"]
    num_bytes = sum(len(text.encode()) for text in texts)
    print(
        f"{path.name:16} wordcache: {len(texts):,} texts, {num_bytes / 1e6:.1f} MB, {len(mismatched)} MISMATCHES, "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    for text in sorted(mismatched, key=len)[:5]:
        print(f"    {text[:100]!r}", flush=True)
    return not mismatched


def load_words(path: Path) -> Tokenizer | str:
    """Load a tokenizer for the cache of words, or say why that is not possible."""
    if (path / "tokenizer.json.zst").exists():
        return "its files are compressed"
    tokenizer = load_tokenizer(str(path))
    return tokenizer if tokenizer.kind in ("huggingface", "tiktoken") else f"it is of {tokenizer.kind}"


def train_structures(folder: Path, corpus: list[str]) -> list[Path]:
    """Train a tokenizer of each structure, unless it is there."""
    from tests.support.structures import STRUCTURES, train

    for name in STRUCTURES:
        path = folder / name / "tokenizer.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(train(name, corpus[::4] or make_probe_strings([]), vocab_size=8000)))
    return [folder / name for name in STRUCTURES]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("tokenizers", nargs="*", type=Path, help="directories, tokenizer.json or .model files")
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", nargs="*", type=Path, default=[], help="JSONL, packed with zstd or not")
    parser.add_argument("--parse-special", action="store_true", help="special-token strings become their ids")
    parser.add_argument("--structures", type=Path, help="a folder for tokenizers of every structure")
    arguments = parser.parse_args()
    corpus = read_corpora(arguments.corpus)
    trained = train_structures(arguments.structures, corpus) if arguments.structures else []
    results = []
    for path in [*arguments.tokenizers, *trained]:
        results += [fuzz(path, corpus, arguments), fuzz_words(path, corpus, arguments)]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
