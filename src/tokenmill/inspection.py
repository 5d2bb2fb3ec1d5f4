"""`inspect`: what a store holds, for people to look at: totals, lengths, and single documents.

A document's text is untrusted: characters that would move the cursor or change the terminal
are shown as symbols. A byte-level token may be half a character, so tokens are grouped until
their bytes are whole characters.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tokenmill.dataset.base import Rows
from tokenmill.dataset.copying import RowBlock
from tokenmill.engines.decoding import Decoder
from tokenmill.progress import format_bytes, show_safely
from tokenmill.store.documents import Documents
from tokenmill.store.manifest import Manifest
from tokenmill.store.sources import read_sources
from tokenmill.store.store import TokenStore

__all__ = [
    "TokenGroup",
    "group_tokens",
    "overview_json",
    "render_document",
    "render_overview",
    "render_row",
    "show_safely",
]

EXACT_LENGTHS = 1 << 16
"""Documents shorter than this are counted by their exact length, so that the median is exact."""
LENGTHS_AT_ONCE = 1 << 20
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 512, 2048
BAR_COLUMNS = 36
PACKED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".parquet")
LAST_GROUPS = 2
MOST_PER_CHARACTER = 4
"""A character of UTF-8 has four bytes, so no more tokens than that can share one."""
PIECE_COLUMNS = 18
SHADES = ("color(16) on color(117)", "color(16) on color(222)")
"""Light blue and light gold; in a terminal of 16 colours they stay two different ones."""
SPECIAL = "bold color(231) on color(90)"


@dataclass(frozen=True)
class Lengths:
    """Tokens per document of one split."""

    num_documents: int
    num_tokens: int
    shortest: int
    median: float
    longest: int
    bins: list[tuple[int, int, int]]
    """Shortest and longest length of a bin, and how many documents are in it."""

    @property
    def mean(self) -> float:
        """Tokens per document."""
        return self.num_tokens / self.num_documents if self.num_documents else 0.0


def measure_lengths(split: Documents) -> Lengths:
    """Exact statistics in one pass over the index, whatever the number of documents."""
    exact = np.zeros(EXACT_LENGTHS + 1, np.int64)
    powers = np.zeros(33, np.int64)
    shortest, longest = 1 << 31, 0
    for lengths in _pieces(split):
        exact += np.bincount(np.minimum(lengths, EXACT_LENGTHS), minlength=EXACT_LENGTHS + 1)
        # frexp gives 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7: the number of the bin.
        powers += np.bincount(np.frexp(lengths)[1], minlength=33)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    used = np.flatnonzero(powers)
    bins = []
    for power in range(int(used[0]), int(used[-1]) + 1) if len(used) else ():
        bins.append(((1 << power) >> 1, (1 << power) - 1, int(powers[power])))
    middle = _median(split, exact) if split.num_documents else 0.0
    return Lengths(split.num_documents, split.num_tokens, min(shortest, longest), middle, longest, bins)


def _pieces(split: Documents) -> Iterator[npt.NDArray[np.int64]]:
    for lengths in split.lengths():
        for start in range(0, len(lengths), LENGTHS_AT_ONCE):
            yield lengths[start : start + LENGTHS_AT_ONCE]


def _median(split: Documents, exact: npt.NDArray[np.int64]) -> float:
    ends = np.cumsum(exact)
    ranks = [(split.num_documents - 1) // 2, split.num_documents // 2]
    middle = np.searchsorted(ends, ranks, "right")
    if middle.max() < EXACT_LENGTHS:
        return float(middle.mean())
    # Only where half of all documents are that long, and then there are few of them.
    return float(np.median(np.concatenate([*split.lengths()])))


def measure_text_bytes(store: TokenStore) -> tuple[float, int] | None:
    """Bytes of text per token, BOS and EOS counted as tokens, and how many documents were looked at.

    The manifest knows the size of the input files only, which may be compressed and hold more
    than text; so the tokens of documents spread over the train split are asked for their bytes.
    """
    split = store.splits["train"]
    if not split.num_tokens:
        return None
    chosen = np.unique(np.linspace(0, split.num_documents - 1, SAMPLE_DOCUMENTS).astype(np.int64)).tolist()
    ids = np.concatenate([split.document(number)[:SAMPLE_TOKENS] for number in chosen])
    decoder, specials = Decoder(store.tokenizer), set(store.tokenizer.special_tokens.values())
    distinct, counts = np.unique(ids, return_counts=True)
    sizes = [0 if token in specials else len(decoder.token_bytes(token)) for token in distinct.tolist()]
    return float(np.dot(sizes, counts) / len(ids)), len(chosen)


def overview_json(store: TokenStore) -> dict[str, Any]:
    """The overview as plain values."""
    manifest = store.manifest
    measured = measure_text_bytes(store)
    splits = {}
    for name, split in store.splits.items():
        lengths = measure_lengths(split)
        splits[name] = {
            "documents": lengths.num_documents,
            "tokens": lengths.num_tokens,
            "shards": len(split.table.stems),
            "mean_tokens": lengths.mean,
            "median_tokens": lengths.median,
            "shortest_tokens": lengths.shortest,
            "longest_tokens": lengths.longest,
            "histogram": [{"from": start, "to": stop, "documents": count} for start, stop, count in lengths.bins],
        }
    parity = manifest.engine.parity
    return {
        "store": str(store.path),
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "kind": manifest.tokenizer.kind,
            "sha256": manifest.tokenizer.sha256,
        },
        "vocab_size": store.vocab_size,
        "dtype": manifest.dtype,
        "bos_id": manifest.special_tokens.bos_id,
        "eos_id": manifest.special_tokens.eos_id,
        "special_tokens": manifest.special_tokens.in_text,
        "engine": {"name": manifest.engine.name, "version": manifest.engine.version},
        "parity": None if parity is None else {key: getattr(parity, key) for key in parity.__struct_fields__},
        "inputs": len(manifest.inputs),
        "input_bytes": sum(file.bytes for file in manifest.inputs),
        "store_bytes": _store_bytes(manifest),
        "text_bytes_per_token": None if measured is None else measured[0],
        "documents_in": manifest.num_documents_in,
        "rejects": manifest.rejects,
        "splits": splits,
    }


def render_overview(store: TokenStore) -> RenderableType:
    """Totals, how the store was made, and a histogram of document lengths."""
    lengths = {name: measure_lengths(split) for name, split in store.splits.items()}
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold cyan", no_wrap=True)
    facts.add_column()
    for name, value in _facts(store):
        facts.add_row(name, Text(value))
    totals = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold cyan")
    totals.add_column("split")
    for title in ("documents", "tokens", "mean", "median", "longest"):
        totals.add_column(title, justify="right")
    for name, split in lengths.items():
        figures = (f"{split.num_documents:,}", f"{split.num_tokens:,}", f"{split.mean:,.1f}", f"{split.median:,.1f}")
        totals.add_row(name, *figures, f"{split.longest:,}")
    parts: list[RenderableType] = [facts, Text(), totals]
    if lengths["train"].num_documents:
        parts += [Text(), Text("tokens per document, train", style="bold cyan"), _render_histogram(lengths["train"])]
    return Group(*parts)


def _facts(store: TokenStore) -> Iterator[tuple[str, str]]:
    manifest = store.manifest
    tokenizer, engine, specials = manifest.tokenizer, manifest.engine, manifest.special_tokens
    yield "store", f"{show_safely(str(store.path))}, {format_bytes(_store_bytes(manifest))} on disk"
    yield "tokenizer", f"{show_safely(tokenizer.name)} ({tokenizer.kind}), {tokenizer.vocab_size:,} tokens"
    names = {number: name for name, number in store.tokenizer.special_tokens.items()}
    around = (
        f"{what} {_name_token(token, names)}" for what, token in (("BOS", specials.bos_id), ("EOS", specials.eos_id))
    )
    parsed = f" ({specials.num_parsed:,} parsed)" if specials.num_parsed else ""
    yield "ids", f"{manifest.dtype}; {', '.join(around)}; special tokens {specials.in_text}{parsed}"
    yield "engine", f"{engine.name} {engine.version}{_describe_parity(manifest)}"
    if engine.num_rerouted:
        yield "", f"{engine.num_rerouted:,} documents with disputed code points were encoded by the reference"
    size = sum(file.bytes for file in manifest.inputs)
    packed = any(file.path.lower().endswith(PACKED_SUFFIXES) for file in manifest.inputs)
    plural = "s" if len(manifest.inputs) > 1 else ""
    yield "inputs", f"{len(manifest.inputs):,} file{plural}, {format_bytes(size)}{' as compressed' if packed else ''}"
    measured = measure_text_bytes(store)
    if measured is not None:
        yield "text", f"{measured[0]:.2f} bytes per token, measured on {measured[1]:,} documents"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.rejects.items())
    yield "rejects", f"{manifest.num_rejects:,} of {manifest.num_documents_in:,}: {reasons}" if reasons else "none"


def _describe_parity(manifest: Manifest) -> str:
    parity = manifest.engine.parity
    if parity is None:
        return ", the reference itself"
    documents = f"{parity.num_documents:,} documents ({format_bytes(parity.num_bytes)})"
    texts = f"{documents} and {parity.num_awkward:,} awkward strings"
    if parity.num_mismatches:
        return f": the reference, because a faster engine differed on {parity.num_mismatches:,} of {texts}"
    return f": ids equal {parity.reference}'s on {texts}"


def _name_token(token: int | None, names: dict[int, str]) -> str:
    return "none" if token is None else f"{token} {show_safely(names.get(token, ''))}".strip()


def _store_bytes(manifest: Manifest) -> int:
    shards = (shard for split in manifest.splits.values() for shard in split.shards)
    return sum(file.bytes for shard in shards for file in shard.files.values())


def _render_histogram(lengths: Lengths) -> RenderableType:
    """One row per power of two; a bar's end is exact to an eighth of a column."""
    most = max(count for _, _, count in lengths.bins)
    rows = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right", "right"):
        rows.add_column(justify=justify, no_wrap=True)
    for start, stop, count in lengths.bins:
        name = f"{start:,}" if start >= stop else f"{start:,} - {stop:,}"
        share = f"{100 * count / lengths.num_documents:.1f}%"
        rows.add_row(name, Text(_bar(count / most), style="green"), f"{count:,}", Text(share, style="dim"))
    return rows


