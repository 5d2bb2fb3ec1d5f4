"""TensorFlow batches: those of the numpy loader, one by one or as a `tf.data.Dataset`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import CASES, SEQ_LEN, collect, make_short_documents, make_two_stores, shuffled
from tokenmill.load_any import load
from tokenmill.loaders import make_loader

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow is not installed")

tf: Any = None
loaders_tf: Any = None


@pytest.fixture(scope="module", autouse=True)
def _tensorflow() -> None:
    """Import TensorFlow when a test runs: it takes seconds, which would slow down test collection."""
    global tf, loaders_tf
    loaders_tf = import_module("tokenmill.loaders.tf")
    tf = loaders_tf.tf


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return make_two_stores(tmp_path_factory.mktemp("stores"))


def loaders(stores: list[Any], case: str) -> tuple[Any, tm.Loader, int]:
    """A loader for TensorFlow, the same for numpy, and how many batches to look at."""
    make, settings = CASES[case]
    settings = {"batch_size": 7, "rank": 1, "world_size": 2, **settings}
    rows = make(stores)
    theirs = tm.Loader(rows, **settings)
    count = len(theirs) if "epochs" in settings else 60
    return make_loader(rows, framework="tf", **settings), theirs, count


def same(ours: Any, theirs: Any) -> bool:
    return tf.is_tensor(ours) and bool(np.array_equal(ours.numpy(), theirs))


def assert_same(ours: Any, theirs: list[Any]) -> None:
    for (x, y), yours in zip(ours, theirs, strict=True):
        assert same(x, yours.inputs) and same(y, yours.targets)
        assert x.dtype == yours.inputs.dtype


@pytest.mark.parametrize("case", CASES)
def test_a_dataset_has_the_same_batches_with_known_shapes(stores: list[Any], case: str) -> None:
    ours, theirs, count = loaders(stores, case)
    dataset = ours.dataset()
    kind = np.dtype(CASES[case][1].get("dtype", np.int64))
    assert dataset.element_spec == (tf.TensorSpec((7, SEQ_LEN), kind),) * 2
    has_end = "epochs" in CASES[case][1]
    assert int(dataset.cardinality()) == (count if has_end else tf.data.INFINITE_CARDINALITY)
    assert_same(dataset if has_end else dataset.take(count), collect(theirs, count))
    assert ours.state_dict()["next_row"] == 0


@pytest.mark.parametrize("place", [1, 33, 50])
def test_loading_resumes_in_the_middle_of_a_chunk(stores: list[Any], place: int) -> None:
    def fresh(framework: str) -> Any:
        return load(stores[0].path, seq_len=SEQ_LEN, batch_size=3, framework=framework, epochs=1)

    whole = list(fresh("numpy"))
    loader = fresh("tf")
    collect(loader, place)
    state = json.loads(json.dumps(loader.state_dict()))
    again = fresh("tf")
    again.load_state_dict(state)
    assert int(again.dataset().cardinality()) == len(whole) - place
    assert_same(again.dataset(), whole[place:])
    assert_same([tuple(batch) for batch in again], whole[place:])
    # After the end come the next epochs, as with the loader.
    following = tm.Loader(again.rows, batch_size=3, epochs=2)
    following.seek(len(again.rows))
    assert_same(again.dataset(), list(following))


def test_tensorflows_own_checkpoint_of_a_dataset_resumes_exactly(
    stores: list[Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(loaders_tf, "CHUNK_TOKENS", 8 * 3 * SEQ_LEN)
    rows = shuffled(stores[0])
    whole = collect(tm.Loader(rows, batch_size=3), 50)
    loader: Any = make_loader(rows, framework="tf", batch_size=3)
    dataset = loader.dataset()
    iterator = iter(dataset)
    assert_same([next(iterator) for _ in range(21)], whole[:21])
    path = tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "place"))
    again = iter(dataset)
    tf.train.Checkpoint(iterator=again).restore(path)
    assert_same([next(again) for _ in range(29)], whole[21:])


def test_python_is_called_once_for_many_batches(stores: list[Any], monkeypatch: Any) -> None:
    calls = []
    real = loaders_tf.TfLoader._chunk
    monkeypatch.setattr(loaders_tf.TfLoader, "_chunk", lambda *a, **b: calls.append(a) or real(*a, **b))
    loader: Any = make_loader(shuffled(stores[0]), framework="tf", batch_size=4, epochs=2)
    assert len(list(loader.dataset())) > 300
    assert len(calls) == 2


def test_two_hundred_kept_batches_stay_as_they_were(stores: list[Any]) -> None:
    rows = shuffled(stores[0])
    theirs = collect(tm.Loader(rows, batch_size=4), 200)
    loader: Any = make_loader(rows, framework="tf", batch_size=4)
    for batches in (iter(loader.dataset()), iter(loader)):
        kept = [tuple(next(batches)) for _ in range(200)]
        for _ in range(200):
            next(batches)
        assert_same(kept, theirs)


@pytest.mark.parametrize("seq_len", [SEQ_LEN, SEQ_LEN + 1])
def test_operations_take_tensors_of_rows_that_begin_anywhere(stores: list[Any], seq_len: int) -> None:
    """They end the process when they meet memory that does not begin at a multiple of 64 bytes."""
    rows = tm.pack(stores[0], seq_len=seq_len)
    theirs = collect(tm.Loader(rows, batch_size=1), 60)
    for batch, other in zip(make_loader(rows, framework="tf", batch_size=1), theirs, strict=False):
        assert same(tf.cast(batch.inputs, tf.int32) + 1, other.inputs + 1)


def test_tensors_share_memory_at_multiples_of_64_bytes_and_copy_the_rest() -> None:
    memory = np.zeros(100, np.int64)
    first = -memory.ctypes.data % 64 // 8
    shared, copied = (loaders_tf._wrap(memory[start : start + 64].reshape(8, 8)) for start in (first, first + 1))
    memory[:] = 1
    assert shared.numpy().all() and not copied.numpy().any()


@pytest.mark.parametrize("layout", ["hf", "megatron", "torchtitan", "olmo", "maxtext"])
def test_layouts_have_the_same_values_as_tensors(stores: list[Any], layout: str) -> None:
    rows = shuffled(stores[1], method="best-fit")
    settings = {"batch_size": 4, "layout": layout, "epochs": 0.5}
    loader: Any = make_loader(rows, framework="tf", **settings)
    theirs = list(tm.Loader(rows, **settings))
    assert len(theirs) == int(loader.dataset().cardinality())
    for one, other, yours in zip(loader, loader.dataset(), theirs, strict=True):
        parts = tf.nest.flatten(yours)
        assert all(np.array_equal(*pair) for pair in zip(tf.nest.flatten(one), parts, strict=True))
        assert all(same(*pair) for pair in zip(tf.nest.flatten(other), flatten_with_lists(yours), strict=True))


def test_lengths_of_documents_may_be_as_many_as_a_row_has_tokens(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_short_documents(tmp_path, SEQ_LEN)), seq_len=SEQ_LEN)
    settings = {"batch_size": 2, "layout": "olmo", "document_mask": True, "epochs": 1}
    loader: Any = make_loader(rows, framework="tf", **settings)
    theirs = list(tm.Loader(rows, **settings))
    assert [batch["doc_lens"].shape[1] for batch in theirs] == [16, 16, 4, 4]
    for mine, yours in zip(loader.dataset(), theirs, strict=True):
        assert all(np.array_equal(mine[name], yours[name]) for name in yours)


def flatten_with_lists(batch: Any) -> list[Any]:
    """The parts of a batch, a list of numbers being one part."""
    if isinstance(batch, dict):
        return [part for name in sorted(batch) for part in flatten_with_lists(batch[name])]
    return [part for some in batch for part in flatten_with_lists(some)] if isinstance(batch, tuple) else [batch]


def test_a_dataset_works_inside_a_compiled_function(stores: list[Any]) -> None:
    loader: Any = make_loader(shuffled(stores[1]), framework="tf", batch_size=4, epochs=1)

    @tf.function
    def total(dataset: Any) -> Any:
        return dataset.reduce(tf.constant(0, tf.int64), lambda sum, pair: sum + tf.reduce_sum(pair[0]))

    theirs = tm.Loader(loader.rows, batch_size=4, epochs=1)
    assert int(total(loader.dataset())) == sum(int(batch.inputs.sum()) for batch in theirs)


def test_importing_prints_nothing_and_a_program_may_end_while_tensorflow_prefetches(stores: list[Any]) -> None:
    """A thread of TensorFlow that needs Python when the interpreter exits would make it wait forever."""
    program = (
        "import os, sys, time; before = dict(os.environ); import tokenmill as tm, tokenmill.loaders.tf as ours\n"
        "assert dict(os.environ) == before\n"
        "ours.tf.constant([1]); print('seen', file=sys.stderr)\n"
        "real, kept = ours.TfLoader._chunk, []\n"
        "ours.TfLoader._chunk = lambda *a, **b: time.sleep(0.1) or real(*a, **b)\n"
        "for layout in ('xy', 'xy', 'hf', 'xy'):\n"
        f"    loader = tm.load({str(stores[0].path)!r}, seq_len=64, batch_size=64, framework='tf', layout=layout)\n"
        "    kept.append(iter(loader.dataset().prefetch(ours.tf.data.AUTOTUNE)))\n"
        "    next(kept[-1])\n"
        "print('done')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout, done.stderr) == ("done\n", "seen\n")


def test_output_of_other_code_while_tensorflow_is_imported_is_shown(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow")
    with loaders_tf._without_chatter():
        os.write(2, b"I0000 00:00:1 port.cc:153] oneDNN custom operations are on.\nmine\n")
    assert capfd.readouterr().err == "mine\n"
