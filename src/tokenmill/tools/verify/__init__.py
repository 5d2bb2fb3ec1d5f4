"""`verify`: prove that a store is complete, and that its ids equal the reference's.

Every published file is read once and compared with its checksum in the manifest, which has a checksum of its own, so
that a single flipped bit is found. Given the inputs, documents are read from them again and encoded by the reference
library, which defines the ids.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokenmill.arguments import is_remote
from tokenmill.display import Advance, ignore_progress
from tokenmill.engines import choose, open_tokenizer
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.formatting import format_bytes, format_facts, plural
from tokenmill.inputs.row_objects import name_items
from tokenmill.machine import usable_cores
from tokenmill.pipeline.journal.attempts import RunInfo
from tokenmill.pipeline.journal.finish import REJECTS
from tokenmill.pipeline.journal.mirror import JOURNAL, RUN, Mirror, scratch_directory
from tokenmill.regular_files import open_regular
from tokenmill.store.check import CheckProgress, check_file, check_shard
from tokenmill.store.manifest import (
    MANIFEST,
    RESTORE,
    FileInfo,
    Manifest,
    ShardInfo,
    decode_sealed,
    read_manifest,
    read_sealed,
)
from tokenmill.store.shard import DTYPES, dtype_for
from tokenmill.store.store import TokenStore, check_inside, check_manifest
from tokenmill.tools.verify.comparison import compare_with_inputs

__all__ = ["Verification", "list_files", "local_copy", "verify"]

FETCHING, CHECKING, COMPARING = "fetching files", "checking files", "comparing documents"
MOST_THREADS = 4
MOST_LINE_BYTES = 16 << 20
"""The most bytes of one reject: a reason and a detail, which is short unless a field has a very long name."""


class Verification(msgspec.Struct, kw_only=True):
    """What was checked, and every problem in one sentence; it prints as a table."""

    num_files: int = 0
    num_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_looked_at: int = 0
    """Documents whose tokens were looked at: those of shards without damage."""
    num_with_bos: int | None = None
    """Documents that begin with the BOS token; None if the run added none."""
    num_with_eos: int | None = None
    """Documents that end with the EOS token; None if the run added none."""
    reference: str = ""
    """The engine whose ids were compared; empty without inputs."""
    num_compared: int = 0
    """Documents whose ids were compared."""
    has_run_file: bool = True
    """Whether there is a run.json, which is optional."""
    problems: list[str] = msgspec.field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def __repr__(self) -> str:
        return "\n".join([format_facts(self.rows()), *(self.problems or ["sound"])])

    def rows(self) -> list[tuple[str, str]]:
        """Names and counts of a table."""
        sound_part = "" if self.is_sound else " in shards without damage"
        rows = [
            ("files", f"{self.num_files:,}, {format_bytes(self.num_bytes)}"),
            ("documents", f"{self.num_documents:,}"),
            ("tokens", f"{self.num_tokens:,}{sound_part}"),
        ]
        for name, verb, count in (("BOS", "begin", self.num_with_bos), ("EOS", "end", self.num_with_eos)):
            having = f"{count or 0:,} of {plural(self.num_looked_at, 'document')}{sound_part} {verb} with it"
            was_seen = self.is_sound or self.num_looked_at > 0
            rows.append((name, "none asked for" if count is None else having if was_seen else "not looked at"))
        if not self.has_run_file:
            rows.append(("run.json", "not there; it is optional: it holds the speed of the run"))
        if self.reference:
            rows.append(("compared", f"ids of {plural(self.num_compared, 'document')} with {self.reference}'s"))
        return rows


def verify(
    store: str | Path | TokenStore,
    *,
    against: str | Path | Sequence[str | Path] = (),
    every: bool = False,
    advance: Advance = ignore_progress,
) -> Verification:
    """Check every file of a store and, given its inputs, the ids of a sample (or of `every` document).

    Defects of the store are problems in the result; inputs that do not exist raise an exception. A store in a bucket
    is fetched as a whole into a scratch directory.
    """
    store = store.place if isinstance(store, TokenStore) else store
    inputs = name_items(against, "the rows that a store was made of cannot be read again; leave against out")
    with local_copy(store, advance) as (folder, orphans):
        result = _verify(folder, inputs, every, advance)
    if str(store) != str(folder):
        result.problems = [problem.replace(str(folder), str(store)) for problem in result.problems]
    if result.num_files:
        result.problems += [f"{store}/{name} does not belong to the store; the next run removes it" for name in orphans]
    return result


@contextmanager
def local_copy(store: str | Path, advance: Advance) -> Iterator[tuple[Path, list[str]]]:
    """Yield the directory of a store, or a copy of one in a bucket, and the files there that are not part of it."""
    if not isinstance(store, str) or not is_remote(store):
        yield Path(store), []
        return
    mirror = Mirror(store)
    with scratch_directory(None) as folder:
        copy = folder / mirror.url.rpartition("/")[2]
        copy.mkdir()
        yield copy, mirror.fetch(copy, lambda done, total: advance(FETCHING, done, total))


def _verify(store: Path, against: Sequence[str], every: bool, advance: Advance) -> Verification:
    try:
        manifest = read_manifest(store)
    except StoreError as error:
        return Verification(problems=[str(error)])
    result = Verification(num_files=1, num_bytes=(store / MANIFEST).stat().st_size)
    result.problems += [*_check_totals(manifest), *_check_names(manifest), *_check_links(store, manifest)]
    if result.is_sound:
        _check_run_file(store, result)
        _check_files(store, manifest, result, advance)
        result.problems += _find_leftovers(store, manifest)
    if against and result.is_sound:
        report = compare_with_inputs(
            store, manifest, against, every=every, advance=lambda done, total: advance(COMPARING, done, total)
        )
        result.num_compared, result.reference = report.num_compared, report.reference
        result.problems += report.problems
    elif against:
        result.problems.append("the store was not compared with its inputs, because of the problems above")
    return result


def list_files(store: Path, manifest: Manifest, *, shards: bool = True) -> dict[Path, FileInfo]:
    """The files that the manifest lists, with or without those of shards."""
    files = {store / "tokenizer" / name: info for name, info in manifest.tokenizer.files.items()}
    files |= {store / name: info for name, info in manifest.files.items()}
    for shard in list_shards(manifest) if shards else ():
        files |= {store / f"{shard.name}{suffix}": info for suffix, info in shard.files.items()}
    return files


def list_shards(manifest: Manifest) -> list[ShardInfo]:
    """The shards of all splits."""
    return [shard for split in manifest.splits.values() for shard in split.shards]


def _check_totals(manifest: Manifest) -> Iterator[str]:
    """Check that the numbers in the manifest agree with each other."""
    if manifest.dtype not in DTYPES or manifest.dtype != dtype_for(manifest.tokenizer.vocab_size):
        yield f"{MANIFEST} says {manifest.dtype} for a vocabulary of {manifest.tokenizer.vocab_size}; {RESTORE}"
    for name, split in manifest.splits.items():
        documents = sum(shard.num_documents for shard in split.shards)
        tokens = sum(shard.num_tokens for shard in split.shards)
        if (documents, tokens) != (split.num_documents, split.num_tokens):
            yield (
                f"{MANIFEST} says {split.num_documents} documents and {split.num_tokens} tokens in {name}, "
                f"but its shards have {documents} and {tokens}; {RESTORE}"
            )
    if manifest.num_documents_in != manifest.num_records + manifest.num_rejects:
        yield (
            f"{MANIFEST} says {manifest.num_documents_in} {manifest.records_name} were read, but "
            f"{manifest.num_records} were stored and {manifest.num_rejects} rejected; {RESTORE}"
        )
    if manifest.num_rejects != sum(manifest.rejects.values()):
        yield f"{MANIFEST} says {manifest.num_rejects} rejects, but {manifest.rejects} by reason; {RESTORE}"


def _check_names(manifest: Manifest) -> Iterator[str]:
    """Check that each shard is in the folder of its split, under a unique name."""
    seen = set()
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if not re.fullmatch(rf"{re.escape(name)}/shard-[0-9]+-[0-9]+", shard.name) or shard.name in seen:
                yield f"{MANIFEST} lists a shard {shard.name!r} in {name}, which cannot be; {RESTORE}"
            seen.add(shard.name)


def _check_links(store: Path, manifest: Manifest) -> Iterator[str]:
    """Check that no link leads out of the store: a copy of it would not be complete."""
    try:
        check_manifest(store, manifest)
        for path in (store / RUN, *list_files(store, manifest)):
            if path.is_symlink():
                check_inside(store, path)
    except StoreError as error:
        yield str(error)
    except OSError as error:
        yield f"{error.filename} cannot be read: {error.strerror}; {RESTORE}"


def _check_run_file(store: Path, result: Verification) -> None:
    """Check the checksum of run.json, which is optional: it holds speeds, and no reader of the store needs it."""
    path = store / RUN
    try:
        data = read_sealed(path)
    except FileNotFoundError:
        result.has_run_file = False
        return
    except OSError as error:
        result.problems.append(f"{path} cannot be read: {error.strerror}; it holds speeds only, so remove it")
        return
    result.num_files += 1
    result.num_bytes += len(data)
    try:
        decode_sealed(data, RunInfo, path)
    except StoreError:
        result.problems.append(f"{path} is damaged: its checksum does not match; it holds speeds only, so remove it")


def _check_files(store: Path, manifest: Manifest, result: Verification, advance: Advance) -> None:
    """Check the files that the manifest lists, shards on several threads: hashing and numpy release the GIL."""
    total = sum(info.bytes for info in list_files(store, manifest).values())
    tally = CheckProgress(lambda done: advance(CHECKING, done, total))
    others = list_files(store, manifest, shards=False)
    damage = [problem for path, info in others.items() for problem in check_file(path, info, tally)]
    if not damage:
        damage += [*_check_tokenizer(store, manifest), *_check_rejects(store, manifest)]
    with_bos = with_eos = 0
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores())) as pool:
        for checked in pool.map(lambda shard: check_shard(store, manifest, shard, tally), list_shards(manifest)):
            damage += checked.problems
            result.num_documents += checked.num_documents
            result.num_tokens += checked.num_tokens
            result.num_looked_at += checked.num_looked_at
            with_bos += checked.num_with_bos
            with_eos += checked.num_with_eos
    result.num_files += tally.num_files
    result.num_bytes += tally.num_bytes
    result.num_with_bos = None if manifest.special_tokens.bos_id is None else with_bos
    result.num_with_eos = None if manifest.special_tokens.eos_id is None else with_eos
    result.problems += damage


def _check_tokenizer(store: Path, manifest: Manifest) -> Iterator[str]:
    """Check that the tokenizer is the one that the manifest describes."""
    described = manifest.tokenizer
    try:
        tokenizer = open_tokenizer(store / "tokenizer", described.name)
        # A run refuses a tokenizer that is no function, or that its library contradicts.
        choose(tokenizer)
    except (TokenmillError, OSError) as error:
        yield f"{store / 'tokenizer'} cannot be used ({error}); {RESTORE}"
        return
    if (tokenizer.sha256, tokenizer.vocab_size) != (described.sha256, described.vocab_size):
        yield f"{store / 'tokenizer'} holds another tokenizer than {MANIFEST} describes; {RESTORE}"


class _RejectLine(msgspec.Struct):
    reason: str
    documents: int = 1


def _check_rejects(store: Path, manifest: Manifest) -> Iterator[str]:
    """Check that rejects.jsonl has as many documents of each reason as the manifest counts."""
    path = store / REJECTS
    counts: Counter[str] = Counter()
    decoder = msgspec.json.Decoder(_RejectLine)
    try:
        with open_regular(path) as file:
            while line := file.readline(MOST_LINE_BYTES):
                reject = decoder.decode(line)
                counts[reject.reason] += reject.documents
    except FileNotFoundError:
        pass
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        yield f"{path} holds a line that is not a reject ({error}); {RESTORE}"
        return
    if counts != manifest.rejects:
        yield f"{path} has {dict(sorted(counts.items()))} rejects, but {MANIFEST} says {manifest.rejects}; {RESTORE}"


def _find_leftovers(store: Path, manifest: Manifest) -> Iterator[str]:
    """Find files that the manifest does not list: a program that lists directories would take them for data."""
    known = list_files(store, manifest)
    for folder in ("train", "val", "tokenizer"):
        for path in sorted((store / folder).rglob("*")):
            if not path.is_dir() and path not in known:
                yield f"{path} does not belong to the store; remove it"
    for path in sorted(store.glob("*.tmp")):
        yield f"{path} was left by a killed run; remove it"
    if os.path.lexists(store / JOURNAL):  # even if it is a broken link
        yield f"{store / JOURNAL} is left of the run, though the store is finished; run tokenmill finish {store}"
