"""What every framework's loader promises: the batches of the numpy loader, in its order, and its states."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import CASES, SEQ_LEN, collect, make_two_stores, shuffled
from tokenmill.errors import MissingDependencyError, UsageError
from tokenmill.loaders import FRAMEWORKS, make_loader

PACKAGES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "grain": "grain", "tf": "tensorflow"}
EXTRAS = {"torch": "torch", "jax": "jax", "grain": "jax", "tf": "tf"}
DTYPES = {"jax": np.int32, "grain": np.int32}
LAYOUTS = ["hf", "sft", "megatron", "torchtitan", "olmo", "maxtext"]
FIELDS = ("positions", "segment_ids", "loss_mask", "loss_weights", "attention_mask", "cu_seqlens")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    """Every framework that is installed, imported once."""
    name: str = request.param
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    import_module(FRAMEWORKS[name][0])
    return name


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return make_two_stores(tmp_path_factory.mktemp("stores"))


def make(framework: str, rows: tm.Rows, **settings: Any) -> Any:
    """Make a loader and treat every warning of the framework as an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make_loader(rows, framework=framework, **settings)


def kind_of(framework: str) -> type:
    """The type of arrays in batches."""
    kinds = {"torch": "Tensor", "jax": "Array", "tf": "Tensor"}
    return getattr(sys.modules[PACKAGES[framework]], kinds[framework]) if framework in kinds else np.ndarray


def plain(batch: Any) -> Any:
    """A batch as a tree of numpy arrays and numbers; one without a layout as a pair."""
    if isinstance(batch, dict) and batch.keys() == {"inputs", "targets"}:
        batch = (batch["inputs"], batch["targets"])
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    if isinstance(batch, (tuple, list, tm.Batch)):
        return type(batch)(map(plain, batch)) if not isinstance(batch, tm.Batch) else (*map(plain, batch),)
    return batch if isinstance(batch, int) else np.asarray(batch)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare trees of arrays, and their structure."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_same(ours[name], theirs[name])
    elif isinstance(theirs, (tuple, list)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert np.array_equal(ours, theirs)


def assert_same_batches(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert_same(plain(one), plain(other))


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_numpy_loader(framework: str, stores: list[Any], case: str) -> None:
    make_rows, settings = CASES[case]
    settings = {"batch_size": 7, "rank": 1, "world_size": 2, **settings}
    rows = make_rows(stores)
    ours, theirs = make(framework, rows, **settings), tm.Loader(rows, **settings)
    count = len(theirs) if "epochs" in settings else 60
    batches = list(itertools.islice(ours, count + 1))
    if "epochs" in settings:
        assert len(ours) == len(batches) == count
    expected = collect(theirs, count)
    assert_same_batches(batches[:count], expected)
    for mine, yours in zip(batches, expected, strict=False):
        inputs = mine["inputs"] if framework == "grain" else mine.inputs
        assert isinstance(inputs, kind_of(framework))
        assert np.asarray(inputs).dtype == settings.get("dtype", DTYPES.get(framework, np.int64))
        if framework != "grain":
            assert mine.max_seqlen == yours.max_seqlen and mine.documents == yours.documents
            for name in FIELDS:
                part = getattr(mine, name)
                assert isinstance(part, kind_of(framework)) and np.array_equal(part, getattr(yours, name)), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("document_mask", [False, True])
def test_layouts_have_the_same_parts(framework: str, stores: list[Any], layout: str, document_mask: bool) -> None:
    rows = shuffled(stores[1], method="best-fit")
    settings: dict[str, Any] = {"batch_size": 4, "layout": layout, "document_mask": document_mask}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = collect(make(framework, rows, **settings), 5)
    assert_same_batches(batches, collect(tm.Loader(rows, **settings), 5))


@pytest.mark.parametrize("layout", ["xy", "hf", "hf-flat"])
def test_further_fields_are_those_of_the_numpy_loader(framework: str, stores: list[Any], layout: str) -> None:
    rows = tm.mix([(shuffled(stores[0]), 0.7), (shuffled(stores[1], method="best-fit"), 0.3)])
    settings: dict[str, Any] = {"batch_size": 4, "layout": layout, "fields": ["sources", "token_sources"]}
    batches = collect(make(framework, rows, **settings), 5)
    for ours, theirs in zip(batches, collect(tm.Loader(rows, **settings), 5), strict=True):
        for name in settings["fields"]:
            part, expected = (b[name] if isinstance(b, dict) else getattr(b, name) for b in (ours, theirs))
            assert isinstance(part, kind_of(framework)) and np.array_equal(part, expected), name


def test_a_state_of_any_place_resumes_here_and_with_numpy(framework: str, stores: list[Any]) -> None:
    rows = shuffled(stores[0])
    whole = collect(tm.Loader(rows, batch_size=3), 60)
    for place in (1, 33, 50):
        loader = make(framework, rows, batch_size=3)
        collect(loader, place)
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["next_row"] == 3 * place
        for again in (loader, make(framework, rows, batch_size=3), tm.Loader(rows, batch_size=3)):
            again.load_state_dict(state)
            assert again.state_dict() == state
            assert_same_batches(collect(again, 60 - place), whole[place:])


def test_a_state_fits_any_number_of_ranks(framework: str, stores: list[Any]) -> None:
    rows = shuffled(stores[0])
    loader = make(framework, rows, batch_size=6)
    collect(loader, 11)
    state = loader.state_dict()
    rest = collect(loader, 16)[-5:] if framework == "grain" else collect(loader, 5)
    halves = [make(framework, rows, batch_size=3, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    for whole, *parts in zip(rest, *(collect(half, 5) for half in halves), strict=True):
        assert np.array_equal(np.concatenate([plain(part)[0] for part in parts]), plain(whole)[0])


def test_a_state_of_other_rows_is_refused(framework: str, stores: list[Any]) -> None:
    state = make(framework, shuffled(stores[0]), batch_size=6).state_dict()
    with pytest.raises(UsageError, match="the state is of another dataset"):
        make(framework, shuffled(stores[1]), batch_size=6).load_state_dict(state)


def test_kept_batches_are_never_overwritten(framework: str, stores: list[Any]) -> None:
    rows = shuffled(stores[0])
    batches = iter(make(framework, rows, batch_size=4))
    kept = [(*batch.values(),) if isinstance(batch, dict) else tuple(batch) for batch in itertools.islice(batches, 200)]
    gc.collect()
    for _ in range(200):
        next(batches)
    assert_same_batches(kept, collect(tm.Loader(rows, batch_size=4), 200))


def test_unknown_settings_are_refused_by_name(framework: str, stores: list[Any]) -> None:
    known = f"'bogus' is no setting of framework '{framework}'; there are align, balance, batch_size, .*prefetch"
    with pytest.raises(UsageError, match=known):
        tm.load(stores[0], seq_len=SEQ_LEN, batch_size=2, framework=framework, bogus=1)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_names_the_extra(name: str, stores: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    monkeypatch.delitem(sys.modules, FRAMEWORKS[name][0], raising=False)
    with pytest.raises(MissingDependencyError, match=rf"tokenmill\[{EXTRAS[name]}\]"):
        make_loader(shuffled(stores[0]), framework=name, batch_size=4)