def _bar(fraction: float) -> str:
    eighths = max(1, round(fraction * BAR_COLUMNS * 8)) if fraction else 0
    bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
    return bar.ljust(BAR_COLUMNS)


@dataclass(frozen=True)
class TokenGroup:
    """Neighbouring tokens whose bytes together are whole characters; mostly a single one."""

    ids: tuple[int, ...]
    text: str
    special: bool = False


def group_tokens(ids: Sequence[int], decoder: Decoder, specials: set[int]) -> list[TokenGroup]:
    """Join tokens that share a character, so that it shows as itself and not as U+FFFD."""
    groups: list[TokenGroup] = []
    make = codecs.getincrementaldecoder("utf-8")
    open_ids: list[int] = []
    text, state = "", make("replace")

    def flush() -> None:
        nonlocal text, state, open_ids
        if open_ids:
            groups.append(TokenGroup(tuple(open_ids), text + state.decode(b"", final=True)))
        text, state, open_ids = "", make("replace"), []

    for token in ids:
        if token in specials:
            flush()
            groups.append(TokenGroup((token,), decoder.piece(token), special=True))
            continue
        open_ids.append(token)
        text += state.decode(decoder.token_bytes(token))
        if not state.getstate()[0]:
            flush()
    flush()
    return groups


def render_document(store: TokenStore, number: int, split: str = "train", *, max_tokens: int = 200) -> RenderableType:
    """One document: where it came from, its text with tokens in alternating colours, its ids.

    Without colour, a bar stands between tokens. Of a long document the first `max_tokens` are
    shown, and always the last ones: that is where a missing EOS would be seen.
    """
    ids = store.split(split).document(number).tolist()
    decoder, specials = Decoder(store.tokenizer), set(store.tokenizer.special_tokens.values())
    head, tail, hidden = _shorten_document(ids, max_tokens, decoder, specials)
    header = Table.grid(padding=(0, 2))
    header.add_column(style="bold cyan", no_wrap=True)
    header.add_column()
    for name, value in _describe_document(store, number, split, len(ids)):
        header.add_row(name, Text(value))
    return Group(header, Text(), _Tokens(head, tail, hidden), Text(), _Ids(head, tail, hidden))


