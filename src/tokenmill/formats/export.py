"""`tokenmill.export`: write a store in the format of another trainer or loader.

An export is written under a temporary name and read back. Its ids, and the columns of a table, must be those of the
store, in number and hash; only then does it get its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from tokenmill.arguments import local_path
from tokenmill.errors import StoreError, UsageError
from tokenmill.formats import FORMATS, FormatName, load_format
from tokenmill.formats._destination import RECEIPT, check_destination, new_folder
from tokenmill.formats._export_settings import ExportSettings, choose_rows
from tokenmill.formats._table_blocks import IDS
from tokenmill.formats._token_blocks import convert, token_blocks
from tokenmill.formats.base import Array, Exporter, ExportRows, SplitSource
from tokenmill.formats.open import open_tokens
from tokenmill.formatting import plural
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource, TokenStore

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tokenmill.formats._export_settings import ExportFlags

__all__ = ["Export", "ExportedSplit", "export"]

WRITING, CHECKING = "writing", "checking"

Advance = Callable[[str, int, int], None]
"""Called with the stage, how many of its tokens are done, and how many there are."""
Note = Callable[[str], None]


class ExportedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """What an export holds of one split."""

    num_documents: int
    num_tokens: int
    num_rows: int | None
    """None if whole documents are stored."""
    num_left_out: int
    """Tokens after the last full row, or of documents that are longer than one."""
    xxh3: str
    """The XXH3-64 of the ids as int32, so that the same tokens have the same hash in every format."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A finished export; also the content of its file `.tokenmill.json`."""

    format: str
    seq_len: int | None
    packing: str | None = None
    """How rows were filled; None if they are pieces of the stream or whole documents."""
    columns: list[str] = []
    """The columns of a table beside the ids."""
    splits: dict[str, ExportedSplit]

    def line(self, dest: str | Path) -> str:
        """Say in one line what was written."""
        parts = [self._describe(name, split) for name, split in self.splits.items()]
        kind = ", ".join([self.format, *self.columns])
        checked = "columns" if self.columns else "tokens"
        return f"{dest} ({kind}): {'; '.join(parts)}; {checked} read back and equal to the store's"

    def _describe(self, name: str, split: ExportedSplit) -> str:
        if split.num_rows is None:
            said = f"{name} {plural(split.num_tokens, 'token')} in {plural(split.num_documents, 'document')}"
        elif self.seq_len is None:
            said = f"{name} {plural(split.num_rows, 'document')} as rows, {plural(split.num_tokens, 'token')}"
        else:
            filled = f" ({self.packing})" if self.packing else ""
            rows = f"{plural(split.num_rows, 'row')} of {self.seq_len:,}{filled}"
            said = f"{name} {rows}, {plural(split.num_tokens, 'token')}"
        if split.num_left_out:
            where = "of long documents" if self.packing in ("best-fit", "pad") else "after the last full row"
            said += f" ({split.num_left_out:,} {where} left out)"
        return f"{said}, xxh3 {split.xxh3}"


def export(
    source: str | Path | TokenSource,
    dest: str | Path,
    *,
    to: FormatName,
    split: str | None = None,
    links: bool = False,
    overwrite: bool = False,
    advance: Advance = lambda _stage, _done, _total: None,
    note: Note = lambda _text: None,
    **settings: Unpack[ExportFlags],
) -> Export:
    """Write a store, or one split of it, in the format `to` as the folder `dest`.

    `dest` appears once everything is written and has been compared with the store. `links` asks for
    one file per shard, each a hard link, instead of one file per split. `settings` are those of `ExportSettings`:
    seq_len, packing, long_documents and columns say which rows a format gets, `drop_mask` leaves a loss mask out, and
    `eos_check=False` exports documents that the format's readers would not find.
    """
    asked = _read_settings(dict(settings))
    opened = source if isinstance(source, TokenSource) else open_tokens(source)
    place = check_destination(local_path(dest, "DEST"), opened.path, _folders(opened), overwrite=overwrite)
    exporter = _choose_format(to, links=links)
    if links and not isinstance(opened, TokenStore):
        raise UsageError(f"--links needs a store of tokenmill, which {opened.path} is not")
    chosen = _choose_splits(opened, split, note)
    _refuse_pairs(chosen.values())
    if asked.drop_mask:
        chosen = {name: documents.without_values() for name, documents in chosen.items()}
    rows = choose_rows(to, exporter, asked, chosen, note)
    total = sum(documents.num_tokens for documents in chosen.values())
    written, checked = _count(advance, WRITING, total), _count(advance, CHECKING, 2 * total)
    looks_for_eos = asked.eos_check and exporter.boundary_reader
    eos_id = _find_eos(opened, or_default=bool(looks_for_eos))
    splits = _split_sources(opened, chosen, eos_id=eos_id, rows=rows, links=links, advance=written, note=note)
    for one in splits:
        if _is_cut(exporter, rows) and one.num_rows < 1:
            raise UsageError(
                f"split {one.name} has {one.documents.num_tokens:,} tokens, which fill no row of {rows.seq_len:,}; "
                "use a smaller --seq-len, or choose another split with --split"
            )
        exporter.check(one)
    opened.make_local()
    if asked.eos_check:
        _check_documents(exporter, opened, splits, note)
    with new_folder(place) as folder:
        for one in splits:
            exporter.write(one, _folder_of(one, exporter, folder))
        done = {one.name: _compare(one, exporter, folder, checked) for one in splits}
        result = Export(
            format=to,
            seq_len=rows.seq_len or None,
            packing=rows.packing if exporter.shape == "table" and rows.seq_len else None,
            columns=list(rows.columns),
            splits=done,
        )
        (folder / RECEIPT).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


