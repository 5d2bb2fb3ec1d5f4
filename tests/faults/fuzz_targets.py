"""The functions that `fuzz.py` calls with bytes of the fuzzer, and the expected result of each reader.

A target raises AssertionError for a wrong answer; anything else that it raises is a finding too, because readers answer
with a value, a reject or a `TokenmillError`. The first byte chooses between the bytes as they are and bytes with their
checksum, header or fingerprint put right: a fuzzer cannot guess these, and would never get past them.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

import tokenmill as tm
from tests.faults import fuzz_compiled
from tests.support.stores import make_store
from tokenmill.compression import DamagedInput
from tokenmill.errors import TokenmillError
from tokenmill.files import InputStream
from tokenmill.loaders._state import _fingerprint_of
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.json import JsonReader
from tokenmill.readers.jsonl import JsonlReader
from tokenmill.store.manifest import HASH_CHARACTERS, SEAL, decode_manifest, encode_sealed, hash_bytes
from tokenmill.store.shard import HEADER, INDEX_HEADER_BYTES, MAGIC

LENGTHS = [3, 0, 5, 1, 40, 2, 7]
SEQ_LEN = 8
MOST_BYTES = 4 << 20


@cache
def scratch() -> Path:
    """A folder in memory if there is one; it is removed at exit."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(prefix="tokenmill-fuzz", dir=memory if memory.is_dir() else None)
    _kept.append(made)
    return Path(made.name)


_kept: list[Any] = []


def put(name: str, data: bytes) -> Path:
    """Write a new file; the old one may still be mapped."""
    path = scratch() / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def sentence(error: TokenmillError) -> None:
    """Check that an error is one line that a person can read."""
    said = str(error)
    assert said.strip() and len(said) < 600 and "\n" not in said, said


# JSON lines


def jsonl(data: bytes) -> None:
    """Texts are those of the `json` module, whether packed or not, and in one piece or in two ranges."""
    if not data:
        return
    mode, data = data[0], data[1:]
    path = put("a.jsonl", data)
    options = ReadOptions(text_key="a.text" if mode & 1 else "text", keep_keys=("id",) if mode & 2 else ())
    parts = options.text_key.split(".")
    found = read(JsonlReader(options), path, 0, None)
    compare_with_json(found, data, parts)
    packed = ReadOptions(text_key=options.text_key, keep_keys=options.keep_keys, packed=True)
    assert [text for _, text in read(JsonlReader(packed), path, 0, None)] == [text for _, text in found]
    cut = mode * len(data) // 256
    two = read(JsonlReader(options), path, 0, cut) + read(JsonlReader(options), path, cut, None)
    assert two == found, (two, found)
    if data.lstrip()[:1] == b"[":
        compare_array(read(JsonReader(options), path, 0, None), data, parts)


def read(reader: JsonlReader, path: Path, start: int, stop: int | None) -> list[tuple[int, str | None]]:
    """Positions with their texts, None for rejects, in order."""
    found: list[tuple[int, str | None]] = []
    for batch in reader.read_range(path, start, stop):
        texts = list(batch.texts)
        assert len(texts) == len(batch.positions)
        found += zip(np.asarray(batch.positions).tolist(), texts, strict=True)
        for reject in batch.rejects:
            assert reject.reason and reject.detail and "\n" not in reject.detail, reject
            found.append((reject.position, None))
    return sorted(found, key=lambda one: one[0])


