"""Documents chosen for training: by a condition on their kept fields, by number, or a random share of them.

What is chosen is a list of runs of documents, as any selection (`store/documents.py`), so rows, packing and resuming
do not change. The fingerprint depends on which documents were chosen, not on how.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.arguments import name_kind, positive, show
from tokenmill.dataset._expression import LENGTH, Expression
from tokenmill.dataset.rows import Integers, as_documents, as_seed
from tokenmill.dataset.shuffle import make_key
from tokenmill.errors import StoreError, UsageError
from tokenmill.formatting import plural
from tokenmill.store.documents import Documents
from tokenmill.store.sources import KEPT, kept_fields_of, read_fields_of
from tokenmill.store.store import TokenSource

__all__ = ["allow", "sample", "where"]

AT_ONCE = 1 << 20
SHARE = 5
"""The purpose of keys that draw documents."""


def where(documents: Documents | TokenSource, condition: str) -> Documents:
    """Return the documents whose kept fields fulfil a condition, such as `"score > 0.5 and lang == 'en'"`.

    The fields are those of `--keep-keys`, and `num_tokens`, the length of a document. There are comparisons, `in`,
    `is None`, `startswith`, `endswith`, `and`, `or` and `not`. A field that a document does not have fulfils no
    comparison, nor does it fulfil its opposite.
    """
    documents, expression = as_documents(documents, "where"), Expression(condition)
    chosen = [_fulfilling(documents, expression, shard, numbers) for shard, numbers in _by_shard(documents)]
    return _choose(documents, chosen, f"{documents.name} where {expression.text}")


def allow(documents: Documents | TokenSource, numbers: Iterable[int] | npt.NDArray[Any]) -> Documents:
    """Return only the documents of the given numbers, in the order of the store.

    `numbers` may also be an array with True or False for each document.
    """
    documents = as_documents(documents, "allow")
    count = documents.num_documents
    try:
        wanted = numbers if isinstance(numbers, np.ndarray) else np.array(list(numbers))
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{show(numbers)} is not a list of document numbers") from None
    if wanted.dtype == np.bool_ and wanted.shape == (count,):
        found = np.flatnonzero(wanted)
    elif wanted.ndim != 1 or (wanted.dtype.kind not in "iu" and len(wanted)):
        shape = f"{name_kind(numbers)} of {wanted.dtype} and shape {wanted.shape}"
        raise UsageError(f"allow needs document numbers, or {count} values True or False; this is {shape}")
    else:
        found = np.sort(wanted.astype(np.int64))
        wrong = found[(found < 0) | (found >= count)]
        if len(wrong):
            raise UsageError(f"document {wrong[0]} is not in {documents.name}, which has {count}, from 0 on")
        twice = np.flatnonzero(found[1:] == found[:-1])
        if len(twice):
            raise UsageError(f"document {found[twice[0]]} is listed twice; list each once, and repeat some with tm.mix")
    return _choose(documents, [found], f"{plural(len(found), 'document')} of {documents.name}")


def sample(documents: Documents | TokenSource, share: float, *, seed: int = 0) -> Documents:
    """Return a random share of the documents, drawn one by one by a hash of the seed and their places in the store.

    A smaller share is a part of a larger one with the same seed. Which documents are drawn does not depend on what else
    was chosen before. Both documents of a preference pair are drawn together.
    """
    documents, share = as_documents(documents, "sample"), positive(share, "share", 1)
    key, bound = make_key(as_seed(seed), SHARE), min(int(share * 2.0**64), (1 << 64) - 1)
    chosen = []
    for shard, numbers in _by_shard(documents):
        for first in range(numbers.start, numbers.stop, AT_ONCE):
            some = np.arange(first, min(first + AT_ONCE, numbers.stop))
            inner = documents.locate(some)[1] >> (documents.holds == "pairs")
            chosen.append(some[_hash(inner, make_key(key, shard)) <= np.uint64(bound)])
    return _choose(documents, chosen, f"{share:.6g} of {documents.name}, seed {seed}")


def _choose(documents: Documents, chosen: list[Integers], name: str) -> Documents:
    """Choose documents; it is an error if none is left, and rows of none would be one later."""
    found = documents.choose(np.concatenate(chosen) if chosen else np.zeros(0, np.int64), name)
    if not found.num_documents:
        raise UsageError(f"no document is left: {name}; {documents.name} has {documents.num_documents}")
    return found


def _by_shard(documents: Documents) -> Iterable[tuple[int, range]]:
    """Yield the shards of documents, each with the numbers of its documents, which follow each other."""
    shards, firsts, _ = documents.runs()
    changes = np.flatnonzero(np.diff(shards, prepend=-1))
    edges = [*firsts[changes].tolist(), documents.num_documents]
    for shard, start, stop in zip(shards[changes].tolist(), edges[:-1], edges[1:], strict=True):
        yield shard, range(start, stop)


def _hash(numbers: Integers, key: int) -> npt.NDArray[np.uint64]:
    """Hash numbers to 64 bits, by the finalizer of splitmix64 with a key."""
    bits = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def _fulfilling(documents: Documents, expression: Expression, shard: int, numbers: range) -> Integers:
    """Return those of a shard's documents that fulfil a condition."""
    kept = kept_fields_of(documents, shard)
    columns = {name: f"{KEPT}{name}" if name in kept or name != LENGTH else LENGTH for name in expression.fields}
    unknown = next((name for name in expression.fields if columns[name] != LENGTH and name not in kept), None)
    if unknown is not None:
        known = f"it has {', '.join(sorted(kept))}" if kept else "it has none, so tokenize with --keep-keys"
        raise UsageError(f"{documents.name} has no kept field {show(unknown)}; {known}")
    mask = _evaluate(documents, expression, shard, columns)
    some: Integers = np.arange(numbers.start, numbers.stop)
    fulfilling: Integers = some[mask[documents.locate(some)[1]]]
    return fulfilling


def _evaluate(documents: Documents, expression: Expression, shard: int, columns: dict[str, str]) -> npt.NDArray[Any]:
    """Evaluate a condition for all documents of a shard."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    count = int(documents.table.num_documents[shard])
    table = read_fields_of(documents, shard, [name for name in columns.values() if name != LENGTH], count)
    if LENGTH in columns.values():
        lengths = np.diff(documents.table.all_starts(shard, 0, count))
        table = table.append_column(LENGTH, pa.array(lengths))
    try:
        found = ds.dataset(table).to_table(columns={"is_chosen": expression.make(columns)})["is_chosen"]
    except pa.ArrowInvalid as error:
        why = str(error).partition("\n")[0][:120]
        raise UsageError(
            f"{documents.name} has a value that is not a number where {show(expression.text)} compares with one "
            f"({why}); compare it with a text in quotes"
        ) from None
    mask: npt.NDArray[Any] = pc.fill_null(found, False).to_numpy()
    if len(mask) != count:
        raise StoreError(f"{documents.table.stems[shard]}.docs.parquet has {len(mask)} documents, expected {count}")
    return mask
