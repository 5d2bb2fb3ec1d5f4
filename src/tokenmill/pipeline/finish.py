"""Ending a run: the journal of tasks becomes the manifest.

Nothing is copied or renamed; shards already have their names. Rejects are joined in input
order, and the manifest is written last.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from tokenmill.engines import Tokenizer
from tokenmill.errors import StoreError
from tokenmill.files import sync_directory, write_durably
from tokenmill.pipeline.journal import Journal, StoredReject, TaskRecord
from tokenmill.pipeline.plan import InputFile
from tokenmill.pipeline.settings import Settings
from tokenmill.store.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    EngineInfo,
    FileInfo,
    InputInfo,
    Manifest,
    ParityInfo,
    SpecialTokensInfo,
    SplitInfo,
    TokenizerInfo,
    encode_sealed,
    hash_bytes,
)
from tokenmill.store.shard import dtype_for, hash_file

__all__ = ["finish", "package_version"]

REJECTS = "rejects.jsonl"


def finish(
    journal: Journal,
    *,
    num_tasks: int,
    settings: Settings,
    inputs: list[InputFile],
    tokenizer: Tokenizer,
    engine: str,
    parity: ParityInfo | None,
) -> Manifest:
    """Write rejects.jsonl and the manifest from the journal, then remove the journal."""
    records = list(journal.records())
    if len(records) != num_tasks:
        raise StoreError(
            f"{journal.folder} has {len(records)} entries for {num_tasks} finished tasks; run the same command again"
        )
    journal.sweep({record.name: record for record in records})
    store = journal.store
    rejects: Counter[str] = Counter()
    for record in records:
        rejects.update(record.rejects)
    files = {}
    if rejects:
        files[REJECTS] = _join_rejects(journal, records, inputs)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        dtype=dtype_for(tokenizer.vocab_size),
        tokenizer=_describe_tokenizer(tokenizer, store),
        engine=EngineInfo(
            name=engine,
            version=package_version(engine),
            parity=parity,
            num_rerouted=sum(record.num_rerouted for record in records),
        ),
        special_tokens=SpecialTokensInfo(
            bos_id=settings.policy.bos_id,
            eos_id=settings.policy.eos_id,
            in_text=settings.policy.special_tokens,
            num_parsed=sum(record.num_parsed for record in records),
        ),
        splits=_splits(records, settings),
        num_documents_in=sum(record.num_documents_in for record in records),
        num_rejects=sum(rejects.values()),
        rejects=dict(sorted(rejects.items())),
        files=files,
        settings=settings.flags(),
        inputs=[InputInfo(file.name, file.bytes, file.fingerprint) for file in inputs],
    )
    assert manifest.num_documents_in == manifest.num_documents + manifest.num_rejects
    data = encode_sealed(manifest)
    write_durably(store / MANIFEST, data)
    journal.remove()
    return msgspec.json.decode(data, type=Manifest)


def _splits(records: list[TaskRecord], settings: Settings) -> dict[str, SplitInfo]:
    names = ["train", "val"] if settings.val_fraction > 0 else ["train"]
    splits = {}
    for name in names:
        shards = [record.shards[name] for record in records if name in record.shards]
        splits[name] = SplitInfo(sum(s.num_documents for s in shards), sum(s.num_tokens for s in shards), shards)
    return splits


def _describe_tokenizer(tokenizer: Tokenizer, store: Path) -> TokenizerInfo:
    files = {name: FileInfo(len(data), hash_bytes(data)) for name, data in sorted(tokenizer.files.items())}
    return TokenizerInfo(tokenizer.name, tokenizer.kind, tokenizer.sha256, tokenizer.vocab_size, files)


def _join_rejects(journal: Journal, records: list[TaskRecord], inputs: list[InputFile]) -> FileInfo:
    """One line per reject in input order, with line numbers of the whole input."""
    target = journal.store / REJECTS
    temporary = target.with_suffix(".jsonl.tmp")
    lines_before: Counter[int] = Counter()
    with temporary.open("wb") as out:
        for record in records:
            path = journal.rejects_path(record.name)
            if record.rejects:
                with path.open("rb") as stored:
                    for line in stored:
                        reject = msgspec.json.decode(line, type=StoredReject)
                        out.write(_render_reject(reject, inputs[reject.input], lines_before[record.input]))
            if record.counts_lines:
                lines_before[record.input] += record.num_lines
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(target)
    sync_directory(journal.store)
    with target.open("rb") as file:
        return hash_file(file)


def _render_reject(reject: StoredReject, file: InputFile, lines_before: int) -> bytes:
    row: dict[str, object] = {"file": file.name}
    if file.format == "parquet":
        row["row"] = reject.position + 1 if reject.line >= 0 else None
    elif file.format == "json":
        # Its bytes are those of the lines that were made of it, which nobody else has.
        row["element"] = reject.line + lines_before + 1 if reject.line >= 0 else None
    else:
        row["line"] = reject.line + lines_before + 1 if reject.line >= 0 else None
        row["byte"] = reject.position
    row |= {"reason": reject.reason, "detail": reject.detail}
    if reject.num_documents > 1:
        row["documents"] = reject.num_documents
    return msgspec.json.encode(row) + b"\n"


def package_version(engine: str) -> str:
    """The installed version of the library behind an engine."""
    package = {"huggingface": "tokenizers", "bytes": "tokenmill"}.get(engine, engine)
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
