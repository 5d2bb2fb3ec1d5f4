"""Grain: the loader's batches in the loader's order, and checkpoints of Grain's own that resume exactly."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import CASES, SEQ_LEN, collect, make_short_documents, make_two_stores, shuffled
from tokenmill.errors import UsageError
from tokenmill.loaders import make_loader

grain = pytest.importorskip("grain")
absl_flags = pytest.importorskip("absl.flags")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return make_two_stores(tmp_path_factory.mktemp("stores"))


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    """Dicts of Grain against batches of numpy."""
    assert len(ours) == len(theirs) > 0
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == {"inputs", "targets"}
        assert np.array_equal(mine["inputs"], yours.inputs)
        assert np.array_equal(mine["targets"], yours.targets)


def test_grains_own_check_of_checkpoints_passes(stores: list[Any]) -> None:
    batches = make_loader(shuffled(stores[1]), framework="grain", batch_size=20, epochs=1.2)
    grain.experimental.assert_equal_output_after_checkpoint(batches)
    mapped = batches.map(lambda batch: {**batch, "sum": batch["inputs"].sum()})
    grain.experimental.assert_equal_output_after_checkpoint(mapped)


def test_every_iterator_starts_at_the_first_row_and_the_end_stays_the_end(stores: list[Any]) -> None:
    batches = make_loader(shuffled(stores[1]), framework="grain", batch_size=20, epochs=1)
    iterator = iter(batches)
    whole = list(iterator)
    assert len(whole) == len(batches)
    assert np.array_equal(next(iter(batches))["inputs"], whole[0]["inputs"])
    again = iter(batches)
    again.set_state(iterator.get_state())
    assert list(again) == []


def test_worker_processes_give_the_same_batches_and_resume_exactly(stores: list[Any]) -> None:
    rows = shuffled(stores[1])
    settings = {"batch_size": 5, "rank": 1, "world_size": 2, "epochs": 0.713, "document_mask": True}
    theirs = list(tm.Loader(rows, **settings))
    # An odd number of batches, the last one not full: one of the workers ends before the other.
    assert len(theirs) == 17 and theirs[-1].loss_mask.any(axis=1).tolist() == [True, True, True, False, False]
    absl_flags.FLAGS.mark_as_parsed()  # Programs that start with absl.app.run need not.
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    batches: Any = make_loader(rows, framework="grain", **settings)
    with contextlib.closing(iter(batches.mp_prefetch(options))) as iterator:
        assert_same([next(iterator) for _ in range(8)], theirs[:8])
        state = json.loads(json.dumps(iterator.get_state()))
        assert_same(list(iterator), theirs[8:])
    with contextlib.closing(iter(batches.mp_prefetch(options))) as iterator:
        iterator.set_state(state)
        assert_same(list(iterator), theirs[8:])


def test_slices_of_slices_are_every_nth_batch(stores: list[Any]) -> None:
    rows = shuffled(stores[1])
    settings = {"batch_size": 5, "rank": 1, "world_size": 2, "epochs": 1.5}
    theirs = list(tm.Loader(rows, **settings))
    for worker, inner in itertools.product(range(3), range(2)):
        batches: Any = make_loader(rows, framework="grain", **settings)
        batches.set_slice(slice(worker, None, 3))
        batches.set_slice(slice(inner, None, 2))
        assert_same(list(batches), theirs[worker::3][inner::2])
    with pytest.raises(UsageError, match="sequential_slice"):
        batches.set_slice(slice(0, None, 2), sequential_slice=True)


def test_rows_are_a_random_access_source_of_one_epoch_or_more(stores: list[Any]) -> None:
    from tokenmill.loaders.grain import RowSource

    rows = shuffled(stores[1])
    source = RowSource(rows)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert len(source) == len(rows) == len(list(source))
    assert source[5]["inputs"].tolist() == rows[5].tolist()
    assert source[5]["targets"][:-1].tolist() == rows[5][1:].tolist()
    assert source[5]["inputs"].dtype == np.int32
    longer = RowSource(rows, epochs=2)
    assert longer[len(rows) + 5]["inputs"].tolist() == rows[len(rows) + 5].tolist() != rows[5].tolist()
    with pytest.raises(IndexError):
        longer[2 * len(rows)]
    for settings, message in (
        ({"layout": "jaxtext"}, "layout 'jaxtext' is unknown"),
        ({"dtype": "uint8"}, "dtype uint8 cannot hold every id"),
        ({"dtype": np.float32}, "dtype float32 cannot hold every id"),
        ({"epochs": -1}, "epochs -1 must be a number above 0"),
        ({"document_mask": 3}, "document_mask 3 must be True or False"),
    ):
        with pytest.raises(UsageError, match=message):
            RowSource(rows, **settings)
    for wrong, message in ((stores[1], "RowSource needs rows"), (None, "RowSource needs rows")):
        with pytest.raises(UsageError, match=message):
            RowSource(wrong)
    for index, message in (("a", "row 'a' must be"), (1.5, "row 1.5 must be"), (-1, "row -1 does not exist")):
        with pytest.raises(UsageError, match=message):
            source[index]


def test_a_pipeline_of_rows_has_the_loaders_batches_and_resumes(stores: list[Any]) -> None:
    from tokenmill.loaders.grain import RowSource

    rows = CASES["mix"][0](stores)
    source = RowSource(rows, epochs=None, document_mask=True)
    pipeline = grain.MapDataset.source(source).batch(6).to_iter_dataset()
    iterator = iter(pipeline)
    theirs = collect(tm.Loader(rows, batch_size=6, document_mask=True), 40)
    assert_same([next(iterator) for _ in range(25)], theirs[:25])
    again = iter(pipeline)
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    assert_same([next(again) for _ in range(15)], theirs[25:])


def test_a_row_has_what_its_layout_has(stores: list[Any]) -> None:
    from tokenmill.loaders.grain import RowSource

    rows = shuffled(stores[0], method="best-fit")
    source = RowSource(rows, layout="maxtext")
    batch = next(iter(tm.Loader(rows, batch_size=4, layout="maxtext")))
    for number, row in enumerate(source._getitems([0, 1, 2, 3])):
        assert row.keys() == batch.keys() == source[number].keys()
        for name, array in row.items():
            assert np.array_equal(array, batch[name][number])
            assert np.array_equal(array, source[number][name])


def test_lengths_of_documents_of_a_row_have_one_shape_for_all_rows(tmp_path: Path) -> None:
    from tokenmill.loaders.grain import RowSource

    rows = tm.pack(tm.open(make_short_documents(tmp_path, SEQ_LEN)), seq_len=SEQ_LEN)
    source = RowSource(rows, layout="olmo", document_mask=True)
    assert source[0]["input_ids"].shape == source[6]["input_ids"].shape == (SEQ_LEN,)
    assert source[0]["doc_lens"].shape == (1, SEQ_LEN)
    assert source[6]["doc_lens"].ndim == 2


def test_a_loader_has_the_state_of_its_last_iterator_and_begins_at_a_loaded_state(stores: list[Any]) -> None:
    rows = shuffled(stores[1])
    settings: dict[str, Any] = {"framework": "grain", "batch_size": 5, "epochs": 1}
    whole = list(tm.Loader(rows, batch_size=5, epochs=1))
    loader: Any = make_loader(rows, **settings)
    start = loader.state_dict()
    assert start["next_row"] == 0
    for number, _ in enumerate(loader):
        if number == 6:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["next_row"] == 35
    again: Any = make_loader(rows, **settings)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert_same(list(again), whole[7:])
    assert_same(list(pickle.loads(pickle.dumps(again))), whole[7:])
    loader.load_state_dict(start)
    assert_same(list(loader.map(lambda batch: batch)), whole)
    plain = tm.Loader(rows, batch_size=5, epochs=1)
    plain.load_state_dict(state)
    assert fingerprints(plain) == fingerprints(whole[7:])
    with pytest.raises(UsageError, match="the state is of another dataset"):
        loader.load_state_dict(tm.Loader(shuffled(stores[0]), batch_size=5).state_dict())


def fingerprints(batches: Any) -> list[bytes]:
    return [batch.inputs.tobytes() for batch in batches]


def test_workers_leave_out_the_last_batch_only(stores: list[Any]) -> None:
    rows = tm.take(shuffled(stores[1]), 52)
    settings: dict[str, Any] = {"batch_size": 5, "epochs": 1, "drop_last": True}
    theirs = list(tm.Loader(rows, **settings))
    assert len(theirs) == 10
    for num_workers in (2, 3, 4):
        for worker in range(num_workers):
            batches: Any = make_loader(rows, framework="grain", **settings)
            batches.set_slice(slice(worker, None, num_workers))
            assert_same(list(batches), theirs[worker::num_workers])


def test_a_source_travels_to_other_processes_and_keeps_its_name(stores: list[Any]) -> None:
    from tokenmill.loaders.grain import RowSource

    source = RowSource(shuffled(stores[0]), document_mask=True, epochs=3)
    program = "import pickle, sys; s = pickle.load(sys.stdin.buffer); print(repr(s), len(s), *s[2000]['targets'])"
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(source), capture_output=True, check=True, timeout=60
    )
    expected = " ".join(map(str, [repr(source), len(source), *source[2000]["targets"]]))
    assert done.stdout.decode().split() == expected.split()
    assert source.rows.fingerprint in repr(source)
    assert repr(source) != repr(RowSource(shuffled(stores[1]), document_mask=True))


def test_the_data_loader_of_grain_resumes_on_a_source(stores: list[Any]) -> None:
    from tokenmill.loaders.grain import RowSource

    def make(rows: tm.Rows) -> Any:
        source = RowSource(rows)
        sampler = grain.samplers.IndexSampler(len(source), num_epochs=1, shuffle=False)
        return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(6)]))

    rows = shuffled(stores[0])
    iterator, theirs = make(rows), collect(tm.Loader(rows, batch_size=6), 20)
    assert_same([next(iterator) for _ in range(7)], theirs[:7])
    again = make(rows)
    again.set_state(iterator.get_state())
    assert_same([next(again) for _ in range(13)], theirs[7:])
    with pytest.raises(ValueError, match="RowSource"):
        make(tm.shuffle(rows)).set_state(iterator.get_state())
