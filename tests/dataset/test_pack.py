"""Packing: every token in exactly one place, documents whole where they fit, nothing lost without being counted."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.dataset import bestfit
from tokenmill.dataset import pack as packing
from tokenmill.dataset import rows as base
from tokenmill.dataset.shuffle import ShuffledRows
from tokenmill.errors import UsageError

documents_of_any_length = st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(lambda n: sum(n) > 60)


def store_of(lengths: list[int], folder: Path, num_shards: int) -> tuple[Any, list[list[int]]]:
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    documents = [list(range(1 + a, 1 + b)) for a, b in itertools.pairwise(edges)]
    return tm.open(make_store(folder, documents, num_shards=num_shards)), documents


def all_segments(rows: Any) -> list[list[tuple[int, int, int, bool]]]:
    found = rows.segments(np.arange(len(rows)))
    edges = [0, *found.ends.tolist()]
    columns = [
        *zip(
            found.documents.tolist(), found.starts.tolist(), found.lengths.tolist(), found.is_end.tolist(), strict=False
        )
    ]
    return [columns[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(documents_of_any_length, st.integers(1, 20), st.integers(1, 5))
def test_concat_is_the_stream_cut_every_seq_len(lengths: list[int], seq_len: int, num_shards: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, documents = store_of(lengths, Path(folder), num_shards)
        stream = [token for document in documents for token in document]
        owner = [number for number, document in enumerate(documents) for _ in document]
        rows = tm.pack(store, seq_len=seq_len)
        assert len(rows) == (len(stream) - 1) // seq_len
        assert rows.num_tokens + rows.report.num_left_over_tokens == len(stream)
        for number, segments in enumerate(all_segments(rows)):
            first = number * seq_len
            assert rows[number].tolist() == stream[first : first + seq_len]
            seen = [document for document, _, length, _ in segments for _ in range(length)]
            assert seen == owner[first : first + seq_len]
            assert [start for _, start, _, _ in segments] == np.cumsum([0, *(s[2] for s in segments)])[:-1].tolist()
            for document, start, length, is_end in segments:
                last = stream[first + start + length - 1]
                assert is_end == (last == documents[document][-1])


@settings(max_examples=60, deadline=None)
@given(
    documents_of_any_length, st.integers(1, 20), st.integers(1, 5), st.sampled_from(["concat", "best-fit"]), st.data()
)
def test_the_index_in_memory_says_the_same_as_the_one_on_disk(
    lengths: list[int], seq_len: int, num_shards: int, method: Any, data: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        store, _ = store_of(lengths, Path(folder), num_shards)
        patch.setattr(packing, "MANY_ROWS", 1)
        in_memory, on_disk = (tm.pack(store, seq_len=seq_len, method=method) for _ in range(2))
        index = np.array(data.draw(st.lists(st.integers(0, 3 * len(on_disk)), min_size=1)))
        found = in_memory.segments(index)
        patch.setattr(base, "MOST_KEPT_STARTS", 0)
        for ours, theirs in zip(found, on_disk.segments(index), strict=True):
            assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
        assert "_starts" in vars(in_memory)
        assert "_starts" not in vars(on_disk)
        assert "_starts" not in vars(pickle.loads(pickle.dumps(in_memory)))


def test_few_rows_come_without_reading_the_whole_index(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(900, longest=50))), seq_len=8)
    rows.segments(np.arange(64))
    assert "_starts" not in vars(rows)
    rows.segments(np.arange(packing.MANY_ROWS))
    assert "_starts" in vars(rows)


@settings(max_examples=60, deadline=None)
@given(
    documents_of_any_length,
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(["best-fit", "pad"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.integers(0, 3),
)
def test_rows_of_documents_hold_every_kept_token_once(
    lengths: list[int], seq_len: int, num_shards: int, method: Any, long_documents: Any, seed: int
) -> None:
    if long_documents == "drop" and not any(0 < length <= seq_len for length in lengths):
        return
    with tempfile.TemporaryDirectory() as folder:
        store, documents = store_of(lengths, Path(folder), num_shards)
        rows = tm.pack(store, seq_len=seq_len, method=method, long_documents=long_documents, seed=seed)
        kept = []
        for number, segments in enumerate(all_segments(rows)):
            row = rows[number].tolist()
            assert len(row) <= seq_len
            at = 0
            for document, start, length, is_end in segments:
                piece = row[start : start + length]
                assert start == at
                at += length
                assert piece == [t for t in documents[document] if piece[0] <= t <= piece[-1]]
                assert is_end == (piece[-1] == documents[document][-1])
                if len(documents[document]) <= seq_len:
                    assert piece == documents[document]
            assert at == len(row) > 0
            if method == "pad":
                assert len(segments) == 1
            kept += row
        expected = [t for document in documents for t in wanted(document, seq_len, long_documents)]
        assert sorted(kept) == expected
        report = rows.report
        assert report.num_tokens == len(kept) == rows.num_tokens
        assert report.num_padding_tokens == len(rows) * seq_len - len(kept)
        total = report.num_tokens + report.num_truncated_tokens + report.num_dropped_tokens
        assert total == store.num_tokens
        num_long = sum(length > seq_len for length in lengths)
        name = {"split": "num_split_documents", "truncate": "num_truncated_documents", "drop": "num_dropped_documents"}
        assert getattr(report, name[long_documents]) == num_long
        assert report.num_empty_documents == lengths.count(0)


def wanted(document: list[int], seq_len: int, long_documents: str) -> list[int]:
    if long_documents == "truncate":
        return document[:seq_len]
    return [] if long_documents == "drop" and len(document) > seq_len else document


def test_best_fit_in_several_windows_is_the_same_with_few_kept(tmp_path: Path, monkeypatch: Any) -> None:
    documents = make_documents(2000, longest=60)
    store = tm.open(make_store(tmp_path, documents, num_shards=7))
    monkeypatch.setattr(bestfit, "WINDOW", 128)
    kept = tm.pack(store, seq_len=50, method="best-fit", seed=3)
    monkeypatch.setattr(bestfit, "MOST_KEPT_DOCUMENTS", 100)
    monkeypatch.setattr(bestfit, "NUM_KEPT_WINDOWS", 2)
    few = tm.pack(store, seq_len=50, method="best-fit", seed=3)
    assert len(few) == len(kept)
    index = np.random.default_rng(0).permutation(len(kept))
    for ours, theirs in zip(few.spans(index), kept.spans(index), strict=True):
        assert np.array_equal(ours, theirs)
    shuffled = tm.shuffle(few, seed=1)
    order = shuffled.resolve(np.arange(len(few)))[0].numbers % len(few)
    assert sorted(order.tolist()) == list(range(len(few)))
    again = tm.shuffle(few, seed=1).resolve(np.arange(len(few), 2 * len(few)))[0].numbers % len(few)
    assert sorted(again.tolist()) == list(range(len(few)))
    assert again.tolist() != order.tolist()


def test_best_fit_depends_on_the_seed_and_not_on_the_epoch(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(300)))
    rows = tm.pack(store, seq_len=64, method="best-fit")
    other = tm.pack(store, seq_len=64, method="best-fit", seed=1)
    assert rows[3].tolist() == rows[3 + len(rows)].tolist()
    assert [rows[i].tolist() for i in range(len(rows))] != [other[i].tolist() for i in range(len(other))]
    assert rows.fingerprint != other.fingerprint


def test_padding_of_best_fit_is_small(tmp_path: Path) -> None:
    lengths = np.minimum(60, np.random.default_rng(0).lognormal(2.2, 0.8, 5000).astype(int) + 1)
    documents = [[1] * int(length) for length in lengths]
    rows = tm.pack(tm.open(make_store(tmp_path, documents)), seq_len=128, method="best-fit")
    assert rows.report.padding < 0.002


def test_denied_documents_are_gone_and_the_rest_stays_in_order(tmp_path: Path) -> None:
    documents = make_documents(200)
    store = tm.open(make_store(tmp_path, documents, num_shards=5))
    denied = [0, 1, 57, 58, 59, 120, 199]
    left = tm.deny(store, denied)
    expected = [document for number, document in enumerate(documents) if number not in denied]
    assert [left.document(number).tolist() for number in range(len(left))] == expected
    stream = [token for document in expected for token in document]
    assert left.read(0, left.num_tokens).tolist() == stream
    assert left.find(np.arange(left.num_tokens)).tolist() == [n for n, d in enumerate(expected) for _ in d]
    rows = tm.pack(left, seq_len=33)
    assert [rows[i].tolist() for i in range(len(rows))] == [stream[33 * i : 33 * i + 33] for i in range(len(rows))]
    assert left.fingerprint != store.split().fingerprint


@pytest.mark.parametrize(("start", "stop"), [(0, 200), (3, 4), (50, 150), (66, 134), (199, 200)])
def test_a_slice_of_documents_is_those_documents(tmp_path: Path, start: int, stop: int) -> None:
    documents = make_documents(200)
    store = tm.open(make_store(tmp_path, documents, num_shards=5))
    part = tm.slice(store, start, stop)
    assert [part.document(number).tolist() for number in range(len(part))] == documents[start:stop]
    assert (
        tm.take(tm.skip(store, start), stop - start).read(0, part.num_tokens).tolist()
        == part.read(0, part.num_tokens).tolist()
    )


def test_several_stores_are_one(tmp_path: Path) -> None:
    documents = make_documents(90)
    make_store(tmp_path / "a", documents[:40])
    make_store(tmp_path / "b", documents[40:])
    both = tm.open([tmp_path / "a", tmp_path / "b"])
    assert both.num_documents == 90
    assert [both.document(number).tolist() for number in range(90)] == documents
    whole = tm.open(make_store(tmp_path / "c", documents))
    ours, theirs = tm.pack(both, seq_len=17), tm.pack(whole, seq_len=17)
    assert [ours[i].tolist() for i in range(len(ours))] == [theirs[i].tolist() for i in range(len(theirs))]


def test_stores_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "a", make_documents(9))
    make_store(tmp_path / "b", make_documents(9), dtype="int32")
    with pytest.raises(UsageError, match="has uint16 ids and .* int32"):
        tm.open([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UsageError, match="the list of stores is empty"):
        tm.open([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len 0 must be"),
        ({"seq_len": 10**6}, "a row of 1,000,000 needs 1,000,001"),
        ({"seq_len": 8, "method": "fold"}, "packing 'fold' is unknown"),
        ({"seq_len": 8, "method": "pad", "long_documents": "keep"}, "long_documents 'keep' is unknown"),
        ({"seq_len": 1, "method": "pad", "long_documents": "drop"}, "no document that fits a row"),
        ({"seq_len": 1, "method": "best-fit", "long_documents": "drop"}, "no document that fits a row"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    store = tm.open(make_store(tmp_path, make_documents(50, shortest=2)))
    with pytest.raises(UsageError, match=message):
        tm.pack(store, **settings)


@pytest.mark.parametrize("method", ["concat", "best-fit", "pad"])
@pytest.mark.parametrize("long_documents", ["split", "truncate", "drop"])
def test_documents_know_their_rows(tmp_path: Path, method: Any, long_documents: Any) -> None:
    documents = make_documents(300, longest=60, shortest=0)
    store = tm.open(make_store(tmp_path, documents, num_shards=4))
    rows = tm.pack(store, seq_len=25, method=method, long_documents=long_documents)
    expected: dict[int, list[int]] = {number: [] for number in range(300)}
    for row, segments in enumerate(all_segments(rows)):
        for document, *_ in segments:
            expected[document].append(row)
    assert {number: rows.rows_of(number) for number in range(300)} == expected


def test_a_grouped_order_can_be_inverted(tmp_path: Path, monkeypatch: Any) -> None:
    store = tm.open(make_store(tmp_path, make_documents(2000, longest=60), num_shards=7))
    monkeypatch.setattr(bestfit, "WINDOW", 16)
    monkeypatch.setattr(bestfit, "MOST_KEPT_DOCUMENTS", 100)
    rows = tm.pack(store, seq_len=50, method="best-fit")
    assert rows.window_ends is not None
    grouped = ShuffledRows(rows, 77)
    order = grouped._permute(np.arange(len(rows)), 0)
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert grouped._permute(order, 0, inverse=True).tolist() == list(range(len(rows)))


def test_threads_may_share_rows_of_which_few_windows_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    store = tm.open(make_store(tmp_path, make_documents(1000, longest=60)))
    for name, value in (("WINDOW", 16), ("MOST_KEPT_DOCUMENTS", 10), ("NUM_KEPT_WINDOWS", 2)):
        monkeypatch.setattr(bestfit, name, value)
    rows = tm.pack(store, seq_len=50, method="best-fit")
    expected = rows.spans(np.arange(len(rows))).starts.tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: rows.spans(np.arange(len(rows))).starts.tolist(), range(24)))
    assert all(starts == expected for starts in found)
    assert (
        pickle.loads(pickle.dumps(rows)).spans(np.arange(9)).starts.tolist()
        == expected[: len(rows.spans(np.arange(9)).starts)]
    )