def text_of(value: Any, parts: list[str]) -> str | None:
    for part in parts:
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def parse(line: bytes) -> Any:
    """Parse strictly: the module takes NaN, which is not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(line.decode(), parse_constant=refuse)


def _is_utf8(line: bytes) -> bool:
    try:
        return line.decode() is not None
    except UnicodeDecodeError:
        return False


def is_beyond(line: bytes) -> bool:
    """Whether a line has what the two may treat differently: lone surrogates, huge numbers, deep nesting, bad bytes."""
    return (
        b"\\u" in line.lower()
        or not _is_utf8(line)
        or line.count(b"[") + line.count(b"{") > 64
        or any(map(str.isdigit, line.decode(errors="ignore")))
    )


def compare_with_json(found: list[tuple[int, str | None]], data: bytes, parts: list[str]) -> None:
    if data.startswith(b"\xef\xbb\xbf"):
        data = b"   " + data[3:]
    wanted: list[tuple[str | None, bytes]] = []
    for line in data.split(b"\n"):
        if not line.strip(b" \t\r\n"):
            continue
        try:
            wanted.append((text_of(parse(line), parts), line))
        except UnicodeDecodeError:
            wanted.append((_text_among_bad_bytes(line, parts), line))
        except (ValueError, RecursionError):
            wanted.append((None, line))
    assert len(found) == len(wanted), (found, wanted)
    for (_, mine), (theirs, line) in zip(found, wanted, strict=True):
        assert mine == theirs or (mine is None and is_beyond(line)), (mine, theirs, line)


def _text_among_bad_bytes(line: bytes, parts: list[str]) -> str | None:
    """The text of a record whose other fields are not all UTF-8: readers skip these without a look."""
    try:
        text = text_of(json.loads(line.decode(errors="surrogateescape")), parts)
        return None if text is None or text.encode() is None else text
    except (ValueError, RecursionError):
        return None


def compare_array(found: list[tuple[int, str | None]], data: bytes, parts: list[str]) -> None:
    """A whole array has the texts that the module gives; of a broken one, what was read is a start of them."""
    try:
        values = parse(data)
    except (ValueError, RecursionError):
        return
    wanted = [text_of(value, parts) for value in values]
    mine = [text for _, text in found]
    assert mine == wanted or is_beyond(data), (mine, wanted)


# Compressed streams


def streams(data: bytes) -> None:
    """What a stream confirms is what a plain decompressor gives, and a sound stream is read to its end."""
    if len(data) < 2:
        return
    mode, data = data[0], data[1:]
    kind = "gzip" if mode & 1 else "zstd"
    written = None
    if mode & 2:
        data, written = compress(kind, data)
    plain, is_sound = decompress(kind, data)
    if len(plain) >= MOST_BYTES:
        return
    path = put("a.bin", data)
    pieces, damage = [], ""
    with InputStream(path, kind) as stream:
        try:
            while piece := stream.read((17, 4096, 1 << 20)[mode >> 2 & 3 if mode >> 2 & 3 < 3 else 0]):
                pieces.append(piece)
                assert sum(map(len, pieces)) <= MOST_BYTES + (1 << 20)
        except DamagedInput as error:
            damage = error.reason
            assert damage and "\n" not in damage
        found, confirmed = b"".join(pieces), stream.confirmed
        assert confirmed <= len(found)
        assert damage or stream.is_confirmed, "the end without damage confirms everything"
    # A plain decompressor may stop early, as one of zstd does that loses the output of a call; what it gave is right.
    if is_sound:
        assert not damage, damage
        assert found == plain, (found, plain)
    elif not damage:
        raise AssertionError(f"read {len(found)} bytes without a word from a damaged stream")
    if written is not None and kind == "gzip":
        # zlib refuses codes that are not complete and isal does not; the checksum decides.
        plain = written
    assert found[:confirmed] == plain[:confirmed], (confirmed, found, plain)


def compress(kind: str, recipe: bytes) -> tuple[bytes, bytes]:
    """Frames with checksums out of pieces of the recipe, of which some bits are then flipped or bytes cut off.

    Also returns what was compressed.
    """
    rng = random.Random(recipe[0])
    body, frames, written = recipe[1:], [], b""
    while body:
        size = 1 + body[0] % 64
        piece, body = body[1:size] * rng.choice((1, 1, 1, 900)), body[size:]
        written += piece
        if kind == "gzip":
            frames.append(gzip.compress(piece, rng.choice((1, 9)), mtime=0) + bytes(rng.choice((0, 0, 3))))
        else:
            frames.append(zstandard.ZstdCompressor(level=rng.choice((1, 5)), write_checksum=True).compress(piece))
            if rng.random() < 0.2:
                frames.append(struct.pack("<II", 0x184D2A50 + rng.randrange(16), len(piece)) + piece)
    made = bytearray(b"".join(frames))
    for _ in range(rng.choice((0, 0, 1, 2))):
        if made:
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    kept = made[: rng.randrange(len(made))] if made and rng.random() < 0.2 else made
    return bytes(kept), written


def decompress(kind: str, data: bytes) -> tuple[bytes, bool]:
    """What the plain library gives, and whether the whole stream is sound."""
    found, is_first = b"", True
    while True:
        if kind == "gzip":
            data = data if is_first else data.lstrip(b"\0")
        if not data:
            # A gzip file has at least one member; zstd is any number of frames.
            return found, kind == "zstd" or not is_first
        unpacker: Any = zlib.decompressobj(31) if kind == "gzip" else None
        if unpacker is None:
            if data[1:4] == b"\x2a\x4d\x18" and 0x50 <= data[0] <= 0x5F and len(data) >= 8:
                size = 8 + struct.unpack("<I", data[4:8])[0]
                if size > len(data):
                    return found, False
                data, is_first = data[size:], False
                continue
            unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            found += unpacker.decompress(data)
        except (zlib.error, zstandard.ZstdError):
            return found + _before_damage(kind, data), False
        if len(found) > MOST_BYTES or not unpacker.eof:
            return found, False
        data, is_first = unpacker.unused_data, False


def _before_damage(kind: str, data: bytes) -> bytes:
    """The bytes before the damage of a frame; byte by byte, because a failing call loses what it had."""
    unpacker: Any = zlib.decompressobj(31) if kind == "gzip" else zstandard.ZstdDecompressor().decompressobj()
    found = b""
    try:
        for at in range(len(data)):
            found += unpacker.decompress(data[at : at + 1])
            if unpacker.eof or len(found) > MOST_BYTES:
                break
    except (zlib.error, zstandard.ZstdError):
        pass
    return found


# Stores


@cache
def store() -> Path:
    """A store of one shard whose token p is p."""
    ends = np.cumsum(LENGTHS).tolist()
    documents = [list(range(end - length, end)) for end, length in zip(ends, LENGTHS, strict=True)]
    return make_store(scratch() / "store", documents, num_shards=1)


@cache
def original(name: str) -> bytes:
    return next(store().rglob(name)).read_bytes()


@contextmanager
def instead(name: str, data: bytes) -> Iterator[None]:
    """Replace a file of the store by a new one with other bytes, and put its own bytes back afterwards."""
    whole, path = original(name), next(store().rglob(name))
    try:
        _put_new(path, data)
        yield
    finally:
        _put_new(path, whole)


def _put_new(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def read_everything(path: Path) -> list[list[int]]:
    """All documents of a store, and one epoch of each packing."""
    opened = tm.open(path)
    documents = [opened.document(number).tolist() for number in range(min(64, opened.num_documents))]
    for method in ("concat", "best-fit", "pad"):
        try:
            rows = tm.pack(opened, seq_len=SEQ_LEN, method=method)
        except TokenmillError as error:
            sentence(error)
            continue
        for batch in tm.Loader(tm.take(rows, min(64, len(rows))), batch_size=4, epochs=1):
            assert batch.inputs.shape[1] == SEQ_LEN
            assert (batch.inputs >= 0).all() and (batch.inputs < 1 << 16).all()
    return documents


def index(data: bytes) -> None:
    """Any index gives documents that are slices of the shard, or a sentence; Megatron's own reading likewise."""
    if not data:
        return
    mode, data = data[0], data[1:]
    whole = original("*.idx")
    if mode & 1:
        data = HEADER.pack(MAGIC, 1, 8, len(LENGTHS), len(LENGTHS) + 1) + data
    if mode & 2:
        data = data[: len(whole)].ljust(len(whole), b"\0")
    bare = scratch() / "bare"
    bare.mkdir(exist_ok=True)
    put("bare/x.bin", original("*.bin"))
    put("bare/x.idx", data)
    for place in (store(), bare / "x.idx"):
        try:
            with instead("*.idx", data):
                documents = read_everything(place)
        except TokenmillError as error:
            sentence(error)
            assert data != whole
            continue
        for document in documents:
            assert document == list(range(document[0], document[0] + len(document))) if document else True, document
            assert not document or document[-1] < sum(LENGTHS), document
        lengths = list(map(len, documents))
        if data == whole:
            assert lengths == LENGTHS


