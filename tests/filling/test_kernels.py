"""The inner loops in C: they write what numpy writes, and nothing outside the arrays."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_store
from tokenmill.filling import kernels

HAS_COMPILER = bool(shutil.which("cc")) and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()

needs_compiled = pytest.mark.skipif(kernels.compiled is None, reason="the inner loops were not compiled")


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no compiler here")
@pytest.mark.skipif(os.environ.get("TOKENMILL_COMPILED") == "0", reason="this run is without them")
def test_where_there_is_a_compiler_the_loops_are_compiled() -> None:
    assert kernels.compiled is not None


def test_the_environment_can_leave_them_out() -> None:
    program = "from tokenmill.filling import kernels; print(kernels.compiled)"
    environment = {**os.environ, "TOKENMILL_COMPILED": "0", "PYTHONPATH": str(Path(tm.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def fill(rows: tm.Rows, **loading: Any) -> list[list[Any]]:
    """Everything that the batches of one epoch hold."""
    batches = tm.Loader(rows, batch_size=3, epochs=1, **loading)
    return [[batch.inputs, batch.targets, batch.positions, batch.segment_ids, batch.cu_seqlens] for batch in batches]


def both_ways(rows: tm.Rows, **loading: Any) -> tuple[list[list[Any]], list[list[Any]]]:
    """The same rows as filled by C and by numpy."""
    with pytest.MonkeyPatch.context() as patch:
        in_c = fill(rows, **loading)
        patch.setattr(kernels, "compiled", None)
        return in_c, fill(rows, **loading)


def rows_of(stores: list[Any], seq_len: int, methods: list[Any]) -> tm.Rows:
    """A mixture of packings, so that rows of each alternate with rows of others."""
    parts = [
        tm.shuffle(tm.pack(store, seq_len=seq_len, method=method), seed=1)
        for store, method in zip(stores, methods, strict=True)
    ]
    return parts[0] if len(parts) == 1 else tm.mix([(part, 1 + number) for number, part in enumerate(parts)])


lengths_of_documents = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 4000)), min_size=3, max_size=40).filter(
    lambda lengths: sum(lengths) > 4000
)


@needs_compiled
@settings(max_examples=80, deadline=None)
@given(
    lengths=lengths_of_documents,
    dtypes=st.lists(st.sampled_from(["uint16", "int32"]), min_size=1, max_size=3),
    methods=st.lists(st.sampled_from(["concat", "best-fit", "pad"]), min_size=3, max_size=3),
    seq_len=st.one_of(st.integers(1, 70), st.integers(2000, 3000)),
    num_shards=st.integers(1, 9),
    kind=st.sampled_from([np.int64, np.int32]),
    document_mask=st.booleans(),
)
def test_c_and_numpy_fill_the_same_batches(
    lengths: list[int],
    dtypes: list[str],
    methods: list[str],
    seq_len: int,
    num_shards: int,
    kind: Any,
    document_mask: bool,
) -> None:
    rng = np.random.default_rng(sum(lengths))
    with tempfile.TemporaryDirectory() as folder:
        stores = []
        for number, dtype in enumerate(dtypes):
            documents = [rng.integers(0, 1 << (16 if dtype == "uint16" else 20), n).tolist() for n in lengths]
            stores.append(tm.open(make_store(Path(folder, str(number)), documents, num_shards=num_shards, dtype=dtype)))
        rows = rows_of(stores, seq_len, methods[: len(stores)])
        in_c, in_numpy = both_ways(tm.take(rows, min(200, len(rows))), dtype=kind, document_mask=document_mask)
        assert len(in_c) == len(in_numpy) > 0
        for mine, yours in zip(in_c, in_numpy, strict=True):
            assert [part.dtype for part in mine] == [part.dtype for part in yours]
            assert all(np.array_equal(a, b) for a, b in zip(mine, yours, strict=True))


@pytest.fixture
def memory() -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.arange(1000, dtype=np.uint16)


def index_of(memory: Any, place: int = 0) -> int:
    return memory.ctypes.data // memory.itemsize - 1 + place


@needs_compiled
@pytest.mark.parametrize("kind", [np.int64, np.int32])
def test_rows_go_where_they_belong_and_nowhere_else(memory: Any, kind: Any) -> None:
    indices = np.array([index_of(memory, place) for place in (10, 500)])
    inputs, targets = (np.full((5, 7), -7, kind) for _ in range(2))
    kernels.compiled.copy_rows(indices, 2, np.array([3, 1]), inputs, targets)
    for row, start in ((3, 10), (1, 500)):
        assert inputs[row].tolist() == list(range(start, start + 7))
        assert targets[row].tolist() == list(range(start + 1, start + 8))
    assert (inputs[[0, 2, 4]] == -7).all() and (targets[[0, 2, 4]] == -7).all()


@needs_compiled
def test_pieces_are_joined_and_padded(memory: Any) -> None:
    edges, lengths = np.array([1, 3, 4]), np.array([9, 3, 2, 1])
    indices = np.array([index_of(memory, 0), index_of(memory, 100), -1, index_of(memory, 300)])
    inputs, targets = (np.full((2, 6), -7) for _ in range(2))
    kernels.compiled.copy_pieces(edges, indices, lengths, -100, 2, None, inputs, targets)
    assert inputs.tolist() == [[100, 101, 102, -7, -7, 0], [300, 0, 0, 0, 0, 0]]
    assert targets.tolist() == [[101, 102, -100, -7, -100, -100], [-100] * 6]


@needs_compiled
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"places": np.array([0, 4])}, "row 4 is not among 4"),
        ({"places": np.array([-1, 0])}, "row -1 is not among 4"),
        ({"places": np.array([0])}, "no place for 2 rows"),
        ({"places": np.array([0, 1], np.int32)}, "places have 4 bytes each, not 8"),
        ({"indices": np.zeros(5, np.int64)}, "no place for 5 rows"),
        ({"indices": np.zeros(2, np.int32)}, "indices have 4 bytes each, not 8"),
        ({"itemsize": 8}, "tokens of 8 bytes do not become values of 8"),
        ({"inputs": np.zeros((4, 7), np.int16), "targets": np.zeros((4, 7), np.int16)}, "values of 2"),
        ({"targets": np.zeros((4, 8), np.int64)}, "not rows of one shape and type"),
        ({"targets": np.zeros((4, 7), np.int32)}, "not rows of one shape and type"),
        ({"inputs": np.zeros((4, 14), np.int64)[:, ::2]}, "not C-contiguous"),
    ],
)
def test_rows_that_do_not_fit_are_refused(memory: Any, changed: dict[str, Any], message: str) -> None:
    indices = np.full(2, index_of(memory))
    batch = {"inputs": np.zeros((4, 7), np.int64), "targets": np.zeros((4, 7), np.int64)}
    arguments = {"indices": indices, "itemsize": 2, "places": None, **batch, **changed}
    with pytest.raises((ValueError, IndexError, BufferError), match=message):
        kernels.compiled.copy_rows(*arguments.values())
    assert not arguments["inputs"].any()


@needs_compiled
@pytest.mark.parametrize(
    ("edges", "lengths"),
    [([0, 2], [4, 4]), ([0, 3], [1, 1]), ([-1, 1], [1, 1]), ([1, 0], [1, 1]), ([0, 1], [-1, 1]), ([], [1, 1])],
)
def test_pieces_that_do_not_fit_are_refused(memory: Any, edges: list[int], lengths: list[int]) -> None:
    inputs, targets = (np.zeros((max(1, len(edges) - 1), 7), np.int64) for _ in range(2))
    indices = np.full(len(lengths), index_of(memory))
    with pytest.raises(ValueError, match="pieces do not fit their rows"):
        kernels.compiled.copy_pieces(
            np.array(edges, np.int64), indices, np.array(lengths), -100, 2, None, inputs, targets
        )
    with pytest.raises(ValueError, match="not as many lengths as indices"):
        kernels.compiled.copy_pieces(np.array([0, 1]), indices, np.array([1]), -100, 2, None, inputs[:1], targets[:1])


@needs_compiled
@settings(max_examples=300, deadline=None)
@given(
    edges=st.lists(st.integers(-2, 6), max_size=5),
    lengths=st.lists(st.one_of(st.integers(-2, 9), st.sampled_from([2**31, 2**62, -(2**63)])), max_size=6),
    places=st.none() | st.lists(st.integers(-1, 4), max_size=5),
    shape=st.tuples(st.integers(0, 5), st.integers(0, 12)),
    stored=st.sampled_from([np.uint16, np.int32]),
    kind=st.sampled_from([np.int64, np.int32]),
)
def test_any_pieces_are_joined_as_they_should_be_or_refused(
    edges: list[int], lengths: list[int], places: list[int] | None, shape: tuple[int, int], stored: Any, kind: Any
) -> None:
    memory = np.arange(9, dtype=stored)
    inputs, targets = np.full(shape, -7, kind), np.full(shape, -7, kind)
    indices = np.full(len(lengths), index_of(memory))
    rows = None if places is None else np.array(places, np.int64)
    expected = expected_pieces(edges, lengths, places, shape)
    arguments = np.array(edges, np.int64), indices, np.array(lengths, np.int64), -100, memory.itemsize, rows
    try:
        kernels.compiled.copy_pieces(*arguments, inputs, targets)
    except (ValueError, IndexError):
        assert expected is None
        assert (inputs == -7).all() and (targets == -7).all()
    else:
        assert expected is not None
        assert inputs.tolist() == expected[0] and targets.tolist() == expected[1]


def expected_pieces(
    edges: list[int], lengths: list[int], places: list[int] | None, shape: tuple[int, int]
) -> tuple[list[list[int]], list[list[int]]] | None:
    """What `copy_pieces` writes if every piece is 0, 1, 2, ...; None if it must refuse."""
    num_rows, seq_len = shape
    numbers = list(range(len(edges) - 1)) if places is None else places
    if not edges or len(numbers) != len(edges) - 1 or not all(0 <= place < num_rows for place in numbers):
        return None
    if sorted(edges) != edges or edges[0] < 0 or edges[-1] > len(lengths):
        return None
    inputs, targets = ([[-7] * seq_len for _ in range(num_rows)] for _ in range(2))
    for place, first, last in zip(numbers, edges, edges[1:], strict=False):
        some = lengths[first:last]
        if sum(some) > seq_len or min(some, default=0) < 0:
            return None
        padding = seq_len - sum(some)
        inputs[place] = [token for length in some for token in range(length)] + [0] * padding
        targets[place] = [token for length in some if length for token in [*range(1, length), -100]] + [-100] * padding
    return inputs, targets


@needs_compiled
def test_calls_keep_no_reference_whether_they_succeed_or_not(memory: Any) -> None:
    index, place = np.full(1, index_of(memory)), np.zeros(1, np.int64)
    wrong, edges, length = np.full(1, 9), np.array([0, 1]), np.array([7])
    inputs, targets = np.zeros((1, 7), np.int64), np.zeros((1, 7), np.int64)
    ids, positions = np.ones(1, np.int32), np.zeros(7, np.int32)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (kernels.compiled.copy_rows, (index, 2, place, inputs, targets)),
        (kernels.compiled.copy_rows, (index, 2, wrong, inputs, targets)),
        (kernels.compiled.copy_rows, (index, 3, place, inputs, targets)),
        (kernels.compiled.copy_rows, (index, 2, place, inputs, None)),
        (kernels.compiled.copy_pieces, (edges, index, length, -100, 2, place, inputs, targets)),
        (kernels.compiled.copy_pieces, (edges, index, wrong, -100, 2, place, inputs, targets)),
        (kernels.compiled.copy_pieces, (edges, index, edges, -100, 2, place, inputs, targets)),
        (kernels.compiled.spread, (length, ids, positions, None)),
        (kernels.compiled.spread, (wrong, ids, positions, positions)),
        (kernels.compiled.spread, (length, ids, positions, 3)),
    ]
    objects = (index, place, wrong, edges, length, inputs, targets, ids, positions, None)
    before = [sys.getrefcount(one) for one in objects]
    for function, arguments in calls:
        for _ in range(100):
            with contextlib.suppress(ValueError, IndexError, TypeError):
                function(*arguments)
    after = [sys.getrefcount(one) for one in objects]
    assert after[:-1] == before[:-1]
    assert abs(after[-1] - before[-1]) < 100, "references to None, which other threads hold too"


@needs_compiled
@pytest.mark.parametrize("lengths", [[3, 4], [3, 6], [-1, 9], [8]])
def test_segments_that_do_not_cover_the_rows_are_refused(lengths: list[int]) -> None:
    positions = np.full(8, -7, np.int32)
    with pytest.raises(ValueError, match="segments do not cover"):
        kernels.compiled.spread(np.array(lengths), np.ones(2, np.int32), positions, None)
    assert (positions == -7).all()


@needs_compiled
@pytest.mark.parametrize("name", ["copy_rows", "copy_pieces", "spread"])
def test_calls_with_other_arguments_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) takes exactly . arguments \(1 given\)"):
        getattr(kernels.compiled, name)(None)
