"""Batches of as many rows or documents as fit a budget of tokens, flattened: random access, ranks and resuming stay."""

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

lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=50).filter(lambda n: sum(n) > 60)


def wanted(document: list[int], longest: int, long_documents: str) -> list[int]:
    if long_documents == "truncate":
        return document[:longest]
    return [] if long_documents == "drop" and len(document) > longest else document


@settings(max_examples=80, deadline=None)
@given(
    lengths=lengths_of_documents,
    longest=st.integers(1, 30),
    more=st.integers(0, 60),
    long_documents=st.sampled_from(["split", "truncate", "drop"]),
    most=st.sampled_from([None, 1, 4]),
    align=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 3),
)
def test_rows_of_short_pieces_hold_every_kept_token_once(
    lengths: list[int], longest: int, more: int, long_documents: Any, most: int | None, align: int, seed: int
) -> None:
    if long_documents == "drop" and not any(0 < length <= longest for length in lengths):
        return
    with tempfile.TemporaryDirectory() as folder:
        edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        documents = [list(range(1 + a, 1 + b)) for a, b in itertools.pairwise(edges)]
        store = tm.open(make_store(Path(folder), documents, num_shards=3))
        seq_len = -(-(longest + more) // align) * align
        shape: Any = {"long_documents": long_documents, "max_documents": most, "align": align, "seed": seed}
        rows = tm.pack(store, seq_len=seq_len, method="best-fit", max_length=longest, **shape)
        seen: list[int] = []
        for number, batch in enumerate(tm.Loader(rows, batch_size=1, epochs=1)):
            assert len(batch.documents[0]) <= (most or seq_len)
            end = 0
            for document, start, length in batch.documents[0]:
                assert start >= end and length <= longest
                end = start + length
                tokens = batch.inputs[0, start:end].tolist()
                offset = documents[document].index(tokens[0])
                assert offset % longest == 0
                assert tokens == documents[document][offset : offset + longest]
                assert number in rows.rows_of(document)
                seen += tokens
        assert sorted(seen) == [token for document in documents for token in wanted(document, longest, long_documents)]
        assert rows.report.num_tokens == len(seen) == rows.num_tokens
        assert rows.report.num_padding_tokens == len(rows) * seq_len - len(seen)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "tf"])
def test_flat_batches_have_one_length_and_say_where_documents_are(framework: Any, tmp_path: Path) -> None:
    pytest.importorskip({"tf": "tensorflow"}.get(framework, framework))
    store = make_store(tmp_path, make_documents(600, longest=60))
    shared: Any = {"seq_len": 16, "tokens_per_batch": 100, "packing": "best-fit", "document_mask": True}
    plain = collect(tm.load(store, **shared), 8)
    for batch, flat in zip(
        plain, collect(tm.load(store, framework=framework, layout="flat", **shared), 8), strict=True
    ):
        assert batch.inputs.shape == (1, 100)
        for name in ("inputs", "targets", "positions", "segment_ids", "cu_seqlens"):
            assert np.array_equal(np.asarray(flat[name]), np.asarray(getattr(batch, name)).reshape(-1)), name
        assert int(flat["max_seqlen"]) == batch.max_seqlen <= 16


@pytest.mark.parametrize("document_mask", [False, True])
def test_sequences_are_numbered_through_the_rows_of_a_batch(document_mask: bool, tmp_path: Path) -> None:
    store = make_store(tmp_path, [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]])
    shared: Any = {"shuffle": False, "layout": "flat", "document_mask": document_mask}
    batch = next(iter(tm.load(store, seq_len=4, tokens_per_batch=11, epochs=1, **shared)))
    assert batch["inputs"].tolist() == [*range(1, 9)]
    expected = [1, 1, 1, 2, 3, 4, 4, 4] if document_mask else [1] * 4 + [2] * 4
    assert batch["segment_ids"].tolist() == expected
    assert batch["cu_seqlens"].tolist() == ([0, 3, 4, 5, 8] if document_mask else [0, 4, 8])
    assert batch["positions"].tolist() == ([0, 1, 2, 0, 0, 0, 1, 2] if document_mask else [0, 1, 2, 3] * 2)
    assert batch["max_seqlen"] == (3 if document_mask else 4)


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_a_budget_resumes_on_other_ranks_and_batches_are_the_same(packing: Any, tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(900, longest=50)))
    shared: Any = {"seq_len": 16, "packing": packing}
    one = tm.load(store, tokens_per_batch=192, **shared)
    expected = np.concatenate([np.asarray(x).reshape(-1) for x, _ in collect(one, 9)])
    two = tm.load(store, tokens_per_batch=192, rank=0, world_size=3, **shared)
    collect(two, 1)
    peers = [tm.load(store, tokens_per_batch=192, rank=rank, world_size=2, **shared) for rank in range(2)]
    found = []
    for peer in peers:
        peer.load_state_dict(two.state_dict())
        found.append([np.asarray(x).reshape(-1) for x, _ in collect(peer, 3)])
    after = np.concatenate([part for step in zip(*found, strict=True) for part in step])
    assert np.array_equal(after, expected[3 * 192 :])


def test_trace_knows_several_pieces_of_a_document_in_a_row(tmp_path: Path) -> None:
    documents = make_documents(60, longest=60, shortest=20)
    store = tm.open(make_store(tmp_path, documents))
    rows = tm.shuffle(tm.pack(store, seq_len=64, method="best-fit", max_length=8))
    seen: dict[int, set[tuple[int, int]]] = {}
    for step, batch in enumerate(tm.Loader(rows, batch_size=1, epochs=1)):
        (traced,) = trace_step(rows, step, batch_size=1).rows
        assert [(p.document, p.start, p.num_tokens) for p in traced.documents] == batch.documents[0]
        for part in traced.documents:
            token = int(batch.inputs[0, part.start])
            assert documents[part.document][part.offset] == token
            seen.setdefault(part.document, set()).add((step, part.start))
    for document, places in seen.items():
        sightings = trace_document(rows, document, batch_size=1)
        assert len(sightings) == len(places)
        assert {(s.step, s.start) for s in sightings} == places


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": 16, "batch_size": 2}, "leave batch_size=2 out"),
    ({"seq_len": 16, "tokens_per_batch": 8}, "tokens_per_batch=8 is less than a row of seq_len 16"),
    ({"seq_len": 16, "packing": "pad"}, "packing='pad' would fill batches with padding; use 'best-fit'"),
    ({}, "needs a seq_len"),
    ({"seq_len": 16, "tokens_per_batch": 1.5}, "tokens_per_batch 1.5 must be a whole number"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_impossible_budgets_are_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(100)))
    with pytest.raises(UsageError, match=sentence):
        tm.load(store, **{"tokens_per_batch": 64, **given})
    with pytest.raises(UsageError, match="max_length 9 is for packing='best-fit'"):
        tm.pack(store, seq_len=16, max_length=9)
    with pytest.raises(UsageError, match="the rows are made already; pass a batch_size"):
        tm.load(tm.pack(store, seq_len=16), tokens_per_batch=64)