def _is_cut(exporter: Exporter, rows: ExportRows) -> bool:
    """Whether rows are pieces of the stream of all tokens."""
    return exporter.shape == "rows" or (exporter.shape == "table" and rows.packing == "concat")


def _count(advance: Advance, stage: str, total: int) -> Callable[[int], None]:
    """Return a function that counts the tokens of a stage and reports how many are done."""
    done = 0

    def count_more(count: int) -> None:
        nonlocal done
        done += count
        advance(stage, done, total)

    return count_more


def _read_settings(settings: dict[str, Any]) -> ExportSettings:
    known = ExportSettings.__struct_fields__
    for name in settings:
        if name not in known:
            raise UsageError(f"{name!r} is no setting of export; there are {', '.join(known)}")
    return ExportSettings(**settings)


def _choose_format(to: FormatName, *, links: bool) -> Exporter:
    """Return the format."""
    if to not in FORMATS:
        raise UsageError(f"--to {to} is not a format; expected {', '.join(FORMATS)}")
    exporter = load_format(to)
    if links and not exporter.can_link:
        raise UsageError(f"--links is for formats whose files are the store's shards, which those of {to} are not")
    return exporter


def _check_documents(exporter: Exporter, source: TokenSource, splits: list[SplitSource], note: Note) -> None:
    """Check that the format's readers will find the store's documents; of other files, no one knows the token."""
    if isinstance(source, TokenStore):
        for split in splits:
            exporter.check_documents(split)
    elif exporter.boundary_reader:
        note(
            f"{exporter.boundary_reader} finds documents by the end-of-text token, and {source.path} does not say "
            "which one that is, so it is not checked"
        )


def _folders(source: TokenSource) -> list[Path]:
    """List the folders that hold the source's files."""
    parents = {os.path.dirname(stem) for documents in source.splits.values() for stem in documents.table.stems}  # noqa: PTH120
    return [Path(parent) for parent in sorted(parents)]


def _choose_splits(source: TokenSource, name: str | None, note: Note) -> dict[str, Documents]:
    """Return the split that was named, or all splits that have tokens."""
    if name is not None:
        documents = source.split(name)
        if not documents.num_tokens:
            raise UsageError(f"split {name} of {source.path} has no tokens to export")
        return {name: documents}
    for empty in (one for one, documents in source.splits.items() if not documents.num_tokens):
        note(f"split {empty} has no tokens and is left out")
    chosen = {one: documents for one, documents in source.splits.items() if documents.num_tokens}
    if not chosen:
        raise UsageError(f"{source.path} has no tokens to export")
    return chosen


def _refuse_pairs(chosen: Iterable[Documents]) -> None:
    """Refuse preference pairs: an export has no place for which document of a pair is the rejected one."""
    for documents in chosen:
        if documents.holds is not None:
            raise UsageError(
                f"{documents.name} holds {documents.holds}, and an export would make a trainer learn all of it; load "
                f"it with tm.load(..., packing={documents.holds!r})"
            )


def _split_sources(source: TokenSource, chosen: dict[str, Documents], **settings: Any) -> list[SplitSource]:
    manifest = source.manifest if isinstance(source, TokenStore) else None
    return [
        SplitSource(
            name=name,
            names=tuple(chosen),
            documents=documents,
            stems=tuple(documents.table.stems) if manifest else (),
            path=source.path,
            tokenizer=manifest.tokenizer.name if manifest else "unknown",
            vocab_size=source.vocab_size,
            bos_id=manifest.special_tokens.bos_id if manifest else None,
            inputs=tuple(file.path for file in manifest.inputs) if manifest else (),
            **settings,
        )
        for name, documents in chosen.items()
    ]