def render_row(store: TokenStore, rows: Rows, number: int, *, max_tokens: int = 200) -> RenderableType:
    """One training row: the documents in it, each with its tokens in alternating colours, and padding."""
    cover = RowBlock(rows, np.array([number]), document_mask=False).cover
    tokens = rows[number].tolist()
    decoder, specials = Decoder(store.tokenizer), set(store.tokenizer.special_tokens.values())
    parts: list[RenderableType] = [Text(f"row {number:,} of {rows.title()}\n", style="bold")]
    for document, start, length in cover.documents_of(0):
        parts.append(Text(f"document {document:,}, tokens {start:,} to {start + length:,}", style="bold cyan"))
        parts += [_Tokens(*_shorten_document(tokens[start : start + length], max_tokens, decoder, specials)), Text()]
    if len(tokens) < rows.seq_len:
        parts.append(Text(f"padding, tokens {len(tokens):,} to {rows.seq_len:,}", style="bold yellow"))
    return Group(*parts)


def _shorten_document(
    ids: list[int], max_tokens: int, decoder: Decoder, specials: set[int]
) -> tuple[list[TokenGroup], list[TokenGroup], int]:
    """The first groups, the last ones, and how many tokens are left out between them; cuts are between characters."""
    margin = LAST_GROUPS * MOST_PER_CHARACTER
    if len(ids) <= max_tokens + margin:
        return group_tokens(ids, decoder, specials), [], 0
    head = group_tokens(ids[: max_tokens + margin], decoder, specials)
    ends = accumulate(len(group.ids) for group in head)
    head = head[: sum(end <= max_tokens for end in ends)]
    tail = group_tokens(ids[-margin:], decoder, specials)[-LAST_GROUPS:]
    return head, tail, len(ids) - sum(len(group.ids) for group in (*head, *tail))


