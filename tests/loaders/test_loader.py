"""The loader: one global stream for every world size, exact resuming, batches that own their memory."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import collect, make_documents, make_store
from tokenmill.errors import StoreError, UsageError
from tokenmill.filling import kernels
from tokenmill.filling.buffers import BufferPool
from tokenmill.loaders import base
from tokenmill.loaders._world import ENVIRONMENTS, find_rank
from tokenmill.store.mapping import MappedFile

SEQ_LEN = 16


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Three stores of different sizes, in several shards, with documents shorter and longer than a row."""
    folder = tmp_path_factory.mktemp("stores")
    counts = (900, 400, 150)
    return [
        tm.open(make_store(folder / str(n), make_documents(count, seed=n, longest=50), num_shards=2 + 3 * n))
        for n, count in enumerate(counts)
    ]


def mixture(stores: list[Any], **options: Any) -> tm.Rows:
    rows = [tm.shuffle(tm.pack(store, seq_len=SEQ_LEN), seed=n) for n, store in enumerate(stores)]
    return tm.mix([*zip(rows, (0.6, 0.3, 0.1), strict=True)], seed=5, **options)


DATASETS: dict[str, Callable[[list[Any]], tm.Rows]] = {
    "concat": lambda s: tm.pack(s[0], seq_len=SEQ_LEN),
    "concat-shuffled": lambda s: tm.shuffle(tm.pack(s[0], seq_len=SEQ_LEN), seed=1),
    "small-shuffled": lambda s: tm.shuffle(tm.pack(s[2], seq_len=SEQ_LEN), seed=1),
    "best-fit": lambda s: tm.pack(s[0], seq_len=SEQ_LEN, method="best-fit"),
    "best-fit-shuffled": lambda s: tm.shuffle(tm.pack(s[0], seq_len=SEQ_LEN, method="best-fit", seed=2), seed=2),
    "pad-shuffled": lambda s: tm.shuffle(tm.pack(s[1], seq_len=SEQ_LEN, method="pad"), seed=3),
    "pad-truncated": lambda s: tm.pack(s[1], seq_len=SEQ_LEN, method="pad", long_documents="truncate"),
    "slice": lambda s: tm.shuffle(tm.skip(tm.shuffle(tm.pack(s[0], seq_len=SEQ_LEN)), 20), seed=8),
    "denied": lambda s: tm.shuffle(tm.pack(tm.deny(s[0], range(0, 900, 7)), seq_len=SEQ_LEN), seed=8),
    "mix": mixture,
    "mix-staged": lambda s: mixture(s, stages={300: [0.1, 0.1, 0.8], 1200: [1, 0, 1]}),
    "mix-renormalized": lambda s: mixture(s, max_epochs=[2, 1, 3], on_exhausted="renormalize"),
    "mix-of-best-fit": lambda s: tm.mix(
        [(tm.shuffle(tm.pack(store, seq_len=SEQ_LEN, method="best-fit"), seed=n), n + 1) for n, store in enumerate(s)]
    ),
    "mix-of-kinds": lambda s: tm.mix(
        [
            (tm.shuffle(tm.pack(s[0], seq_len=SEQ_LEN)), 0.5),
            (tm.shuffle(tm.pack(s[1], seq_len=SEQ_LEN, method="best-fit")), 0.3),
            (tm.shuffle(tm.pack(s[2], seq_len=SEQ_LEN, method="pad")), 0.2),
        ]
    ),
}


def fingerprint_of(batches: list[Any]) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(np.concatenate([x, y], axis=1).tobytes()) for x, y in batches]


CONFIGURATIONS = [(name, mask) for name in DATASETS for mask in (False, True)]


@pytest.mark.parametrize(("name", "document_mask"), CONFIGURATIONS)
def test_every_one_of_a_thousand_states_resumes_exactly(stores: list[Any], name: str, document_mask: bool) -> None:
    rows = DATASETS[name](stores)
    settings: dict[str, Any] = {"batch_size": 3, "world_size": 2, "rank": 1, "document_mask": document_mask}
    if rows.limit is not None:
        settings["epochs"] = None
    loader = tm.Loader(rows, **settings)
    states, expected = [], []
    for batch in loader:
        if len(expected) == 1003:
            break
        expected.append(batch)
        states.append(json.loads(json.dumps(loader.state_dict())))
    hashes = fingerprint_of(expected)
    resumed = tm.Loader(rows, **settings)
    for number, state in enumerate(states):
        if number + 3 >= len(hashes):
            break
        resumed.load_state_dict(state)
        assert fingerprint_of(collect(resumed, 2)) == hashes[number + 1 : number + 3], (name, number)


def test_a_resume_of_a_resume_of_a_resume(stores: list[Any]) -> None:
    rows = DATASETS["mix-staged"](stores)
    expected = fingerprint_of(collect(tm.Loader(rows, batch_size=4), 600))
    rng = np.random.default_rng(0)
    state, found = tm.Loader(rows, batch_size=4).state_dict(), []
    while len(found) < 600:
        loader = tm.Loader(rows, batch_size=4, prefetch=int(rng.integers(0, 3)))
        loader.load_state_dict(state)
        found += fingerprint_of(collect(loader, int(rng.integers(1, 40))))
        state = loader.state_dict()
    assert found[:600] == expected