def _find_eos(source: TokenSource, *, or_default: bool) -> int | None:
    """Return the token that the run put after documents, or the tokenizer's, which a chat template may have put."""
    if not isinstance(source, TokenStore):
        return None
    added = source.manifest.special_tokens.eos_id
    return source.tokenizer.eos_id if added is None and or_default else added


def _folder_of(split: SplitSource, exporter: Exporter, folder: Path) -> Path:
    """Return the folder itself, or one for each split if readers take all files in a folder."""
    if not exporter.is_folder or len(split.names) == 1:
        return folder
    own = folder / split.name
    own.mkdir(exist_ok=True)
    return own


def _compare(split: SplitSource, exporter: Exporter, folder: Path, advance: Callable[[int], None]) -> ExportedSplit:
    """Read a split back, and check that its ids and columns are those of the store."""
    documents = split.documents
    ours = _hash(_expect(split, exporter), advance)
    theirs = _hash(_read(split, exporter, folder), advance)
    if ours != theirs:
        raise StoreError(
            f"what was written of split {split.name} reads back as {_tell(theirs, ours)}, and {split.path} has "
            f"{_tell(ours, theirs)}, so it was removed; check the store with "
            f"tokenmill verify {split.path}, and the disk"
        )
    return ExportedSplit(
        num_documents=documents.num_documents,
        num_tokens=ours.num_tokens,
        num_rows=_count_rows(split, exporter, ours),
        num_left_out=documents.num_tokens - ours.num_tokens,
        xxh3=ours.hashes[IDS],
    )


def _expect(split: SplitSource, exporter: Exporter) -> Iterator[Any]:
    """Yield what the files must hold, from the store."""
    if exporter.shape == "table":
        return exporter.expect(split)
    stop = split.num_rows * split.seq_len if exporter.shape == "rows" else split.documents.num_tokens
    return token_blocks(split, 0, stop, "<i4")


class _Digest(msgspec.Struct):
    """How many ids, how many rows of a table, and a hash of every column: ids as int32, others as they are."""

    num_tokens: int
    num_rows: int
    hashes: dict[str, str]


def _tell(one: _Digest, other: _Digest) -> str:
    """Describe the first column in which two digests differ."""
    name = next((name for name, found in one.hashes.items() if other.hashes.get(name) != found), IDS)
    column = "" if name == IDS else f" of column {name}"
    return f"{plural(one.num_tokens, 'token')} with hash {one.hashes.get(name)}{column}"


def _hash(blocks: Iterable[Any], advance: Callable[[int], None]) -> _Digest:
    """Hash ids in blocks of any shape, or the values of all columns and how many of them each row has."""
    digests = {IDS: xxhash.xxh3_64()}
    num_tokens = num_rows = 0

    def update(name: str, values: Array) -> None:
        digests.setdefault(name, xxhash.xxh3_64()).update(np.ascontiguousarray(values).reshape(-1).view("u1").data)

    for block in blocks:
        columns = block if isinstance(block, dict) else {IDS: (block, None)}
        for name, (values, lengths) in columns.items():
            update(name, convert(values, "<i4") if name == IDS else values)
            if lengths is not None:
                update(f"{name} (lengths)", lengths.astype("<i4"))
        ids, lengths = columns[IDS]
        num_tokens, num_rows = num_tokens + ids.size, num_rows + (0 if lengths is None else len(lengths))
        advance(ids.size)
    return _Digest(num_tokens, num_rows, {name: digest.hexdigest() for name, digest in digests.items()})


def _read(split: SplitSource, exporter: Exporter, folder: Path) -> Iterator[Any]:
    """Read what was written, and say in one sentence if a library fails to."""
    try:
        yield from exporter.read(split, _folder_of(split, exporter, folder))
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        said = str(error).partition("\n")[0]
        raise StoreError(f"what was written of split {split.name} cannot be read back: {said}") from None


def _count_rows(split: SplitSource, exporter: Exporter, digest: _Digest) -> int | None:
    if exporter.shape in ("documents", "table"):
        return digest.num_rows or None
    if exporter.shape == "rows":
        return split.num_rows
    return sum(int((-(-lengths // split.seq_len)).sum()) for lengths in split.documents.lengths())
