"""Exporters: a store in the formats of other trainers and loaders, and `export`, which writes one.

Every export is written beside its place, read back, compared with the store and only then given its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.arguments import local_path
from tokenmill.dataset.base import whole_number
from tokenmill.errors import StoreError, UsageError
from tokenmill.exporters.base import Exporter, SplitSource
from tokenmill.exporters.checking import compare
from tokenmill.exporters.publishing import RECEIPT, check_destination, new_folder
from tokenmill.store.documents import Documents
from tokenmill.store.opening import open_tokens
from tokenmill.store.store import TokenSource, TokenStore

__all__ = ["FORMATS", "Export", "ExportedSplit", "export"]

FORMATS = {
    "megatron": ("tokenmill.exporters.megatron", "Megatron"),
    "nanogpt": ("tokenmill.exporters.nanogpt", "NanoGpt"),
    "llmc": ("tokenmill.exporters.llmc", "LlmC"),
    "datatrove": ("tokenmill.exporters.datatrove", "Datatrove"),
    "olmo": ("tokenmill.exporters.olmo", "Olmo"),
    "parquet": ("tokenmill.exporters.parquet", "ParquetRows"),
    "hf": ("tokenmill.exporters.hf", "HfDataset"),
    "pt": ("tokenmill.exporters.pt", "TensorFiles"),
    "npy": ("tokenmill.exporters.npy", "NumpyArrays"),
    "mds": ("tokenmill.exporters.mds", "MosaicShards"),
    "litdata": ("tokenmill.exporters.litdata", "LitChunks"),
    "arrayrecord": ("tokenmill.exporters.arrayrecord", "ArrayRecords"),
}

WRITING, CHECKING = "writing", "checking"

Advance = Callable[[str, int, int], None]
"""Told the stage, how many tokens of it are done, and how many there are."""


class ExportedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """What an export holds of one split."""

    num_documents: int
    num_tokens: int
    num_rows: int | None
    """None where whole documents are stored."""
    num_left_out: int
    """Tokens behind the last full row."""
    xxh3: str
    """Of the ids as int32; the same in the store and in the files that were read back."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A finished export; also what its file `.tokenmill.json` says."""

    format: str
    seq_len: int | None
    splits: dict[str, ExportedSplit]

    def line(self, dest: str | Path) -> str:
        """What was written, in one line."""
        parts = [_describe(name, split, self.seq_len) for name, split in self.splits.items()]
        return f"{dest} ({self.format}): {'; '.join(parts)}; tokens read back and equal to the store's"


def _describe(name: str, split: ExportedSplit, seq_len: int | None) -> str:
    if split.num_rows is None:
        said = f"{name} {split.num_tokens:,} tokens in {split.num_documents:,} documents"
    else:
        said = f"{name} {split.num_rows:,} rows of {seq_len:,}, {split.num_tokens:,} tokens"
    if split.num_left_out:
        said += f" ({split.num_left_out:,} behind the last full row left out)"
    return f"{said}, xxh3 {split.xxh3}"


def export(
    source: str | Path | TokenSource,
    dest: str | Path,
    *,
    to: str,
    seq_len: int | None = None,
    split: str | None = None,
    links: bool = False,
    overwrite: bool = False,
    advance: Advance = lambda _stage, _done, _total: None,
    note: Callable[[str], None] = lambda _text: None,
) -> Export:
    """Write a store, or one split of it, in the format `to` as the folder `dest`.

    `dest` appears when all of it is written and has been compared with the store. `links` asks for
    one file per shard, each a hard link, instead of one file per split.
    """
    opened = source if isinstance(source, TokenSource) else open_tokens(source)
    place = check_destination(local_path(dest, "DEST"), opened.path, _folders(opened), overwrite=overwrite)
    exporter, seq_len = _choose(to, seq_len, links=links, note=note)
    if links and not isinstance(opened, TokenStore):
        raise UsageError(f"--links needs a store of tokenmill, which {opened.path} is not")
    chosen = _splits(opened, split, note)
    total = sum(documents.num_tokens for documents in chosen.values())
    written = _Progress(advance, WRITING, total)
    splits = [
        _describe_split(opened, name, tuple(chosen), seq_len=seq_len or 0, links=links, progress=written, note=note)
        for name in chosen
    ]
    for one in splits:
        exporter.check(one)
    opened.make_local()
    _note_what_is_lost(exporter, splits, to, note)
    with new_folder(place) as folder:
        for one in splits:
            exporter.write(one, _folder_of(one, exporter, folder))
        checked = _Progress(advance, CHECKING, 2 * total)
        done = {one.name: _check(one, exporter, folder, checked) for one in splits}
        result = Export(format=to, seq_len=seq_len, splits=done)
        (folder / RECEIPT).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


