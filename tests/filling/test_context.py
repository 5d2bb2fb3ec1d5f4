"""Context parallelism and padded documents: peers together hold every token of a row once, each with its target."""

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
from tests.support.exports import add_mask
from tests.support.stores import collect, make_documents, make_store
from tokenmill.errors import UsageError
from tokenmill.filling import kernels
from tokenmill.tools.trace import trace_document, trace_step

FIELDS = ("inputs", "targets", "positions", "segment_ids", "loss_mask", "loss_weights", "attention_mask")
lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda n: sum(n) > 60)


def store_of(lengths: list[int], folder: Path, num_shards: int, seed: int) -> Path:
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    store = make_store(folder, [list(range(1 + a, 1 + b)) for a, b in itertools.pairwise(edges)], num_shards=num_shards)
    if seed:
        add_mask(store, np.random.default_rng(seed).integers(0, 2, sum(lengths), np.uint8))
    return store


def zigzag(array: Any, size: int, rank: int) -> Any:
    """Chunks `rank` and `2 * size - 1 - rank` of every row."""
    chunks = np.split(np.asarray(array), 2 * size, axis=1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]], axis=1)


@pytest.fixture(autouse=True, params=["C", "numpy"])
def loops(request: pytest.FixtureRequest) -> Any:
    """Both loops must do it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(kernels, "compiled", None)
        elif kernels.compiled is None:
            pytest.skip("not compiled")
        yield


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_of_documents,
    size=st.integers(1, 3),
    times=st.integers(1, 4),
    packing=st.sampled_from(["concat", "best-fit", "pad"]),
    document_mask=st.booleans(),
    most=st.sampled_from([None, 2]),
    batch_size=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_peers_hold_the_chunks_of_every_row(
    lengths: list[int],
    size: int,
    times: int,
    packing: Any,
    document_mask: bool,
    most: int | None,
    batch_size: int,
    seed: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(lengths, Path(folder), 3, seed)
        shared: Any = {"seq_len": 2 * size * times, "packing": packing, "document_mask": document_mask, "epochs": 1}
        shared |= {"batch_size": batch_size, "max_documents": most, "seed": seed}
        whole = list(tm.load(store, **shared))
        for rank in range(size):
            parts = list(tm.load(store, cp_rank=rank, cp_size=size, **shared))
            for batch, part in zip(whole, parts, strict=True):
                for field in FIELDS:
                    expected = getattr(batch, field)
                    expected = zigzag(expected, size, rank) if size > 1 else expected
                    assert np.array_equal(getattr(part, field), expected), field
                assert np.array_equal(part.cu_seqlens, batch.cu_seqlens)
                assert part.max_seqlen == batch.max_seqlen
                assert part.documents == batch.documents
                places = zigzag(np.arange(shared["seq_len"])[None], size, rank)[0] if size > 1 else part.row_places
                assert np.array_equal(part.row_places, places)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_of_documents,
    size=st.integers(1, 3),
    times=st.integers(1, 2),
    rows=st.integers(1, 4),
    packing=st.sampled_from(["best-fit", "pad"]),
    most=st.sampled_from([None, 3]),
    seed=st.integers(0, 3),
)
def test_peers_hold_the_chunks_of_every_document(
    lengths: list[int], size: int, times: int, rows: int, packing: Any, most: int | None, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(lengths, Path(folder), 3, seed)
        align = 2 * size * times
        seq_len = align * rows
        shared: Any = {"seq_len": seq_len, "packing": packing, "document_mask": True, "epochs": 1, "batch_size": 2}
        shared |= {"max_documents": most, "align": align, "seed": seed}
        whole = list(tm.load(store, **shared))
        peers = [list(tm.load(store, cp_by="document", cp_rank=rank, cp_size=size, **shared)) for rank in range(size)]
        for number, batch in enumerate(whole):
            edges = [at for at, _ in itertools.groupby(batch.cu_seqlens.tolist())]
            for row, documents in enumerate(batch.documents):
                for _, start, length in documents:
                    assert start % align == 0
                    tokens = batch.inputs[row, start : start + length]
                    assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + length))
                    room = -(-length // align) * align
                    assert not batch.inputs[row, start + length : start + room].any()
                    assert {start + row * seq_len, start + row * seq_len + room} <= {*edges}
            for rank, parts in enumerate(peers):
                for field in FIELDS:
                    flat = np.asarray(getattr(batch, field)).reshape(1, -1)
                    blocks = [flat[:, a:b] for a, b in itertools.pairwise(edges)]
                    cut = [zigzag(block, size, rank) if size > 1 else block for block in blocks]
                    found = np.asarray(getattr(parts[number], field)).reshape(1, -1)
                    real = np.concatenate([zigzag_of(block_ids, size, rank) for block_ids in ids_of(batch, edges)]) > 0
                    expected = np.concatenate(cut, axis=1)[0]
                    # The positions of padding mean nothing.
                    assert np.array_equal(found[0][real], expected[real]), field
                    if field != "positions":
                        assert np.array_equal(found[0], expected), field
        seen = sorted(int(token) for parts in peers for part in parts for token in part.inputs[part.segment_ids > 0])
        assert seen == [*range(1, 1 + sum(lengths))]


def ids_of(batch: Any, edges: list[int]) -> list[Any]:
    flat = np.asarray(batch.segment_ids).reshape(-1)
    return [flat[a:b] for a, b in itertools.pairwise(edges)]


def zigzag_of(array: Any, size: int, rank: int) -> Any:
    return zigzag(array[None], size, rank)[0] if size > 1 else array


def test_unpadded_sums_count_documents_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path, [[*range(1, 6)], [*range(6, 9)], [*range(9, 21)]])
    shared: Any = {"packing": "best-fit", "shuffle": False, "epochs": 1, "document_mask": True}
    (batch,) = tm.load(store, seq_len=16, batch_size=2, align=4, max_documents=3, **shared)
    assert batch.documents == [[(2, 0, 12), (1, 12, 3)], [(0, 0, 5)]]
    assert batch.cu_seqlens.tolist() == [0, 12, 16, 24, 32, 32, 32, 32, 32]
    assert batch.cu_seqlens_unpadded.tolist() == [0, 12, 15, 20, 20, 20, 20, 20, 20]
    assert batch.row_cu_seqlens.tolist() == [[0, 12, 16, 16, 16], [0, 8, 16, 16, 16]]
    assert batch.segment_ids.tolist() == [[1] * 12 + [2] * 3 + [0], [1] * 5 + [0] * 11]


@pytest.mark.parametrize("packing", ["best-fit", "pad"])
def test_trace_and_single_rows_know_aligned_documents(packing: Any, tmp_path: Path) -> None:
    documents = make_documents(200, longest=40)
    rows = tm.shuffle(tm.pack(tm.open(make_store(tmp_path, documents)), seq_len=32, method=packing, align=8))
    loader = tm.Loader(rows, batch_size=3, epochs=1)
    for step, batch in enumerate(loader):
        if (step + 1) * 3 > len(rows):
            break
        for place, traced in enumerate(trace_step(rows, step, batch_size=3).rows):
            assert [(p.document, p.start, p.num_tokens) for p in traced.documents] == batch.documents[place]
            assert rows[step * 3 + place].tolist() == [int(t) for t in batch.inputs[place] if t]
            for part in traced.documents:
                token = int(batch.inputs[place, part.start])
                assert documents[part.document][part.offset] == token
                sightings = trace_document(rows, part.document, batch_size=3)
                assert (step, place, part.start) in {(s.step, s.place, s.start) for s in sightings}


def test_a_state_of_one_peer_resumes_any_other(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(600, longest=40)))
    shared: Any = {"packing": "best-fit", "seq_len": 32}
    before = tm.load(store, batch_size=4, rank=1, world_size=2, cp_rank=0, cp_size=2, **shared)
    collect(before, 5)
    whole = collect(tm.load(store, batch_size=8, **shared), 7)
    after = tm.load(store, batch_size=2, rank=3, world_size=4, cp_rank=3, cp_size=4, **shared)
    after.load_state_dict(before.state_dict())
    for batch, part in zip(whole[5:], collect(after, 2), strict=True):
        assert np.array_equal(part.inputs, zigzag(batch.inputs[6:8], 4, 3))
        assert np.array_equal(part.targets, zigzag(batch.targets[6:8], 4, 3))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "tf", "grain"])
def test_all_frameworks_give_the_same_parts(framework: Any, tmp_path: Path) -> None:
    pytest.importorskip({"tf": "tensorflow"}.get(framework, framework))
    store = make_store(tmp_path, make_documents(300, longest=40))
    shared: Any = {"packing": "best-fit", "align": 4, "document_mask": True, "cp_by": "document"}
    shared |= {"seq_len": 32, "batch_size": 4, "cp_rank": 1, "cp_size": 2, "layout": "megatron"}
    expected = collect(tm.load(store, **shared), 6)
    for ours, theirs in zip(collect(tm.load(store, framework=framework, **shared), 6), expected, strict=True):
        for name, part in theirs.items():
            assert np.array_equal(np.asarray(ours[name]), part)


def test_workers_give_the_same_parts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = make_store(tmp_path, make_documents(300, longest=40))
    shared: Any = {"seq_len": 32, "batch_size": 4, "cp_rank": 1, "cp_size": 2, "framework": "torch"}
    expected = collect(tm.load(store, **shared), 4)
    for (x, y), (a, b) in zip(collect(tm.load(store, num_workers=2, **shared), 4), expected, strict=True):
        assert x.equal(a) and y.equal(b)


def test_a_dimension_of_a_mesh_gives_rank_and_size(tmp_path: Path) -> None:
    class Dimension:
        ndim = 1

        def get_local_rank(self) -> int:
            return 1

        def size(self) -> int:
            return 2

    store = make_store(tmp_path, make_documents(300, longest=40))
    ours = next(iter(tm.load(store, 32, 4, cp_group=Dimension())))
    whole = next(iter(tm.load(store, 32, 4)))
    assert np.array_equal(ours.inputs, zigzag(whole.inputs, 2, 1))
    with pytest.raises(UsageError, match="cp_size 3 contradicts the cp_group, which gives 2; leave cp_size out"):
        tm.load(store, 32, 4, cp_group=Dimension(), cp_size=3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cp_size": 2}, "cp_size 2 needs a cp_rank"),
    ({"cp_size": 2, "cp_rank": 2}, "cp_rank 2 of cp_size 2 is impossible; expected 0 <= cp_rank < cp_size"),
    ({"cp_size": 3, "cp_rank": 0}, "cuts rows into 6 chunks, and seq_len 32 is no multiple"),
    ({"cp_size": 0, "cp_rank": 0}, "cp_size 0 must be a whole number"),
    ({"cp_size": 2, "cp_rank": "auto"}, "cp_rank 'auto' must be a whole number"),
    ({"cp_size": 2, "cp_rank": 0, "cp_by": "token"}, "cp_by 'token' is unknown"),
    ({"cp_size": 2, "cp_rank": 0, "cp_by": "document"}, "they are aligned to 1; pass align=4"),
    ({"cp_size": 2, "cp_rank": 0, "layout": "hf"}, "layout 'hf' leaves it to the model to shift labels"),
    ({"align": 4}, "packing='concat' joins them; use 'best-fit' or 'pad'"),
    ({"align": 5, "packing": "pad"}, "seq_len 32 is not a multiple of align 5"),
    ({"align": 0, "packing": "pad"}, "align 0 must be a whole number"),
    (
        {"cp_size": 2, "cp_rank": 0, "cp_by": "document", "align": 4, "packing": "pad"},
        "pass document_mask=True",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_impossible_combinations_are_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    store = make_store(tmp_path, make_documents(300, longest=40))
    with pytest.raises(UsageError, match=sentence):
        tm.load(store, 32, 4, **given)


def test_sources_of_a_mixture_have_one_alignment(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(300)))
    rows = [tm.pack(store, seq_len=16, method="best-fit", align=align) for align in (4, 8)]
    with pytest.raises(UsageError, match=r"align documents to \[4, 8\] tokens"):
        tm.mix([(rows[0], 1), (rows[1], 1)])