def global_stream(rows: tm.Rows, world_size: int, prefetch: int, num_rows: int) -> str:
    per_rank = 48 // world_size
    loaders = [
        tm.Loader(rows, batch_size=per_rank, rank=rank, world_size=world_size, prefetch=prefetch)
        for rank in range(world_size)
    ]
    digest = xxhash.xxh3_64()
    for batches in zip(*(collect(loader, num_rows // 48) for loader in loaders), strict=True):
        for x, y in batches:
            digest.update(np.ascontiguousarray(np.concatenate([x, y], axis=1)).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["concat-shuffled", "best-fit-shuffled", "mix-staged"])
def test_the_global_stream_is_one_for_all_world_sizes_and_threads(stores: list[Any], name: str) -> None:
    rows = DATASETS[name](stores)
    hashes = {
        global_stream(rows, world_size, prefetch, 480)
        for world_size in (1, 2, 3, 4, 6, 8, 12, 16, 24)
        for prefetch in (0, 1, 2)
    }
    assert len(hashes) == 1


def test_a_hundred_resizes_in_one_epoch_give_every_row_once(stores: list[Any]) -> None:
    rows = tm.shuffle(tm.pack(stores[0], seq_len=4), seed=3)
    rng = np.random.default_rng(1)
    seen: list[int] = []
    state = tm.Loader(rows, batch_size=1).state_dict()
    for _ in range(100):
        world_size, batch_size = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        if len(seen) + world_size * batch_size > len(rows):
            break
        loaders = [
            tm.Loader(rows, batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
            ((x, _),) = collect(loader, 1)
            seen += x[:, 0].tolist()
        state = loaders[0].state_dict()
    else:
        left = tm.Loader(rows, batch_size=1, epochs=1)
        left.load_state_dict(state)
        seen += [int(x[0, 0]) for x, _ in left]
        assert sorted(seen) == sorted(int(rows[i][0]) for i in range(len(rows)))


@pytest.mark.usefixtures("inner_loops")
def test_batches_are_inputs_and_the_tokens_after_them(stores: list[Any]) -> None:
    rows = tm.pack(stores[0], seq_len=SEQ_LEN)
    stream = stores[0].read(0, stores[0].num_tokens).astype(np.int64)
    for number, batch in enumerate(collect(tm.Loader(rows, batch_size=2), 20)):
        x, y = batch
        assert x.dtype == y.dtype == np.int64
        assert x.flags.c_contiguous
        assert y.flags.c_contiguous
        for row in range(2):
            start = (2 * number + row) * SEQ_LEN
            assert x[row].tolist() == stream[start : start + SEQ_LEN].tolist()
            assert y[row].tolist() == stream[start + 1 : start + SEQ_LEN + 1].tolist()


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("seq_len", [1, 7, 8190, 8191, 8192, 9000])
def test_short_and_long_rows_take_different_ways_to_the_same_tokens(tmp_path: Path, seq_len: int) -> None:
    store = tm.open(make_store(tmp_path, make_documents(3000, longest=60), num_shards=11))
    stream = store.read(0, store.num_tokens).astype(np.int64)
    rows = tm.shuffle(tm.pack(store, seq_len=seq_len), seed=1)
    for x, y in collect(tm.Loader(rows, batch_size=2, epochs=1), min(4, len(rows) // 2)):
        for row in range(2):
            start = int(np.flatnonzero(stream == x[row, 0])[0])
            assert start % seq_len == 0
            assert x[row].tolist() == stream[start : start + seq_len].tolist()
            assert y[row].tolist() == stream[start + 1 : start + 1 + seq_len].tolist()


@pytest.mark.usefixtures("inner_loops")
def test_rows_may_be_longer_than_many_shards(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(60, longest=10), num_shards=30))
    stream = store.read(0, store.num_tokens).tolist()
    ((x, y),) = collect(tm.Loader(tm.pack(store, seq_len=100), batch_size=1), 1)
    assert x[0].tolist() == stream[:100]
    assert y[0].tolist() == stream[1:101]


@pytest.mark.usefixtures("inner_loops")
def test_int32_stores_and_int32_batches(tmp_path: Path) -> None:
    documents = [[70_000 + i, 80_000 + i, 5] for i in range(50)]
    store = tm.open(make_store(tmp_path, documents, dtype="int32"))
    stream = [token for document in documents for token in document]
    for kind in (np.int32, np.int64):
        ((x, y),) = collect(tm.Loader(tm.pack(store, seq_len=20), batch_size=3, dtype=kind), 1)
        assert x.dtype == kind
        assert x.reshape(-1).tolist() == stream[:60]
        assert y.reshape(-1).tolist() == stream[1:61]


@pytest.mark.usefixtures("inner_loops")
def test_epochs_end_with_a_padded_batch(stores: list[Any]) -> None:
    rows = tm.shuffle(tm.pack(stores[2], seq_len=SEQ_LEN), seed=2)
    loaders = [tm.Loader(rows, batch_size=4, rank=rank, world_size=2, epochs=2) for rank in range(2)]
    batches = [list(loader) for loader in loaders]
    assert len(batches[0]) == len(batches[1]) == len(loaders[0]) == -(-2 * len(rows) // 8)
    in_order = [(x[i], y[i]) for pair in zip(*batches, strict=True) for x, y in pair for i in range(4)]
    real, padded = in_order[: 2 * len(rows)], in_order[2 * len(rows) :]
    assert [x.tolist() for x, _ in real] == [rows[i].tolist() for i in range(2 * len(rows))]
    assert all((x == 0).all() and (y == -100).all() for x, y in padded)
    last = batches[1][-1]
    assert (last.loss_mask[(last.targets == -100)] == 0).all()
    assert [len(row) for row in last.documents][-1] == (0 if padded else 1)
    assert len(list(loaders[0])) == len(batches[0]), "iterating again goes on with the next epochs"


@pytest.mark.parametrize("epochs", [1, 2, 0.3, 1.5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_iterating_again_goes_on_with_the_next_epochs(stores: list[Any], epochs: float, drop_last: bool) -> None:
    rows = DATASETS["small-shuffled"](stores)
    settings: dict[str, Any] = {"epochs": epochs, "drop_last": drop_last}
    loader = tm.Loader(rows, batch_size=7, **settings)
    numbers, num_steps = [], 0
    for number in range(3):
        start, stop = (int(Fraction(str(epochs)) * n * len(rows)) for n in (number, number + 1))
        batches = list(loader)
        num_steps += len(batches)
        assert len(batches) == len(loader) and loader.step == num_steps
        count = (stop - start) // 7 * 7 if drop_last else stop - start
        found = [x.tolist() for batch in batches for x in batch.inputs][:count]
        assert found == [rows[row].tolist() for row in range(start, start + count)]
        numbers.append((loader.state_dict(), start, stop))
    for state, start, stop in numbers:
        resumed = tm.Loader(rows, batch_size=7, **settings)
        resumed.load_state_dict(state)
        assert next(iter(resumed)).inputs[0].tolist() == rows[stop].tolist()
        resumed.seek(start + 1)
        assert next(iter(resumed)).inputs[0].tolist() == rows[start + 1].tolist()


@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=8), batch_size=st.integers(1, 50))
def test_a_state_in_any_iteration_resumes_there(stores: list[Any], numbers: list[int], batch_size: int) -> None:
    rows = DATASETS["small-shuffled"](stores)
    settings: dict[str, Any] = {"batch_size": batch_size, "epochs": 0.7}
    loader, resuming = tm.Loader(rows, **settings), tm.Loader(rows, **settings)
    for count in numbers:
        expected = fingerprint_of(list(itertools.islice(loader, count)))
        assert fingerprint_of(list(itertools.islice(resuming, count))) == expected
        state = json.loads(json.dumps(resuming.state_dict()))
        assert state == loader.state_dict()
        resuming = tm.Loader(rows, **settings)
        resuming.load_state_dict(state)
        assert resuming.step == loader.step


def test_rows_that_end_come_again_and_the_loader_says_so(stores: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    sources = [(DATASETS["small-shuffled"](stores), 0.5), (DATASETS["concat"](stores), 0.5)]
    rows = tm.mix(sources, seed=0, max_epochs=1, on_exhausted="stop")
    assert rows.limit is not None
    loader = tm.Loader(rows, batch_size=5)
    batches = fingerprint_of(list(loader))
    assert capsys.readouterr().err == ""
    assert fingerprint_of(list(loader)) == batches
    assert f"there are only {rows.limit:,} rows, so they come again, in the same order" in capsys.readouterr().err


def test_after_the_last_batch_a_loader_goes_on_and_so_does_its_state(stores: list[Any]) -> None:
    rows = DATASETS["small-shuffled"](stores)
    loader = tm.Loader(rows, batch_size=7, epochs=1)
    batches = fingerprint_of(list(loader))
    state = loader.state_dict()
    assert state["next_row"] == len(rows)
    for batch_size in (7, 3):
        resumed = tm.Loader(rows, batch_size=batch_size, epochs=1)
        resumed.load_state_dict(state)
        assert len(list(resumed)) == len(resumed)
    assert [sum(1 for _ in zip(range(len(loader)), loader, strict=False)) for _ in range(3)] == [len(batches)] * 3
    longer = tm.Loader(rows, batch_size=1, epochs=2)
    longer.load_state_dict(state)
    assert next(iter(longer)).inputs[0].tolist() == rows[len(rows)].tolist(), "more epochs continue with the next one"


def test_ranks_that_have_only_blank_rows_left_get_as_many_batches(stores: list[Any]) -> None:
    rows = tm.take(DATASETS["small-shuffled"](stores), 99)
    for layout in ("xy", "hf", "olmo", "maxtext"):
        for rank in range(4):
            loader = tm.Loader(rows, batch_size=8, rank=rank, world_size=4, epochs=1, layout=layout, document_mask=True)
            loader.seek(96)
            (batch,) = list(loader)
            if layout == "xy":
                assert (batch.segment_ids == 0).all() == (rank > 0)
                assert (batch.targets == -100).all() == (rank > 0)


def test_an_iterator_that_was_replaced_says_so(stores: list[Any]) -> None:
    loader = tm.Loader(DATASETS["concat"](stores), batch_size=2)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="iterated again"):
        next(first)


def test_numpy_integers_are_integers_and_other_things_are_refused(stores: list[Any]) -> None:
    rows = tm.shuffle(tm.pack(stores[0], seq_len=np.int64(16)), seed=np.int32(3))
    loader = tm.Loader(tm.take(rows, np.int64(50)), batch_size=np.int64(4))
    loader.seek(np.int64(8))
    again = tm.Loader(tm.take(rows, 50), batch_size=4)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert again.step == 2
    assert len(list(rows)) == len(rows)
    for wrong, message in (
        (lambda: loader.seek(-5), "row -5 must be a whole number, at least 0"),
        (lambda: tm.Loader(rows, batch_size="4"), "batch_size '4' must be a whole number"),
        (lambda: tm.Loader(rows, batch_size=4, prefetch="2"), "prefetch '2' must be a whole number"),
        (lambda: tm.Loader(rows, batch_size=4, epochs="1"), "epochs '1' must be a number above 0"),
        (lambda: tm.Loader(rows, batch_size=4, world_size=8), "world_size 8 needs a rank"),
        (lambda: tm.shuffle(rows, seed="a"), "seed 'a' must be a whole number"),
        (lambda: tm.take(rows, 3.5), "count 3.5 must be a whole number"),
        (lambda: tm.load(rows, batch_size=4, packing="pad"), "are made already"),
        (lambda: tm.load(stores[0], seq_len=8, batch_size=4, vocab_size=10), "vocabulary of 65536"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()


def test_the_program_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path / "here", make_documents(90))
    monkeypatch.chdir(tmp_path)
    rows = tm.pack(tm.open("here"), seq_len=8)
    monkeypatch.chdir("/")
    assert len(rows[0]) == 8


@pytest.mark.usefixtures("inner_loops")
def test_a_kept_batch_is_never_overwritten(stores: list[Any]) -> None:
    loader = tm.Loader(DATASETS["concat-shuffled"](stores), batch_size=2)
    held = []
    for number, (x, y) in enumerate(loader):
        if number == 400:
            break
        if number % 2 == 0:
            held.append((x, y, x.copy(), y.copy()))
    assert len({x.ctypes.data for x, _, _, _ in held}) == len(held)
    assert all((x == a).all() and (y == b).all() for x, y, a, b in held)


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("most", [1, 50, 1000])
@pytest.mark.parametrize("name", ["concat-shuffled", "mix-of-best-fit", "pad-shuffled"])
def test_positions_are_the_same_however_many_are_filled_at_once(
    stores: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    def fill() -> list[Any]:
        batches = collect(tm.Loader(DATASETS[name](stores), batch_size=3, document_mask=True), 30)
        return [(batch.positions.tolist(), batch.segment_ids.tolist()) for batch in batches]

    expected = fill()
    monkeypatch.setattr(kernels, "TOKENS_AT_ONCE", most)
    assert fill() == expected
    rows = [row for batch in expected for row in zip(*batch, strict=True)]
    for positions, ids in rows:
        firsts = [ids.index(number) for number in ids]
        assert positions == [place - first for place, first in enumerate(firsts)]


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("first", ["positions", "segment_ids"])
def test_the_fields_of_a_batch_do_not_depend_on_those_asked_for_before(stores: list[Any], first: str) -> None:
    rows = DATASETS["mix-of-best-fit"](stores)
    names = ("positions", "segment_ids")
    expected = collect(tm.Loader(rows, batch_size=3, document_mask=True), 200)
    for number, batch in enumerate(tm.Loader(rows, batch_size=3, document_mask=True)):
        if number == len(expected):
            break
        asked = [first] if number % 3 else [*names] if first == names[0] else [*reversed(names)]
        for name in asked:
            assert np.array_equal(getattr(batch, name), getattr(expected[number], name))


def test_large_buffers_begin_with_a_huge_page_and_return_to_the_pool_when_no_array_refers_to_them() -> None:
    pool = BufferPool(np.int32)
    shapes = [(3, 100), (1 << 9, 1 << 10), (7, 100_000)]
    for shape in shapes:
        first, second = pool.take(shape), pool.take(shape)
        first[:], second[:] = 1, 2
        assert first.shape == shape and (first == 1).all() and (second == 2).all()
        assert first.nbytes < 1 << 20 or first.ctypes.data % (1 << 21) == 0
        kept, address = first[1:, :5], first.ctypes.data
        del first
        assert pool.take(shape).ctypes.data not in (address, second.ctypes.data)
        assert (kept == 1).all()
        del kept
        assert pool.take(shape).ctypes.data == address


def test_the_memory_of_a_batch_is_free_as_soon_as_the_user_drops_it(
    stores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", 1)
    loader = tm.Loader(DATASETS["concat"](stores), batch_size=2, document_mask=True)
    batches = iter(loader)
    for _ in range(5):
        batch = next(batches)
        address = batch.inputs.ctypes.data
        assert not loader._pool._free
        del batch
        assert len(loader._pool._free) == 1
        assert next(batches).inputs.ctypes.data == address


def test_batches_belong_to_the_user_and_may_be_changed(stores: list[Any]) -> None:
    loader = tm.Loader(DATASETS["concat"](stores), batch_size=2)
    expected = fingerprint_of(collect(tm.Loader(DATASETS["concat"](stores), batch_size=2), 50))
    found = []
    for (x, y), _ in zip(loader, range(50), strict=False):
        found += fingerprint_of([(x, y)])
        x[:], y[:] = 7, 7
    assert found == expected


def test_memory_is_used_again_when_batches_are_dropped(stores: list[Any]) -> None:
    places = set()
    for number, (x, _) in enumerate(tm.Loader(DATASETS["concat"](stores), batch_size=64)):
        if number == 6000:
            break
        places.add(x.ctypes.data)
    assert len(places) < 2500


def test_a_state_counts_what_was_handed_over_and_not_what_was_prefetched(stores: list[Any]) -> None:
    loader = tm.Loader(DATASETS["concat"](stores), batch_size=5, prefetch=3)
    for number, _ in enumerate(loader, 1):
        assert loader.state_dict()["next_row"] == 5 * number
        assert loader.step == number
        if number == 30:
            break
    assert collect(loader, 1)[0][0][0, 0] == DATASETS["concat"](stores)[150][0], "iterating resumes where it was"


def test_states_are_a_few_readable_values(stores: list[Any]) -> None:
    loader = tm.Loader(DATASETS["concat-shuffled"](stores), batch_size=5)
    collect(loader, 3)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert {key: state[key] for key in ("version", "next_row", "batch_size", "world_size")} == {
        "version": 1,
        "next_row": 15,
        "batch_size": 5,
        "world_size": 1,
    }
    assert loader.get_state() == state
    other = tm.Loader(DATASETS["concat-shuffled"](stores), batch_size=3)
    other.set_state(state)
    assert other.state_dict()["next_row"] == 15


def test_the_state_of_another_dataset_is_refused_with_the_difference(stores: list[Any]) -> None:
    state = tm.Loader(DATASETS["concat-shuffled"](stores), batch_size=5).state_dict()
    for rows, message in [
        (tm.shuffle(tm.pack(stores[0], seq_len=8), seed=1), "rows.seq_len is 16 in the state and 8 here"),
        (tm.shuffle(tm.pack(stores[0], seq_len=16), seed=2), "seed is 1 in the state and 2 here"),
        (tm.shuffle(tm.pack(stores[1], seq_len=16), seed=1), "rows.documents.fingerprint is '"),
        (tm.pack(stores[0], seq_len=16), "kind is 'shuffle' in the state and 'pack' here"),
    ]:
        with pytest.raises(UsageError, match="the state is of another dataset: " + message):
            tm.Loader(rows, batch_size=5).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "this is not the state of a loader"),
        ({"next_row": 3}, "this is not the state of a loader"),
        ({"version": 9, "fingerprint": "", "next_row": 3}, "version 9; this tokenmill reads version 1"),
        (
            {"version": 1, "fingerprint": "", "next_row": -3},
            "the state's next_row -3 must be a whole number, at least 0",
        ),
        ({"version": 1, "fingerprint": "", "next_row": "3"}, "the state's next_row '3' must be a whole number"),
        ({"version": 1, "fingerprint": "", "next_row": 3, "dataset": None}, "the state is of another dataset"),
        ({"version": 1, "fingerprint": "", "next_row": True}, "next_row True must be a whole number"),
        ({"version": 1, "fingerprint": "", "next_row": 1 << 63}, "next_row 9223372036854775808 .* at most"),
        ({"version": 1, "fingerprint": "", "next_row": 10**30}, "next_row 1000000000000000000000000000000 .* at most"),
        ({"version": 10**5000, "fingerprint": "", "next_row": 3}, "version a very large int"),
    ],
)
def test_a_value_that_is_not_a_state_is_refused(stores: list[Any], state: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tm.Loader(DATASETS["concat"](stores), batch_size=5).load_state_dict(state)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ANYTHING: list[Any] = [None, True, -1, 1.5, 1e400, 10**30, "", "x", [], [1], {}, {"a": 1}, nested(20_000)]


@pytest.mark.parametrize("value", ANYTHING, ids=lambda value: type(value).__name__)
def test_a_state_file_with_other_content_is_refused_in_a_sentence(stores: list[Any], value: Any) -> None:
    rows = mixture(stores, stages={100: [1, 1, 1]})
    loader = tm.Loader(rows, batch_size=5)
    state = json.loads(json.dumps(loader.state_dict()))
    damaged: list[Any] = [value, *({**state, name: value} for name in ("version", "next_row"))]
    theirs = state["dataset"]
    for field in theirs:
        damaged.append({**state, "fingerprint": value, "dataset": {**theirs, field: value}})
    damaged.append({**state, "fingerprint": value, "dataset": value})
    damaged.append({**state, "fingerprint": value, "dataset": {**theirs, "stages": {"0": value}}})
    for number, wrong in enumerate(damaged):
        with pytest.raises(UsageError) as caught:
            loader.load_state_dict(wrong)
        assert len(str(caught.value)) < 400, number
    assert loader.state_dict()["next_row"] == 0


@pytest.mark.parametrize("key", ["x", "", "-1", "1.5", "9" * 5000, "9" * 19])
def test_a_stage_at_no_row_is_refused(stores: list[Any], key: str) -> None:
    loader = tm.Loader(mixture(stores, stages={100: [1, 1, 1]}), batch_size=5)
    state = loader.state_dict()
    state["next_row"] = 200
    state["dataset"]["stages"][key] = [1, 1, 1]
    state["fingerprint"] = xxhash.xxh3_64_hexdigest(msgspec.json.encode(state["dataset"], order="deterministic"))
    if key == "9" * 19:
        loader.load_state_dict(state)  # a stage ahead may be left out again
    else:
        with pytest.raises(UsageError, match="is only in the state"):
            loader.load_state_dict(state)


def test_a_state_may_have_numbers_of_numpy(stores: list[Any]) -> None:
    loader = tm.Loader(DATASETS["concat"](stores), batch_size=5)
    loader.load_state_dict({**loader.state_dict(), "next_row": np.int64(15)})
    assert loader.step == 3
    assert json.loads(json.dumps(loader.state_dict()))["next_row"] == 15


def test_a_state_of_more_epochs_goes_on_there(stores: list[Any]) -> None:
    rows = DATASETS["small-shuffled"](stores)
    longer = tm.Loader(rows, batch_size=1, epochs=2)
    longer.seek(len(rows) + 1)
    shorter = tm.Loader(rows, batch_size=1, epochs=1)
    for row in (len(rows) + 1, len(rows)):
        longer.seek(row)
        shorter.load_state_dict(longer.state_dict())
        assert next(iter(shorter)).inputs[0].tolist() == rows[row].tolist()
    with pytest.raises(UsageError, match=r"more than 100000 iterations of about \d+ rows away; pass more epochs"):
        shorter.seek(10**9)


@pytest.mark.parametrize("world_size", [1, 3])
def test_drop_last_leaves_out_the_batch_that_is_not_full(stores: list[Any], world_size: int) -> None:
    rows = tm.take(DATASETS["small-shuffled"](stores), 50)
    settings: dict[str, Any] = {"batch_size": 4, "world_size": world_size, "epochs": 1}
    count = 50 // (4 * world_size)
    for rank in range(world_size):
        whole = tm.Loader(rows, rank=rank, **settings)
        loader = tm.Loader(rows, rank=rank, drop_last=True, **settings)
        batches = list(loader)
        assert len(batches) == len(loader) == count == len(whole) - 1
        assert fingerprint_of(batches) == fingerprint_of(list(whole))[:-1]
        assert all(batch.loss_mask.all() for batch in batches)
        assert "drop_last" not in json.dumps(loader.state_dict())
        again = tm.Loader(rows, rank=rank, drop_last=True, **settings)
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) in (count, count - 1, count + 1), "after a state at the end come the next epochs"
        whole.load_state_dict(loader.state_dict())
        assert len(list(whole)) == 1, "the rest is still there without drop_last"


def test_drop_last_changes_nothing_without_a_rest_and_needs_one_batch(stores: list[Any]) -> None:
    rows = tm.take(DATASETS["small-shuffled"](stores), 48)
    assert len(tm.Loader(rows, batch_size=4, epochs=1, drop_last=True)) == 12
    assert len(list(tm.Loader(rows, batch_size=48, epochs=1, drop_last=True))) == 1
    with pytest.raises(UsageError, match="drop_last leaves no batch: there are 48 rows, and .* has 49"):
        tm.Loader(rows, batch_size=49, epochs=1, drop_last=True)
    collect(tm.Loader(rows, batch_size=47, drop_last=True), 3)  # without an end there is no last batch


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("method", ["concat", "best-fit", "pad"])
@pytest.mark.parametrize("kind", ["<u4", "<i8"])
def test_ids_that_batches_cannot_hold_are_refused(tmp_path: Path, method: Any, kind: str) -> None:
    ids = np.arange(40_000, dtype=kind)
    ids[17] = 3_000_000_000
    ids.tofile(tmp_path / "ids.bin")
    store = tm.open(tmp_path / "ids.bin", dtype={"<u4": "uint32", "<i8": "int64"}[kind])
    for seq_len in (16, 9000):
        rows = tm.pack(store, seq_len=seq_len, method=method)
        with pytest.raises(StoreError, match=r"ids.bin.* has the id 3000000000, which int32 cannot hold"):
            list(tm.Loader(rows, batch_size=4, epochs=1, dtype=np.int32))
        wide = list(tm.Loader(rows, batch_size=4, epochs=1))
        assert 3_000_000_000 in np.concatenate([x.reshape(-1) for x, _ in wide])
    ids[17] = 17
    ids.tofile(tmp_path / "ids.bin")
    rows = tm.pack(tm.open(tmp_path / "ids.bin", dtype=store.dtype.name), seq_len=16, method=method)
    narrow = list(tm.Loader(rows, batch_size=4, epochs=1, dtype=np.int32))
    for mine, yours in zip(narrow, tm.Loader(rows, batch_size=4, epochs=1), strict=True):
        assert (mine.inputs == yours.inputs).all() and (mine.targets == yours.targets).all()


def test_a_stage_may_be_added_after_the_state_but_not_before_it(stores: list[Any]) -> None:
    loader = tm.Loader(mixture(stores, stages={100: [1, 1, 1]}), batch_size=10)
    collect(loader, 40)
    state = loader.state_dict()
    ahead = mixture(stores, stages={100: [1, 1, 1], 400: [0, 0, 1]})
    resumed = tm.Loader(ahead, batch_size=10)
    resumed.load_state_dict(state)
    assert resumed.step == 40
    whole = collect(tm.Loader(ahead, batch_size=10), 45)
    assert fingerprint_of(collect(resumed, 5)) == fingerprint_of(whole[40:])
    with pytest.raises(UsageError, match=r"stages\.399 is only in the dataset"):
        tm.Loader(mixture(stores, stages={100: [1, 1, 1], 399: [0, 0, 1]}), batch_size=10).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size 0 must be a whole number, at least 1"),
        ({"batch_size": 2, "layout": "mine"}, "layout 'mine' is unknown; expected xy, hf"),
        ({"batch_size": 2, "dtype": "uint16"}, "dtype uint16 cannot hold"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank 2 of world_size 2 is impossible"),
        ({"batch_size": 2, "epochs": 0}, "epochs 0 must be a number above 0"),
    ],
)
def test_invalid_settings_are_refused(stores: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tm.Loader(DATASETS["concat"](stores), **settings)


def test_load_is_the_whole_way_in_one_line(tmp_path: Path) -> None:
    documents = make_documents(300)
    make_store(tmp_path, documents, val=documents[:50])
    loader = tm.load(tmp_path, seq_len=8, batch_size=4)
    by_hand = tm.Loader(tm.shuffle(tm.pack(tm.open(tmp_path), seq_len=8), seed=0), batch_size=4)
    assert fingerprint_of(collect(loader, 30)) == fingerprint_of(collect(by_hand, 30))
    val = tm.load(tmp_path, seq_len=8, batch_size=4, split="val", shuffle=False, epochs=1)
    assert next(iter(val)).inputs[0].tolist() == [t for d in documents for t in d][:8]
    for source in (tm.open(tmp_path), tm.open(tmp_path).split(), by_hand.rows):
        settings: dict[str, Any] = {} if isinstance(source, tm.Rows) else {"seq_len": 8}
        again = tm.load(source, batch_size=4, **settings)
        assert fingerprint_of(collect(again, 5)) == fingerprint_of(
            collect(tm.load(tmp_path, seq_len=8, batch_size=4), 5)
        )
    with pytest.raises(UsageError, match="seq_len 9 is not that of the rows, 8; leave it out"):
        tm.load(by_hand.rows, seq_len=9, batch_size=4)
    with pytest.raises(UsageError, match="load needs a seq_len"):
        tm.load(tmp_path, batch_size=4)
    with pytest.raises(UsageError, match="has no split 'test'; it has train, val"):
        tm.load(tmp_path, seq_len=8, batch_size=4, split="test")
    with pytest.raises(UsageError, match="vocabulary of 65536 tokens and the model has room for 50257"):
        tm.load(tmp_path, seq_len=8, batch_size=4, vocab_size=50257)
    with pytest.raises(UsageError, match="framework 'caffe' is unknown"):
        tm.load(tmp_path, seq_len=8, batch_size=4, framework="caffe")
    with pytest.raises(StoreError, match="does not exist"):
        tm.load(tmp_path / "nothing", seq_len=8, batch_size=4)


def test_an_unknown_setting_is_refused_by_its_name(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_store(tmp_path, [[1] * 50])), seq_len=4)
    with pytest.raises(TypeError, match="Loader got an unexpected setting 'worldsize'"):
        tm.Loader(rows, batch_size=1, rank=0, worldsize=2)  # type: ignore[call-arg]


def test_ranks_come_from_where_the_trainer_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert find_rank(None, None) == (0, 1)
    assert find_rank(3, 8) == (3, 8)
    assert find_rank("auto", None) == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "6")
    assert find_rank("auto", None) == (5, 6)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_rank("auto", None) == (1, 4)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UsageError, match="RANK='one' and WORLD_SIZE='4' in the environment are not numbers"):
        find_rank("auto", None)
    with pytest.raises(UsageError, match="neither a process group nor a device mesh"):
        find_rank(None, None, group=object())


class Group:
    """A process group with given answers."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return self._count


def test_a_rank_that_is_given_in_two_ways_must_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_rank("auto", np.int64(4)) == find_rank(1, 4, Group(1, 4)) == find_rank("auto", None, Group(1, 4))
    assert find_rank(np.int64(0), np.int32(2)) == (0, 2)
    for arguments, message in (
        (("auto", 8), "world_size 8 contradicts rank='auto', which gives 4; leave world_size out"),
        ((None, 8, Group(1, 4)), "world_size 8 contradicts the group, which gives 4"),
        ((0, None, Group(1, 4)), "rank 0 contradicts the group, which gives 1; leave rank out"),
        ((None, None, Group(-1, 4)), "this process is not in the group"),
        ((True, 2), "rank True must be a whole number"),
        ((0, True), "world_size True must be a whole number"),
        (("0", 2), "rank '0' must be a whole number"),
        ((0, 10**30), "world_size 1000000000000000000000000000000 must be a whole number, at most"),
        ((-1, 2), "rank -1 must be a whole number, at least 0"),
    ):
        with pytest.raises(UsageError, match=message):
            find_rank(*arguments)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"RANK": "3"}, "RANK='3' is in the environment and WORLD_SIZE is not; set both"),
        ({"RANK": "0"}, "RANK='0' is in the environment and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is in the environment and RANK is not"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID='2' is in the environment and SLURM_NTASKS is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE='2' is in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' and WORLD_SIZE='2' in the environment are impossible"),
        ({"SLURM_PROCID": "0"}, (0, 1)),
        ({"SLURM_NTASKS": "4"}, (0, 1)),
        ({"WORLD_SIZE": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
    ],
)
def test_half_of_an_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: Any
) -> None:
    for pair in ENVIRONMENTS.items():
        for name in pair:
            monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert find_rank("auto", None) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            find_rank("auto", None)


def test_a_thousand_loaders_free_all_memory_and_threads(stores: list[Any], tmp_path: Path) -> None:
    folder = make_store(tmp_path, make_documents(60), num_shards=4)

    def cycle() -> None:
        rows = tm.shuffle(tm.pack(tm.open(folder), seq_len=8))
        collect(tm.Loader(rows, batch_size=2, document_mask=True), 2)

    for _ in range(20):
        cycle()
    gc.collect()
    before = (num_descriptors(), threading.active_count(), MappedFile.num_live, num_maps())
    anonymous = anonymous_bytes()
    for _ in range(1000):
        cycle()
    gc.collect()
    assert (num_descriptors(), threading.active_count(), MappedFile.num_live) == before[:3]
    assert num_maps() <= before[3] + 8
    assert anonymous_bytes() - anonymous < 4_000_000


def test_prefetching_threads_end_with_their_iterators(stores: list[Any]) -> None:
    before = threading.active_count()
    for _ in range(10):
        loader = tm.Loader(DATASETS["concat"](stores), batch_size=2, prefetch=2)
        iterator = iter(loader)
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if thread.name == "tokenmill-prefetch":
            thread.join(5)
    assert threading.active_count() <= before


def test_a_program_may_end_while_a_thread_is_filling(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", make_documents(900, longest=50))
    # Each of three children is a program of its own; torch is imported once, and has no threads yet.
    program = f"""
import os, sys, tokenmill as tm, tokenmill.loaders.torch
for _ in range(3):
    if os.fork() == 0:
        break
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in range(3)))
loader = iter(tm.load({str(store)!r}, seq_len=16, batch_size=64, prefetch=2, framework="torch"))
for _ in range(50): next(loader)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_program_waits_for_a_thread_whose_iterator_is_gone() -> None:
    program = """
import time
from tokenmill.loaders._prefetch import Prefetcher
def make():
    yield 1
    time.sleep(0.3)
    print("done", flush=True)
    yield 2
items = Prefetcher(make(), 1)
next(items)
del items
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_an_error_in_the_thread_reaches_the_user(stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = tm.Loader(DATASETS["concat"](stores), batch_size=2, prefetch=1)

    def fail(*_: Any) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(loader, "_make_batches", fail)
    with pytest.raises(StoreError, match="the disk is gone"):
        next(iter(loader))


@pytest.mark.usefixtures("inner_loops")
@pytest.mark.parametrize("method", ["best-fit", "pad"])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_long_documents_are_copied_right_to_the_last_token(tmp_path: Path, method: Any, dtype: str) -> None:
    """Pieces are copied in strips of 128 tokens; these documents have all remainders, and cross shards."""
    documents, start = [], 1
    for length in [*range(100, 420, 7), 127, 128, 129, 255, 256, 257, 1, 1000, 2100]:
        documents.append([token % 60_000 + 1 for token in range(start, start + length)])
        start += length
    store = tm.open(make_store(tmp_path, documents, num_shards=5, dtype=dtype))
    next_of = {a: b for document in documents for a, b in pairwise(document)}
    for seq_len in (300, 512, 1000):
        rows = tm.shuffle(tm.pack(store, seq_len=seq_len, method=method), seed=1)
        seen: list[int] = []
        for batch in tm.Loader(rows, batch_size=3, epochs=1):
            for row in range(3):
                found = batch.documents[row]
                used = sum(length for _, _, length in found)
                tokens, targets = batch.inputs[row].tolist(), batch.targets[row].tolist()
                seen += tokens[:used]
                assert tokens[used:] == [0] * (seq_len - used)
                ends = {first + length - 1 for _, first, length in found}
                for place, (token, target) in enumerate(zip(tokens, targets, strict=True)):
                    assert target == (-100 if place >= used or place in ends else next_of[token])
        assert sorted(seen) == sorted(token for document in documents for token in document)


def test_memory_does_not_grow_with_time(stores: list[Any]) -> None:
    loader = iter(tm.Loader(DATASETS["mix-of-kinds"](stores), batch_size=16, document_mask=True))
    for number in range(24_000):
        batch = next(loader)
        batch.positions, batch.segment_ids, batch.cu_seqlens  # noqa: B018
        if number == 12_000:
            before = anonymous_bytes()
    assert anonymous_bytes() - before < 3_000_000


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_batch_prints_its_shapes_types_and_fields(open_tiny_store: Callable[[], tm.TokenStore]) -> None:
    batch = next(iter(tm.load(open_tiny_store(), seq_len=16, batch_size=2, dtype="int32")))
    assert repr(batch).startswith("Batch(inputs (2, 16) int32, targets (2, 16) int32; also input_ids, ")
    for name in repr(batch).rstrip(")").partition("; also ")[2].split(", "):
        getattr(batch, name)
    torch = pytest.importorskip("torch")
    tensors = next(iter(tm.load(open_tiny_store(), seq_len=16, batch_size=2, framework="torch")))
    assert repr(tensors).startswith("Batch(inputs (2, 16) int64, ")
    assert isinstance(tensors.positions, torch.Tensor)


def test_an_endless_batch_that_is_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(40)))
    rows = tm.pack(store, seq_len=8)
    with pytest.raises(
        tm.UsageError, match=rf"a batch of all ranks has {2 * len(rows)} rows, and there are {len(rows)}, so"
    ):
        tm.Loader(rows, batch_size=len(rows), rank=0, world_size=2)
    tm.Loader(rows, batch_size=len(rows))
    tm.Loader(rows, batch_size=2 * len(rows), epochs=4)