def _describe_document(store: TokenStore, number: int, split: str, num_tokens: int) -> Iterator[tuple[str, str]]:
    documents = store.splits[split]
    yield "document", f"{number:,} of {split} ({documents.num_documents:,} documents), {num_tokens:,} tokens"
    (row,) = read_sources(documents, [number])
    yield "from", f"{show_safely(store.manifest.inputs[row['input']].path)}, position {row['position']:,}"
    for name, value in row.items():
        if name.startswith("key."):
            yield show_safely(name.removeprefix("key.")), "not given" if value is None else show_safely(value)


class _Tokens:
    """The text of tokens; drawn according to what the console can do."""

    def __init__(self, head: list[TokenGroup], tail: list[TokenGroup], hidden: int) -> None:
        self._head, self._tail, self._hidden = head, tail, hidden

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        colour = console.color_system is not None and not console.no_color
        yield self._draw(self._head, colour, options.max_width)
        if self._hidden:
            yield Text(f"... {self._hidden:,} more tokens ...", style="dim")
            yield self._draw(self._tail, colour, options.max_width)

    def _draw(self, groups: list[TokenGroup], colour: bool, width: int) -> Text:
        """Lines are broken between tokens, because breaking at a space would swallow it."""
        text, column = Text(no_wrap=True), 0
        for number, group in enumerate(groups):
            style = SPECIAL if group.special else SHADES[number % 2]
            for part, line in enumerate(_show_lines(group.text)):
                bar = "│" if number and not part and not colour else ""
                line = _with_base(line) if bar else line
                for piece in chop_cells(line, width - 1) or [""]:
                    if part or column + cell_len(bar + piece) > width:
                        text.append("\n")
                        column, part = 0, 0
                    text.append(bar).append(piece, style=style)
                    column += cell_len(bar + piece)
                    bar = ""
        return text


class _Ids:
    """Pieces with their ids below, as many to a line as fit."""

    def __init__(self, head: list[TokenGroup], tail: list[TokenGroup], hidden: int) -> None:
        self._head, self._tail, self._hidden = head, tail, hidden

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._draw(self._head, options.max_width)
        if self._hidden:
            yield Text(f"... {self._hidden:,} more tokens ...", style="dim")
            yield from self._draw(self._tail, options.max_width)

    def _draw(self, groups: list[TokenGroup], width: int) -> Iterator[Text]:
        above, below = Text(no_wrap=True), Text(no_wrap=True, style="dim")
        for number, group in enumerate(groups):
            piece = _with_base("".join(_show_lines(group.text)).replace(" ", "␣"))
            piece = _shorten(piece, PIECE_COLUMNS) or "∅"
            numbers = " ".join(map(str, group.ids))
            columns = max(cell_len(piece), len(numbers))
            if above and cell_len(above.plain) + columns > width:
                yield from (above, below)
                above, below = Text(no_wrap=True), Text(no_wrap=True, style="dim")
            above.append(set_cell_size(piece, columns), SPECIAL if group.special else SHADES[number % 2])
            above.append(" ")
            below.append(f"{numbers:<{columns}} ")
        yield from (above, below)


def _show_lines(text: str) -> list[str]:
    """As `show_safely`, line by line; a line end is marked where it stands."""
    *ended, last = map(show_safely, text.split("\n"))
    return [*(f"{line}↵" for line in ended), last]


def _with_base(text: str) -> str:
    """A combining mark at the start would fall on whatever stands before; it gets a circle of its own."""
    return f"◌{text}" if text and unicodedata.category(text[0]).startswith("M") else text


def _shorten(text: str, columns: int) -> str:
    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1) + "…"