def manifest(data: bytes) -> None:
    """A manifest is refused in a sentence, or says the same when it is encoded and decoded again."""
    if not data:
        return
    mode, data = data[0], data[1:]
    if mode & 1:
        data = SEAL + b"0" * HASH_CHARACTERS + data
        hashed = hash_bytes(data[: len(SEAL)] + data[len(SEAL) + HASH_CHARACTERS :]).encode()
        data = SEAL + hashed + data[len(SEAL) + HASH_CHARACTERS :]
    try:
        decoded = decode_manifest(data, "manifest.json")
    except TokenmillError as error:
        sentence(error)
        assert data != original("manifest.json")
        return
    again = decode_manifest(encode_sealed(decoded), "manifest.json")
    assert encode_sealed(again) == encode_sealed(decoded)
    try:
        with instead("manifest.json", data):
            read_everything(store())
    except TokenmillError as error:
        sentence(error)
        assert data != original("manifest.json")


# Loader states


@cache
def loaders() -> list[tuple[Any, list[list[int]]]]:
    """Loaders of several kinds of rows, each with all rows of its first epochs."""
    opened = tm.open(store())
    plain = tm.shuffle(tm.pack(opened, seq_len=SEQ_LEN), seed=1)
    padded = tm.pack(opened, seq_len=SEQ_LEN, method="pad", long_documents="truncate")
    kinds = [plain, padded, tm.mix([(plain, 0.5), (padded, 0.5)], seed=4, stages={10: [1, 3]}), tm.slice(plain, 1, 5)]
    made = []
    for rows in kinds:
        steps = iter(tm.Loader(rows, batch_size=1))
        made.append((tm.Loader(rows, batch_size=1), [next(steps).inputs[0].tolist() for _ in range(64)]))
    return made


