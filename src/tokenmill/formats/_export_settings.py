"""The settings of an export, checked against the format and the store: which rows, which columns, which losses.

A loss mask is never left out unless the user says so: without it, prompts would be trained on and nothing would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, get_args

import msgspec

from tokenmill.arguments import flag, one_of, show, whole_number
from tokenmill.dataset.packing_report import LongDocuments
from tokenmill.errors import UsageError
from tokenmill.formats._table_blocks import COLUMNS, IDS, MASKS, SEGMENT_LENGTHS
from tokenmill.formats.base import Exporter, ExportRows
from tokenmill.store.documents import Documents

__all__ = ["ExportFlags", "ExportSettings", "choose_rows"]

PACKINGS = ("concat", "best-fit", "pad")
WITH_MASKS = "hf, parquet, npy, datatrove or olmo"

Note = Callable[[str], None]


class ExportFlags(TypedDict, total=False):
    """The settings as keyword arguments, for editors and type checkers."""

    seq_len: int | None
    packing: Literal["concat", "best-fit", "pad"] | None
    long_documents: LongDocuments | None
    columns: str | Sequence[str] | None
    drop_mask: bool
    eos_check: bool


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; None where the format decides."""

    seq_len: int | None = None
    packing: str | None = None
    long_documents: str | None = None
    columns: Any = None
    drop_mask: bool = False
    eos_check: bool = True

    def __post_init__(self) -> None:
        flag(self.drop_mask, "drop_mask")
        flag(self.eos_check, "eos_check")


def choose_rows(
    to: str, exporter: Exporter, settings: ExportSettings, splits: dict[str, Documents], note: Note
) -> ExportRows:
    """Return the rows and columns of an export, or say which of the settings the format does not have."""
    has_mask = any(documents.mask is not None for documents in splits.values())
    if has_mask and not exporter.carries_mask:
        raise UsageError(
            f"--to {to} has no place for a loss mask, and without it every token would be trained on; "
            f"use --to {WITH_MASKS}, or pass --drop-mask"
        )
    if exporter.shape == "table":
        rows = _choose_table(to, settings, splits)
    else:
        _refuse_table_settings(to, settings)
        rows = _choose_plain(to, exporter, settings.seq_len, note)
    has_weights = any(documents.weight is not None for documents in splits.values())
    if has_weights and not exporter.carries_weights:
        note(f"--to {to} has no place for weights of tokens; they are left out")
    elif has_weights and exporter.shape == "table" and "loss_weights" not in rows.columns:
        note("--columns has no loss_weights; the weights of tokens are left out")
    return rows


def _choose_plain(to: str, exporter: Exporter, seq_len: int | None, note: Note) -> ExportRows:
    """Return the row length, if the format has rows."""
    if exporter.shape == "documents":
        if seq_len is not None:
            note(f"--to {to} stores whole documents; --seq-len {seq_len} is not used")
        return ExportRows(packing="documents")
    if seq_len is None:
        raise UsageError(f"--to {to} needs --seq-len, the number of tokens per row")
    return ExportRows(seq_len=whole_number(seq_len, "--seq-len", 1))


def _refuse_table_settings(to: str, settings: ExportSettings) -> None:
    for name in ("packing", "long_documents", "columns"):
        if getattr(settings, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is for --to hf and --to parquet, not for --to {to}; leave it out"
            )


def _choose_table(to: str, settings: ExportSettings, splits: dict[str, Documents]) -> ExportRows:
    """Return whole documents without a row length, otherwise rows of a packing; with the columns they need."""
    has_mask = any(documents.mask is not None for documents in splits.values())
    if settings.seq_len is None:
        for name in ("packing", "long_documents"):
            if getattr(settings, name) is not None:
                flag_name = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag_name} needs --seq-len; without it, --to {to} has one row per document")
        columns = _choose_columns(settings.columns, splits, ())
        return ExportRows(packing="documents", columns=columns)
    seq_len = whole_number(settings.seq_len, "--seq-len", 1)
    packing = settings.packing or ("best-fit" if has_mask else "concat")
    one_of(packing, PACKINGS, "--packing")
    if settings.long_documents is not None and packing == "concat":
        raise UsageError("--long-documents has no effect with --packing concat; use --packing best-fit or pad")
    long_documents = one_of(settings.long_documents or "split", get_args(LongDocuments), "--long-documents")
    is_joined = packing == "best-fit" or (packing == "concat" and has_mask)
    columns = _choose_columns(settings.columns, splits, (SEGMENT_LENGTHS,) if is_joined else ())
    return ExportRows(seq_len=seq_len, packing=packing, long_documents=long_documents, columns=columns)


def _choose_columns(asked: Any, splits: dict[str, Documents], for_rows: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns beside the ids: those that were asked for, or those without which something would be lost."""
    has_mask = any(documents.mask is not None for documents in splits.values())
    has_weights = any(documents.weight is not None for documents in splits.values())
    if asked is None:
        return ("labels",) * has_mask + ("loss_weights",) * has_weights + for_rows
    names = [name.strip() for name in asked.split(",")] if isinstance(asked, str) else asked
    if not isinstance(names, (list, tuple)):
        raise UsageError(f"--columns {show(asked)} is not a list of names, such as labels,seq_lengths")
    columns = tuple(dict.fromkeys(one_of(name, (IDS, *COLUMNS), "--columns") for name in names))
    if has_mask and not set(columns) & set(MASKS):
        raise UsageError(
            f"--columns {','.join(columns)} has no place for the loss mask, and without it every token would be "
            f"trained on; add labels, or another of {', '.join(MASKS[1:])}, or pass --drop-mask"
        )
    return tuple(name for name in columns if name != IDS)
