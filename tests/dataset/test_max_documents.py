"""Rows with a bound on documents: the same tokens, each once, in batches whose parts all have constant shapes."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import collect, make_documents, make_store
from tokenmill.errors import UsageError
from tokenmill.tools.trace import trace_document, trace_step

lengths_of_documents = st.lists(st.integers(0, 12), min_size=1, max_size=60).filter(lambda n: sum(n) > 40)


def store_of(lengths: list[int], folder: Path, num_shards: int) -> tuple[Any, list[list[int]]]:
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    documents = [list(range(1 + a, 1 + b)) for a, b in itertools.pairwise(edges)]
    return tm.open(make_store(folder, documents, num_shards=num_shards)), documents


@settings(max_examples=80, deadline=None)
@given(lengths_of_documents, st.integers(1, 20), st.integers(1, 6), st.integers(1, 4))
def test_concat_cuts_with_too_many_documents_become_several_rows(
    lengths: list[int], seq_len: int, most: int, num_shards: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, documents = store_of(lengths, Path(folder), num_shards)
        rows, plain = tm.pack(store, seq_len=seq_len, max_documents=most), tm.pack(store, seq_len=seq_len)
        owner = {token: number for number, document in enumerate(documents) for token in document}
        expected = []
        for cut in plain:
            numbers = list(dict.fromkeys(owner[token] for token in cut.tolist()))
            for first in range(0, len(numbers), most):
                expected.append([token for token in cut.tolist() if owner[token] in numbers[first : first + most]])
        assert [row.tolist() for row in rows] == expected
        report = rows.report
        assert report.num_rows == len(rows) == len(expected)
        assert report.num_bounded_rows == len(expected) - len(plain)
        assert report.num_padding_tokens == len(rows) * seq_len - rows.num_tokens
        assert report.num_tokens == rows.num_tokens == plain.num_tokens
        for number in range(len(documents)):
            mine = [row for row, tokens in enumerate(expected) if any(owner[token] == number for token in tokens)]
            assert rows.rows_of(number) == mine


@settings(max_examples=80, deadline=None)
@given(
    lengths_of_documents,
    st.integers(1, 20),
    st.integers(1, 6),
    st.sampled_from(["concat", "best-fit", "pad"]),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_batches_have_one_shape_and_the_documents_of_their_rows(
    lengths: list[int], seq_len: int, most: int, packing: Any, batch_size: int, world_size: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, documents = store_of(lengths, Path(folder), 2)
        shared: Any = {"seq_len": seq_len, "packing": packing, "max_documents": most, "epochs": 1}
        seen: list[int] = []
        for rank in range(world_size):
            where: Any = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
            for batch in tm.load(store, document_mask=True, **shared, **where):
                assert batch.cu_seqlens.shape == (batch_size * (most + 1) + 1,)
                assert batch.row_cu_seqlens.shape == (batch_size, most + 2)
                assert batch.max_seqlen == seq_len
                flat = sorted({*batch.cu_seqlens.tolist()})
                assert batch.cu_seqlens.tolist() == flat + [batch_size * seq_len] * (len(batch.cu_seqlens) - len(flat))
                starts = np.flatnonzero(np.asarray(batch.positions).reshape(-1) == 0).tolist()
                assert flat == [*starts, batch_size * seq_len]
                for row in range(batch_size):
                    of_row = batch.row_cu_seqlens[row].tolist()
                    assert of_row == sorted(of_row) and of_row[-1] == seq_len
                    inside = [at - row * seq_len for at in starts if at // seq_len == row]
                    assert sorted({*of_row}) == [*inside, seq_len]
                    assert len(batch.documents[row]) <= most
                    for document, start, length in batch.documents[row]:
                        tokens = batch.inputs[row, start : start + length].tolist()
                        first = documents[document].index(tokens[0])
                        assert tokens == documents[document][first : first + length]
                        assert batch.targets[row, start : start + length - 1].tolist() == tokens[1:]
                        seen += tokens
        left_over = tm.pack(store, seq_len=seq_len).report.num_left_over_tokens if packing == "concat" else 0
        tokens = [token for document in documents for token in document]
        assert sorted(seen) == tokens[: len(tokens) - left_over]


def test_without_too_many_documents_rows_are_as_without_a_bound(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(300, longest=60)))
    for packing in ("concat", "pad"):
        rows = [
            collect(tm.load(store, 16, 4, packing=packing, **more), 30)  # type: ignore[call-overload]
            for more in ({}, {"max_documents": 16})
        ]
        for (x, y), (a, b) in zip(*rows, strict=True):
            assert np.array_equal(x, a) and np.array_equal(y, b)


def test_a_bound_is_part_of_the_fingerprint_and_its_absence_is_not(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(300)))
    found = {tm.pack(store, seq_len=16, max_documents=most).fingerprint for most in (None, 1, 2)}
    assert len(found) == 3
    assert "max_documents" not in tm.pack(store, seq_len=16).describe()


@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_trace_answers_both_ways(packing: Any, shuffle: bool, tmp_path: Path) -> None:
    documents = make_documents(200, longest=20)
    store = tm.open(make_store(tmp_path, documents))
    rows = tm.pack(store, seq_len=16, method=packing, max_documents=2)
    rows = tm.shuffle(rows) if shuffle else rows
    loader = tm.Loader(rows, batch_size=3, epochs=2)
    seen: dict[int, list[tuple[int, int]]] = {}
    for step, batch in enumerate(loader):
        if (step + 1) * 3 > 2 * len(rows):
            break
        for place, traced in enumerate(trace_step(rows, step, batch_size=3).rows):
            parts = [(part.document, part.start, part.num_tokens) for part in traced.documents]
            assert parts == batch.documents[place]
            for document, start, length in parts:
                offset = documents[document].index(int(batch.inputs[place, start]))
                assert next(p.offset for p in traced.documents if p.document == document) == offset or length == 0
                seen.setdefault(document, []).append((step, place))
    last = 2 * len(rows) // 3
    for document in range(0, 200, 7):
        sightings = trace_document(rows, document, batch_size=3, epochs=2)
        assert [(s.step, s.place) for s in sightings if s.step < last] == sorted(seen.get(document, []))


def test_blocks_keep_every_row_of_bounded_concat(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(400, longest=20), num_shards=6))
    rows = tm.pack(store, seq_len=16, max_documents=2)
    blocks = tm.shuffle(rows, block_tokens=200)
    assert sorted(row.tolist() for row in blocks) == sorted(row.tolist() for row in rows)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "two"])
def test_a_bound_that_is_no_count_is_refused(value: Any, tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(20)))
    with pytest.raises(UsageError, match="max_documents .* must be a whole number"):
        tm.pack(store, seq_len=8, max_documents=value)


def test_a_mixture_has_a_bound_if_all_its_sources_have_one(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(200)))
    rows = [tm.pack(store, seq_len=16, max_documents=most) for most in (2, 5, None)]
    assert tm.mix([(rows[0], 1), (rows[1], 1)]).max_documents == 5
    assert tm.mix([(rows[0], 1), (rows[2], 1)]).max_documents is None
    batch = next(iter(tm.Loader(tm.mix([(rows[0], 1), (rows[1], 1)]), batch_size=4)))
    assert batch.row_cu_seqlens.shape == (4, 7)