def state(data: bytes) -> None:
    """A state is refused in a sentence and moves nothing, or the next rows are those of the undisturbed order."""
    if not data:
        return
    mode, data = data[0], data[1:]
    loader, expected = loaders()[mode & 3]
    loader.seek(0)
    before = loader.state_dict()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    if mode & 4 and isinstance(value, dict):
        value = {**before, **value}
        value = {**value, "fingerprint": _fingerprint_of(value["dataset"])} if mode & 8 else value
    try:
        loader.load_state_dict(value)
    except TokenmillError as error:
        sentence(error)
        assert loader.state_dict() == before
        return
    row = loader.state_dict()["next_row"]
    assert row == value["next_row"]
    rows = iter(loader)
    if row < 32:
        assert [next(rows).inputs[0].tolist() for _ in range(8)] == expected[row : row + 8]
    else:
        next(rows)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "jsonl": jsonl, "streams": streams, "index": index, "manifest": manifest, "state": state,
    **fuzz_compiled.COMPILED,
}  # fmt: skip


def kept(name: str) -> list[bytes]:
    """The inputs in the corpus of a target, which earlier runs of the fuzzer found."""
    path = Path(__file__).parent / "corpus" / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def seeds(name: str) -> list[bytes]:
    """Inputs to begin with, made from what the readers' writers write."""
    if name in fuzz_compiled.COMPILED:
        return fuzz_compiled.seeds(name)
    lines = b'{"text": "a \\n b \\u00e9", "id": 1}\n\n{"text": 1}\r\n{"a": {"text": "x"}, "id": [null]}\n{"text": "\xc3\xa9"}'
    if name == "jsonl":
        array = b'[{"text": "a"}, {"text": "b]"},\n {"id": {"x": "\\""}}]'
        return [
            bytes([mode]) + text
            for mode in (0, 1, 2, 130)
            for text in (lines, array, b"\xef\xbb\xbf" + lines, b"\n\n \n{}")
        ]
    if name == "streams":
        return [bytes([mode]) + bytes([n]) + b"some text to compress " * 9 for mode in (2, 3, 6, 7, 10, 11) for n in range(8)] + [
            b"\0" + zstandard.ZstdCompressor(write_checksum=True).compress(lines), b"\1" + gzip.compress(lines, mtime=0)
        ]  # fmt: skip
    if name == "index":
        whole = original("*.idx")
        return [b"\0" + whole, b"\2" + whole, b"\3" + whole[INDEX_HEADER_BYTES:], b"\1" + whole[INDEX_HEADER_BYTES:]]
    if name == "manifest":
        whole = original("manifest.json")
        return [b"\0" + whole, b"\1" + whole[len(SEAL) + HASH_CHARACTERS :]]
    made = []
    for number, (loader, _) in enumerate(loaders()):
        whole = json.dumps({**loader.state_dict(), "next_row": 5}).encode()
        part = json.dumps({"dataset": loader.state_dict()["dataset"]}).encode()
        made += [bytes([number]) + whole, bytes([number | 12]) + part, bytes([number | 4]) + b'{"next_row": 9}']
    return made
