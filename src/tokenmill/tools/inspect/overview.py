"""The overview of a store: totals, how it was made, and how long its documents are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenmill.display.tables import make_facts, make_table
from tokenmill.formatting import format_bytes, plural, show_safely
from tokenmill.store.manifest import Manifest
from tokenmill.store.store import TokenStore
from tokenmill.tools.inspect.statistics import (
    Lengths,
    measure_lengths,
    measure_text_bytes,
    measure_trained,
    name_token,
)

__all__ = ["overview_json", "render_overview"]

BAR_COLUMNS = 36
PACKED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".parquet")


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
            "trained_share": measure_trained(split),
            "histogram": [{"from": start, "to": stop, "documents": count} for start, stop, count in lengths.powers],
        }
    parity = manifest.engine.parity
    return {
        "store": store.place,
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
        "store_bytes": manifest.shard_bytes,
        "text_bytes_per_token": None if measured is None else measured[0],
        "documents_in": manifest.num_documents_in,
        **({"holds": manifest.holds} if isinstance(manifest.holds, str) else {}),
        "rejects": manifest.rejects,
        "splits": splits,
    }


def render_overview(store: TokenStore) -> RenderableType:
    """Draw totals, how the store was made, and a histogram of document lengths."""
    lengths = {name: measure_lengths(split) for name, split in store.splits.items()}
    heads = ("split", "documents", "tokens", "mean", "median", "longest")
    totals = []
    for name, split in lengths.items():
        counts = (f"{split.num_documents:,}", f"{split.num_tokens:,}")
        totals.append((name, *counts, f"{split.mean:,.1f}", f"{split.median:,.1f}", f"{split.longest:,}"))
    parts: list[RenderableType] = [make_facts(_facts(store)), Text(), make_table(heads, totals, left=("split",))]
    if lengths["train"].num_documents:
        parts += [Text(), Text("tokens per document, train", style="bold cyan"), _render_histogram(lengths["train"])]
    return Group(*parts)


def _facts(store: TokenStore) -> Iterator[tuple[str, str]]:
    manifest = store.manifest
    tokenizer, engine, specials = manifest.tokenizer, manifest.engine, manifest.special_tokens
    yield (
        "store",
        f"{show_safely(store.place)}, {format_bytes(manifest.shard_bytes)} on disk",
    )
    if manifest.has_pairs:
        how = "documents 2i and 2i + 1 are the chosen and the rejected answer of pair i, with its prompt"
        yield "pairs", f"{manifest.num_records:,}; {how}"
    elif manifest.holds == "prompts":
        yield "prompts", "documents are prompts alone, in which nothing is trained on"
    yield "tokenizer", f"{show_safely(tokenizer.name)} ({tokenizer.kind}), {plural(tokenizer.vocab_size, 'token')}"
    around = f"BOS {name_token(store, specials.bos_id)}, EOS {name_token(store, specials.eos_id)}"
    parsed = f" ({specials.num_parsed:,} parsed)" if specials.num_parsed else ""
    yield "ids", f"{manifest.dtype}; {around}; special tokens {specials.in_text}{parsed}"
    yield "engine", f"{engine.name} {engine.version}{_describe_parity(manifest)}"
    if engine.num_rerouted:
        yield "", f"{plural(engine.num_rerouted, 'document')} with disputed code points were encoded by the reference"
    size = sum(file.bytes for file in manifest.inputs)
    packed = any(file.path.lower().endswith(PACKED_SUFFIXES) for file in manifest.inputs)
    yield "inputs", f"{plural(len(manifest.inputs), 'file')}, {format_bytes(size)}{' compressed' if packed else ''}"
    measured = measure_text_bytes(store)
    if measured is not None:
        yield "text", f"{measured[0]:.2f} bytes per token, measured on {plural(measured[1], 'document')}"
    trained = measure_trained(store.splits["train"])
    if trained is not None:
        yield "trained", f"{100 * trained:.1f}% of the tokens of train have a loss"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.rejects.items())
    yield "rejects", f"{manifest.num_rejects:,} of {manifest.num_documents_in:,}: {reasons}" if reasons else "none"


def _describe_parity(manifest: Manifest) -> str:
    parity = manifest.engine.parity
    if parity is None:
        return ", the reference itself"
    parts = f", of {parity.num_in_parts:,} in parts" if parity.num_in_parts else ""
    documents = f"{plural(parity.num_documents, 'document')}{parts} ({format_bytes(parity.num_bytes)})"
    texts = f"{documents} and {parity.num_awkward:,} awkward strings"
    if parity.num_later_documents:
        later = plural(parity.num_later_documents, "document")
        texts += f", and {later} of its tasks ({format_bytes(parity.num_later_bytes)})"
    if parity.num_mismatches:
        return f": the reference, because a faster engine differed on {parity.num_mismatches:,} of {texts}"
    return f": ids equal {parity.reference}'s on {texts}"


def _render_histogram(lengths: Lengths) -> RenderableType:
    """One row per power of two."""
    most = max(count for _, _, count in lengths.powers)
    rows = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right", "right"):
        rows.add_column(justify=justify, no_wrap=True)
    for start, stop, count in lengths.powers:
        name = f"{start:,}" if start >= stop else f"{start:,} - {stop:,}"
        share = f"{100 * count / lengths.num_documents:.1f}%"
        # A bin that is not empty shows at least an eighth of a column, the smallest mark that rich draws.
        end = max(count / most, 1 / (8 * BAR_COLUMNS)) if count else 0.0
        rows.add_row(name, Bar(1.0, 0.0, end, width=BAR_COLUMNS, color="green"), f"{count:,}", Text(share, style="dim"))
    return rows
