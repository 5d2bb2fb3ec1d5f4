"""Equal work: rows of a global batch dealt to ranks so that the sums of squared document lengths are even."""

from __future__ import annotations

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
from tokenmill.loaders.deal import count_squares, deal, find_owners
from tokenmill.tools.trace import trace_document, trace_step


def work_of(batch: Any) -> int:
    return sum(length**2 for row in batch.documents for _, _, length in row)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(lambda n: sum(n) > 60),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    packing=st.sampled_from(["concat", "best-fit", "pad"]),
    shuffle=st.booleans(),
)
def test_ranks_share_the_rows_of_each_global_batch_evenly(
    lengths: list[int], batch_size: int, world_size: int, packing: Any, shuffle: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = np.cumsum(lengths).tolist()
        documents = [list(range(1 + end - length, 1 + end)) for end, length in zip(ends, lengths, strict=True)]
        store = make_store(Path(folder), documents, num_shards=2)
        shared: Any = {"seq_len": 16, "packing": packing, "shuffle": shuffle, "epochs": 2, "document_mask": True}
        whole = tm.load(store, batch_size=batch_size * world_size, **shared)
        dealt: Any = {"batch_size": batch_size, "world_size": world_size, "balance": True, **shared}
        peers = [tm.load(store, rank=rank, **dealt) for rank in range(world_size)]
        for batch, *parts in zip(whole, *peers, strict=True):
            expected = sorted(row.tolist() for row in np.concatenate([batch.inputs, batch.targets], axis=1))
            rows = [row for part in parts for row in np.concatenate([part.inputs, part.targets], axis=1).tolist()]
            assert sorted(rows) == expected
            work = [work_of(part) for part in parts]
            costs = [sum(length**2 for _, _, length in row) for row in batch.documents]
            assert sum(work) == sum(costs)
            assert max(work) - min(work) <= max(costs)


def test_work_is_far_more_even_than_without(tmp_path: Path) -> None:
    store = make_store(tmp_path, make_documents(2000, longest=100))
    shared: Any = {"seq_len": 64, "packing": "best-fit", "document_mask": True, "batch_size": 8, "world_size": 4}
    spreads = []
    for balance in (False, True):
        peers = [collect(tm.load(store, rank=rank, balance=balance, **shared), 20) for rank in range(4)]
        work = np.array([[work_of(batch) for batch in peer] for peer in peers])
        spreads.append(float((work.max(axis=0) / work.mean(axis=0)).mean()))
    assert spreads[0] > 1.1
    assert spreads[1] < 1.02


def test_the_deal_depends_on_the_batch_alone_so_other_ranks_resume_it(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(2000, longest=60)))
    shared: Any = {"seq_len": 32, "packing": "best-fit", "document_mask": True, "balance": True}
    before = tm.load(store, batch_size=6, rank=1, world_size=2, **shared)
    collect(before, 5)
    for world_size in (1, 2, 3, 4, 6, 12):
        seen = []
        for rank in range(world_size):
            after = tm.load(store, batch_size=12 // world_size, rank=rank, world_size=world_size, **shared)
            after.load_state_dict(before.state_dict())
            seen.append(collect(after, 3))
        for step, batch in enumerate(collect_from(store, 5, 3, shared)):
            found = np.concatenate([np.asarray(peer[step].inputs) for peer in seen])
            assert sorted(found.tolist()) == sorted(np.asarray(batch.inputs).tolist())


def collect_from(store: Any, skipped: int, count: int, shared: Any) -> list[Any]:
    """Some global batches as one rank gets them."""
    return collect(tm.load(store, batch_size=12, **shared), skipped + count)[skipped:]


@pytest.mark.parametrize("epochs", [1, None])
def test_trace_names_the_rank_and_the_place_in_its_batch(epochs: Any, tmp_path: Path) -> None:
    rows = tm.shuffle(tm.pack(tm.open(make_store(tmp_path, make_documents(300))), seq_len=32, method="best-fit"))
    sizes: Any = {"batch_size": 3, "world_size": 2}
    peers = [tm.Loader(rows, rank=rank, balance=True, document_mask=True, epochs=epochs, **sizes) for rank in range(2)]
    num_steps = len(rows) // 6
    seen: set[tuple[int, int, int, int]] = set()
    for step, *batches in zip(range(num_steps), *peers, strict=False):
        traced = trace_step(rows, step, balance=True, **sizes)
        for rank, batch in enumerate(batches):
            mine = [row for row in traced.rows if row.rank == rank]
            for place, (row, documents) in enumerate(zip(mine, batch.documents, strict=True)):
                assert [(p.document, p.start, p.num_tokens) for p in row.documents] == documents
                seen |= {(document, step, rank, place) for document, _, _ in documents}
    for document in range(300):
        found = trace_document(rows, document, balance=True, **sizes)
        inside = {(document, s.step, s.rank, s.place) for s in found if s.step < num_steps}
        assert inside == {sighting for sighting in seen if sighting[0] == document}


@pytest.mark.parametrize("framework", ["torch", "jax", "tf", "grain"])
def test_all_frameworks_deal_alike(framework: Any, tmp_path: Path) -> None:
    pytest.importorskip({"tf": "tensorflow"}.get(framework, framework))
    store = make_store(tmp_path, make_documents(600))
    shared: Any = {"seq_len": 16, "batch_size": 4, "document_mask": True, "balance": True, "rank": 1, "world_size": 2}
    shared |= {"layout": "maxtext"}
    expected = collect(tm.load(store, **shared), 6)
    for ours, theirs in zip(collect(tm.load(store, framework=framework, **shared), 6), expected, strict=True):
        for name, part in theirs.items():
            assert np.array_equal(np.asarray(ours[name]), part)


def test_worker_processes_deal_alike(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    store = make_store(tmp_path, make_documents(600))
    shared: Any = {"seq_len": 16, "batch_size": 4, "document_mask": True, "balance": True, "rank": 1, "world_size": 2}
    expected = collect(tm.load(store, framework="torch", **shared), 6)
    for (x, y), (a, b) in zip(
        collect(tm.load(store, framework="torch", num_workers=2, **shared), 6), expected, strict=True
    ):
        assert x.equal(a) and y.equal(b)


def test_several_batches_at_once_are_dealt_as_one_by_one(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, make_documents(600))), seq_len=16, method="best-fit")
    firsts = np.arange(5) * 12
    together = find_owners(rows, firsts, batch_size=4, world_size=3)
    for number, first in enumerate(firsts):
        alone = find_owners(rows, np.array([first]), batch_size=4, world_size=3)
        assert np.array_equal(together[number], alone[0])
        assert (np.bincount(alone[0]) == 4).all()
    assert deal(rows, firsts, batch_size=4, rank=1, world_size=3).shape == (20,)
    assert count_squares(rows, np.arange(4), limit=2)[2:].tolist() == [0, 0]


def test_work_that_is_equal_anyway_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, make_documents(300))
    with pytest.raises(UsageError, match="balance=True has no effect .*; pass document_mask=True"):
        tm.load(store, 16, 4, balance=True)
    with pytest.raises(UsageError, match="balance 'yes' must be True or False"):
        tm.load(store, 16, 4, balance="yes")  # type: ignore[call-overload]