class _Progress:
    """Counts tokens of one stage."""

    def __init__(self, advance: Advance, stage: str, total: int) -> None:
        self._advance, self._stage, self._total = advance, stage, total
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._advance(self._stage, self._done, self._total)


def _choose(to: str, seq_len: int | None, *, links: bool, note: Callable[[str], None]) -> tuple[Exporter, int | None]:
    """The format, and the row length as far as it has one."""
    if to not in FORMATS:
        raise UsageError(f"--to {to} is not a format; expected {', '.join(FORMATS)}")
    module, name = FORMATS[to]
    exporter: Exporter = getattr(import_module(module), name)()
    if links and not exporter.can_link:
        raise UsageError(f"--links is for formats whose files are the store's shards, which those of {to} are not")
    if exporter.shape == "documents":
        if seq_len is not None:
            note(f"--to {to} stores whole documents; --seq-len {seq_len} is not used")
        return exporter, None
    if seq_len is None:
        raise UsageError(f"--to {to} needs --seq-len, the number of tokens per row")
    return exporter, whole_number(seq_len, "--seq-len", 1)


def _folders(source: TokenSource) -> list[Path]:
    """The folders that the source's files are in."""
    parents = {os.path.dirname(stem) for documents in source.splits.values() for stem in documents.table.stems}  # noqa: PTH120
    return [Path(parent) for parent in sorted(parents)]


def _splits(source: TokenSource, name: str | None, note: Callable[[str], None]) -> dict[str, Documents]:
    """The splits to export: the one that was named, else all that have tokens."""
    if name is not None:
        documents = source.split(name)
        if not documents.num_tokens:
            raise UsageError(f"split {name} of {source.path} has no tokens to export")
        return {name: documents}
    chosen = {}
    for one, documents in source.splits.items():
        if documents.num_tokens:
            chosen[one] = documents
        else:
            note(f"split {one} has no tokens and is left out")
    if not chosen:
        raise UsageError(f"{source.path} has no tokens to export")
    return chosen


def _describe_split(
    source: TokenSource, name: str, names: tuple[str, ...], *, progress: _Progress, **settings: Any
) -> SplitSource:
    documents = source.split(name)
    manifest = source.manifest if isinstance(source, TokenStore) else None
    return SplitSource(
        name=name,
        names=names,
        documents=documents,
        stems=tuple(documents.table.stems) if manifest else (),
        path=source.path,
        tokenizer=manifest.tokenizer.name if manifest else "unknown",
        vocab_size=source.vocab_size,
        bos_id=manifest.special_tokens.bos_id if manifest else None,
        eos_id=manifest.special_tokens.eos_id if manifest else None,
        inputs=tuple(file.path for file in manifest.inputs) if manifest else (),
        advance=progress,
        **settings,
    )


def _note_what_is_lost(exporter: Exporter, splits: list[SplitSource], to: str, note: Callable[[str], None]) -> None:
    if not exporter.carries_mask and any(one.documents.mask is not None for one in splits):
        note(f"--to {to} has no place for a loss mask; it is left out, and every token counts as trained")
    if any(one.documents.weight is not None for one in splits):
        note(f"--to {to} has no place for weights of tokens; they are left out")


def _folder_of(split: SplitSource, exporter: Exporter, folder: Path) -> Path:
    """The folder itself, or one for each split where readers take all files that they find."""
    if not exporter.is_folder or len(split.names) == 1:
        return folder
    own = folder / split.name
    own.mkdir(exist_ok=True)
    return own


def _check(split: SplitSource, exporter: Exporter, folder: Path, advance: _Progress) -> ExportedSplit:
    """Read a split back and compare it with the store."""
    documents = split.documents
    is_cut = exporter.shape == "rows"
    num_tokens = split.num_rows * split.seq_len if is_cut else documents.num_tokens
    found = compare(split, _read(split, exporter, folder), num_tokens, advance)
    return ExportedSplit(
        num_documents=documents.num_documents,
        num_tokens=found.num_tokens,
        num_rows=_num_rows(split, exporter),
        num_left_out=documents.num_tokens - found.num_tokens,
        xxh3=found.xxh3,
    )


def _read(split: SplitSource, exporter: Exporter, folder: Path) -> Iterator[Any]:
    """What was written; whatever a library cannot read of it is said in one sentence."""
    try:
        yield from exporter.read(split, _folder_of(split, exporter, folder))
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        said = str(error).partition("\n")[0]
        raise StoreError(f"what was written of split {split.name} cannot be read back: {said}") from None


def _num_rows(split: SplitSource, exporter: Exporter) -> int | None:
    if exporter.shape == "documents":
        return None
    if exporter.shape == "rows":
        return split.num_rows
    return sum(int((-(-lengths // split.seq_len)).sum()) for lengths in split.documents.lengths())
