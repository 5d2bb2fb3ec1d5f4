"""The manifest: the contents of a store, how it was made, and a checksum of every file.

It is written last and atomically; a directory without one is an unfinished run. It holds no
timestamp, host or absolute path, so equal inputs and flags give an equal manifest. Its first
field is a checksum of all other bytes, so that any flipped bit is found.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from tokenmill.errors import StoreError
from tokenmill.formatting import plural
from tokenmill.regular_files import MOST_JSON_BYTES, UnfitFile, open_regular

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "RESTORE",
    "EngineInfo",
    "FileInfo",
    "InputInfo",
    "Manifest",
    "ParityInfo",
    "ShardInfo",
    "SpecialTokensInfo",
    "SplitInfo",
    "TokenizerInfo",
    "decode_manifest",
    "decode_sealed",
    "encode_sealed",
    "hash_bytes",
    "read_manifest",
    "read_sealed",
]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
HOLDS = ("pairs", "prompts")
RESTORE = "restore it, or tokenize again with --overwrite"
"""The remedy for a damaged file, as the end of an error message."""
SEAL = b'{\n "checksum": "'
HASH_CHARACTERS = 16
SHORT_BYTES = 1 << 16
_NOWHERE = {"", ".", ".."}


class FileInfo(msgspec.Struct, frozen=True):
    """The size and XXH3-64 of one file."""

    bytes: int
    xxh3: str


class ShardInfo(msgspec.Struct, frozen=True):
    """One shard; its files are `name` plus each suffix in `files`."""

    name: str
    num_documents: int
    num_tokens: int
    files: dict[str, FileInfo]


class SplitInfo(msgspec.Struct, frozen=True):
    """The shards of one split, in the order of the inputs."""

    num_documents: int
    num_tokens: int
    shards: list[ShardInfo]

    @property
    def num_bytes(self) -> int:
        """The size on disk of all files of its shards."""
        return sum(file.bytes for shard in self.shards for file in shard.files.values())


class InputInfo(msgspec.Struct, frozen=True):
    """One input, named relative to the common folder of all inputs."""

    path: str
    bytes: int
    fingerprint: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Which tokenizer made the ids; its files are in `tokenizer/`."""

    name: str
    kind: str
    sha256: str
    vocab_size: int
    files: dict[str, FileInfo]


class ParityInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison with the reference before anything was published, and how many texts differed."""

    reference: str
    num_documents: int
    num_in_parts: int = 0
    """How many of these documents are long, so that only parts of them were compared."""
    num_bytes: int
    num_awkward: int
    num_mismatches: int
    example: str | None = None
    """The start of the first text whose ids differ."""
    num_later_documents: int = 0
    """Documents that were compared while the tasks ran, a few of each; none differed."""
    num_later_bytes: int = 0


class EngineInfo(msgspec.Struct, frozen=True):
    """Which library encoded, and its comparison with the reference before the run."""

    name: str
    version: str
    parity: ParityInfo | None
    num_rerouted: int
    """Documents that the reference encoded, because of code points that the engine may get wrong."""


class SpecialTokensInfo(msgspec.Struct, frozen=True):
    """The requested policy, and its effect."""

    bos_id: int | None
    """Added before every document; None for no token."""
    eos_id: int | None
    """Added after every document; None for no token."""
    in_text: str
    num_parsed: int
    """Special tokens that were parsed from strings in the texts."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader of the store needs to know."""

    checksum: str = ""
    format_version: int
    dtype: str
    tokenizer: TokenizerInfo
    engine: EngineInfo
    special_tokens: SpecialTokensInfo
    splits: dict[str, SplitInfo]
    num_documents_in: int
    num_rejects: int
    rejects: dict[str, int]
    files: dict[str, FileInfo]
    """Files that belong to no shard, such as rejects.jsonl."""
    settings: dict[str, Any]
    inputs: list[InputInfo]
    holds: str | msgspec.UnsetType = msgspec.UNSET
    """`pairs` or `prompts` if documents are not texts of their own; it is left out of all other manifests."""

    @property
    def num_documents(self) -> int:
        """Documents in all splits."""
        return sum(split.num_documents for split in self.splits.values())

    @property
    def has_pairs(self) -> bool:
        """Whether documents 2i and 2i + 1 of a split are the two answers of a preference pair."""
        return self.holds == "pairs"

    @property
    def num_records(self) -> int:
        """Records of the inputs that are in the store: documents, or pairs of them."""
        return self.num_documents // 2 if self.has_pairs else self.num_documents

    @property
    def records_name(self) -> str:
        """What the records of the inputs are called."""
        return self.holds if isinstance(self.holds, str) else "documents"

    @property
    def shown_records(self) -> str:
        """`1 document`, `2,000 pairs`."""
        return plural(self.num_records, self.records_name.removesuffix("s"))

    @property
    def num_tokens(self) -> int:
        """Tokens in all splits."""
        return sum(split.num_tokens for split in self.splits.values())

    @property
    def shard_bytes(self) -> int:
        """The size on disk of the files of all shards."""
        return sum(split.num_bytes for split in self.splits.values())


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a finished store."""
    path = folder / MANIFEST
    try:
        data = read_sealed(path)
    except FileNotFoundError:
        if not folder.is_dir():
            raise StoreError(
                f"{folder} does not exist; make a store with: tokenmill tokenize INPUT -o {folder}"
            ) from None
        if (folder / ".tasks").is_dir():
            raise StoreError(
                f"{folder} is an unfinished run; run the same tokenize command again, or, if ranks share it, those "
                f"that tokenmill status {folder} names"
            ) from None
        raise StoreError(f"{folder} is not a token store: it has no {MANIFEST}") from None
    except OSError as error:
        advice = f"; {RESTORE}" if isinstance(error, UnfitFile) else ""
        raise StoreError(f"{path} cannot be read: {error.strerror}{advice}") from None
    return decode_manifest(data, path)


def read_sealed(path: Path) -> bytes:
    """Read a file that `encode_sealed` wrote; of any other file, only the start."""
    with open_regular(path, MOST_JSON_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(min(size, SHORT_BYTES))
        if not start.startswith(SEAL):
            return start
        file.seek(0)
        return file.read(min(size, MOST_JSON_BYTES))


def decode_manifest(data: bytes, path: str | Path) -> Manifest:
    """Decode and check the bytes of a manifest: its version, its checksum, and that all its files are in the store."""
    version = _decode(data, _Version, path).format_version
    if version != FORMAT_VERSION:
        raise StoreError(f"{path} has format version {version}; this tokenmill reads version {FORMAT_VERSION}")
    manifest = decode_sealed(data, Manifest, path)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    if manifest.holds not in (msgspec.UNSET, *HOLDS):
        raise StoreError(
            f"{path} says that the store holds {manifest.holds!r}; this tokenmill reads {' and '.join(HOLDS)}"
        )
    for what, names, may_nest in (
        ("split", manifest.splits, False),
        ("shard", [shard.name for shard in shards], True),
        ("suffix", sorted({suffix for shard in shards for suffix in shard.files}), False),
        ("file of the tokenizer", manifest.tokenizer.files, False),
        ("file", manifest.files, True),
    ):
        for name in names:
            parts = name.split("/")
            if "\0" in name or not _NOWHERE.isdisjoint(parts) or (len(parts) > 1 and not may_nest):
                raise StoreError(f"{path} names a {what} outside the store: {name!r}; {RESTORE}")
    return manifest


class _Version(msgspec.Struct):
    format_version: int


SealedT = TypeVar("SealedT", bound=msgspec.Struct)


def encode_sealed(document: msgspec.Struct) -> bytes:
    """Encode as indented JSON whose `checksum` field covers all other bytes."""
    blank = msgspec.structs.replace(document, checksum="")
    return _render(msgspec.structs.replace(document, checksum=hash_bytes(_render(blank))))


def decode_sealed(data: bytes, kind: type[SealedT], path: str | Path) -> SealedT:
    """Decode the output of `encode_sealed`; any other bytes are an error."""
    document = _decode(data, kind, path)
    # The checksum at the start is that of all other bytes, so the document need not be encoded again.
    start, stop = len(SEAL), len(SEAL) + HASH_CHARACTERS
    if not data.startswith(SEAL) or data[start:stop] != hash_bytes(data[:start] + data[stop:]).encode():
        raise StoreError(f"{path} is damaged: its checksum does not match; {RESTORE}")
    return document


def _decode(data: bytes, kind: type[SealedT], path: str | Path) -> SealedT:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged ({error}); {RESTORE}") from None
    except RecursionError:
        raise StoreError(f"{path} is damaged (it is nested too deeply); {RESTORE}") from None


def hash_bytes(data: bytes) -> str:
    """XXH3-64 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _render(document: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1) + b"\n"
