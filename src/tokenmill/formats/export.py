"""`tokenmill.export`: write a store in the format of another trainer or loader.

An export is written under a temporary name and read back. Its ids must be those of the store, in number and hash; only
then does it get its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tokenmill.arguments import local_path, whole_number
from tokenmill.errors import StoreError, UsageError
from tokenmill.formats import FORMATS, load_format
from tokenmill.formats._destination import RECEIPT, check_destination, new_folder
from tokenmill.formats._token_blocks import convert, token_blocks
from tokenmill.formats.base import Array, Exporter, SplitSource
from tokenmill.formats.open import open_tokens
from tokenmill.store.documents import Documents
from tokenmill.store.store import TokenSource, TokenStore

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
    """Tokens after the last full row."""
    xxh3: str
    """The XXH3-64 of the ids as int32, so that the same tokens have the same hash in every format."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A finished export; also the content of its file `.tokenmill.json`."""

    format: str
    seq_len: int | None
    splits: dict[str, ExportedSplit]

    def line(self, dest: str | Path) -> str:
        """Say in one line what was written."""
        parts = [_describe(name, split, self.seq_len) for name, split in self.splits.items()]
        return f"{dest} ({self.format}): {'; '.join(parts)}; tokens read back and equal to the store's"


def _describe(name: str, split: ExportedSplit, seq_len: int | None) -> str:
    if split.num_rows is None:
        said = f"{name} {split.num_tokens:,} tokens in {split.num_documents:,} documents"
    else:
        said = f"{name} {split.num_rows:,} rows of {seq_len:,}, {split.num_tokens:,} tokens"
    if split.num_left_out:
        said += f" ({split.num_left_out:,} after the last full row left out)"
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
    note: Note = lambda _text: None,
) -> Export:
    """Write a store, or one split of it, in the format `to` as the folder `dest`.

    `dest` appears once everything is written and has been compared with the store. `links` asks for
    one file per shard, each a hard link, instead of one file per split.
    """
    opened = source if isinstance(source, TokenSource) else open_tokens(source)
    place = check_destination(local_path(dest, "DEST"), opened.path, _folders(opened), overwrite=overwrite)
    exporter, seq_len = _choose_format(to, seq_len, links=links, note=note)
    if links and not isinstance(opened, TokenStore):
        raise UsageError(f"--links needs a store of tokenmill, which {opened.path} is not")
    chosen = _choose_splits(opened, split, note)
    for documents in chosen.values():
        if documents.holds is not None:
            raise UsageError(
                f"{documents.name} holds {documents.holds}, and an export would make a trainer learn all of it; load "
                f"it with tm.load(..., packing={documents.holds!r})"
            )
    total = sum(documents.num_tokens for documents in chosen.values())
    written, checked = _count(advance, WRITING, total), _count(advance, CHECKING, 2 * total)
    splits = _split_sources(opened, chosen, seq_len=seq_len or 0, links=links, advance=written, note=note)
    for one in splits:
        if exporter.shape == "rows" and one.num_rows < 1:
            raise UsageError(
                f"split {one.name} has {one.documents.num_tokens:,} tokens, which fill no row of {seq_len:,}; "
                "use a smaller --seq-len, or choose another split with --split"
            )
        exporter.check(one)
    opened.make_local()
    _note_losses(exporter, splits, to, note)
    with new_folder(place) as folder:
        for one in splits:
            exporter.write(one, _folder_of(one, exporter, folder))
        done = {one.name: _compare(one, exporter, folder, checked) for one in splits}
        result = Export(format=to, seq_len=seq_len, splits=done)
        (folder / RECEIPT).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


def _count(advance: Advance, stage: str, total: int) -> Callable[[int], None]:
    """Return a function that counts the tokens of a stage and reports how many are done."""
    done = 0

    def count_more(count: int) -> None:
        nonlocal done
        done += count
        advance(stage, done, total)

    return count_more


def _choose_format(to: str, seq_len: int | None, *, links: bool, note: Note) -> tuple[Exporter, int | None]:
    """Return the format, and the row length if the format has rows."""
    if to not in FORMATS:
        raise UsageError(f"--to {to} is not a format; expected {', '.join(FORMATS)}")
    exporter = load_format(to)
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
            eos_id=manifest.special_tokens.eos_id if manifest else None,
            inputs=tuple(file.path for file in manifest.inputs) if manifest else (),
            **settings,
        )
        for name, documents in chosen.items()
    ]


def _note_losses(exporter: Exporter, splits: list[SplitSource], to: str, note: Note) -> None:
    """Tell the user what the format cannot store."""
    if not exporter.carries_mask and any(one.documents.mask is not None for one in splits):
        note(f"--to {to} has no place for a loss mask; it is left out, and every token counts as trained")
    if any(one.documents.weight is not None for one in splits):
        note(f"--to {to} has no place for weights of tokens; they are left out")


def _folder_of(split: SplitSource, exporter: Exporter, folder: Path) -> Path:
    """Return the folder itself, or one for each split if readers take all files in a folder."""
    if not exporter.is_folder or len(split.names) == 1:
        return folder
    own = folder / split.name
    own.mkdir(exist_ok=True)
    return own


def _compare(split: SplitSource, exporter: Exporter, folder: Path, advance: Callable[[int], None]) -> ExportedSplit:
    """Read a split back, and check that its ids are those of the store."""
    documents = split.documents
    stop = split.num_rows * split.seq_len if exporter.shape == "rows" else documents.num_tokens
    ours, xxh3 = _hash(token_blocks(split, 0, stop, "<i4"), advance)
    theirs, other_xxh3 = _hash(_read(split, exporter, folder), advance)
    if (ours, xxh3) != (theirs, other_xxh3):
        raise StoreError(
            f"what was written of split {split.name} reads back as {theirs:,} tokens with hash {other_xxh3}, and "
            f"{split.path} has {ours:,} with {xxh3}, so it was removed; check the store with "
            f"tokenmill verify {split.path}, and the disk"
        )
    return ExportedSplit(
        num_documents=documents.num_documents,
        num_tokens=ours,
        num_rows=_count_rows(split, exporter),
        num_left_out=documents.num_tokens - ours,
        xxh3=xxh3,
    )


def _hash(blocks: Iterable[Array], advance: Callable[[int], None]) -> tuple[int, str]:
    """Count the ids in blocks of any shape, and hash them as int32."""
    digest = xxhash.xxh3_64()
    count = 0
    for block in blocks:
        digest.update(convert(block, "<i4").reshape(-1).view("u1").data)
        count += block.size
        advance(block.size)
    return count, digest.hexdigest()


def _read(split: SplitSource, exporter: Exporter, folder: Path) -> Iterator[Array]:
    """Read what was written, and say in one sentence if a library fails to."""
    try:
        yield from exporter.read(split, _folder_of(split, exporter, folder))
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        said = str(error).partition("\n")[0]
        raise StoreError(f"what was written of split {split.name} cannot be read back: {said}") from None


def _count_rows(split: SplitSource, exporter: Exporter) -> int | None:
    if exporter.shape == "documents":
        return None
    if exporter.shape == "rows":
        return split.num_rows
    return sum(int((-(-lengths // split.seq_len)).sum()) for lengths in split.documents.lengths())
