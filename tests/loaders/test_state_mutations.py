"""Every field of a loader's state, replaced by other values: the state is refused, or the field has no effect."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.conftest import make_texts, write_jsonl
from tests.support.stores import make_documents, make_store
from tokenmill.errors import UsageError

GONE = object()
SEQ_LEN, NEXT_ROW = 16, 150
FREE = {("next_row",), ("batch_size",), ("world_size",)}
"""The place itself, and two numbers that may differ from those of the resuming loader."""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> dict[str, Callable[[], Any]]:
    folder = tmp_path_factory.mktemp("stores")
    first, second = (
        tm.open(make_store(folder / str(n), make_documents(300, seed=n, longest=50), num_shards=3)) for n in range(2)
    )
    write_jsonl(folder / "text.jsonl", make_texts(60, seed=1))
    plain = tm.shuffle(tm.pack(first, seq_len=SEQ_LEN), seed=1)
    pair = [(plain, 0.5), (tm.shuffle(tm.pack(second, seq_len=SEQ_LEN, method="pad"), seed=2), 0.5)]
    rows: dict[str, Any] = {
        "concat": tm.pack(first, seq_len=SEQ_LEN),
        "best-fit": tm.pack(first, seq_len=SEQ_LEN, method="best-fit", seed=3),
        "pad": tm.pack(second, seq_len=SEQ_LEN, method="pad", long_documents="truncate"),
        "shuffle": plain,
        "blocks": tm.shuffle(tm.pack(first, seq_len=SEQ_LEN), seed=1, block_tokens=2000),
        "mix": tm.mix(pair, seed=4, max_epochs=[2, 9], on_exhausted="renormalize"),
        "stages": tm.mix(pair, seed=4, stages={100: [1, 3], 900: [0, 1]}),
        "slice": tm.slice(plain, 10, 200),
        "denied": tm.pack(tm.deny(first, [3, 5]), seq_len=SEQ_LEN),
    }
    made: dict[str, Callable[[], Any]] = {
        name: (lambda some=some: tm.Loader(some, batch_size=5)) for name, some in rows.items()
    }
    text = {"tokenizer": str(tiny_tokenizer), "cache": folder / "tok", "workers": 1}
    made["stream"] = lambda: tm.load(str(folder / "text.jsonl"), SEQ_LEN, 5, **text)
    return made


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every field of a state with its value, branches before their leaves."""
    if path:
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from fields(item, (*path, key))


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(state)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def others(value: Any, found_elsewhere: list[Any]) -> Iterator[Any]:
    """Other values for a field: those of other states, neighbours of its own, and values of every type."""
    yield from found_elsewhere
    if isinstance(value, (int, float)) and value is not True and value is not False:
        yield from (value + 1, value - 1, -value, value * 2 + 1, value + 0.5, str(value))
    if isinstance(value, str):
        yield from (value[::-1], value.upper(), value + "x", value[:-1])
    if isinstance(value, list):
        yield from (value[::-1], value[:-1], [*value, 1])
    if isinstance(value, dict):
        yield {**value, "more": 1}
    yield from (None, True, False, -1, 1.5, "", "x", [], {}, {"a": 1}, [[]], GONE)
    yield from (np.array([1, 2]), np.array([]), np.array("x"), np.array([value], object), np.float64("nan"))


def is_same(value: Any, other: Any) -> bool:
    if isinstance(other, np.ndarray) or isinstance(value, bool) != isinstance(other, bool):
        return False
    return type(value) is type(other) and value == other


def check_refused(loader: Any, state: Any, what: Any) -> None:
    before = loader.state_dict()
    try:
        loader.load_state_dict(state)
    except UsageError as error:
        said = str(error)
    else:
        pytest.fail(f"accepted: {what}")
    assert len(said) < 400 and "\n" not in said, what
    assert loader.state_dict() == before, "a refused state does not move the loader"


KINDS = ["concat", "best-fit", "pad", "shuffle", "blocks", "mix", "stages", "slice", "denied", "stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_field_of_another_value_is_refused(datasets: Any, kind: str) -> None:
    loader = datasets[kind]()
    state = {**loader.state_dict(), "next_row": NEXT_ROW}
    loader.load_state_dict(state)
    elsewhere: dict[Any, list[Any]] = {}
    for other in KINDS:
        for path, value in fields(datasets[other]().state_dict()):
            elsewhere.setdefault(path, []).append(value)
    count = 0
    for path, value in fields(state):
        for other in others(value, elsewhere.get(path, [])):
            if is_same(value, other) or path in FREE:
                continue
            check_refused(loader, replaced(state, path, other), (path, other))
            count += 1
    assert count > 200


def test_half_a_state_of_another_dataset_is_refused(datasets: Any) -> None:
    loaders = [datasets[kind]() for kind in KINDS]
    for loader, other in itertools.permutations(loaders, 2):
        ours, theirs = loader.state_dict(), other.state_dict()
        for names in (["fingerprint"], ["dataset"], ["fingerprint", "dataset"]):
            check_refused(loader, {**ours, **{name: theirs[name] for name in names}}, names)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fields_that_decide_nothing_may_differ_but_not_be_nonsense(datasets: Any, kind: str) -> None:
    loader = datasets[kind]()
    state = loader.state_dict()
    for (name,) in sorted(FREE):
        for wrong in (-1, "1", 1.5, None, True, [1], {}, np.array([1, 2]), np.array([]), np.array("x")):
            check_refused(loader, {**state, name: wrong}, (name, wrong))
    for name in ("batch_size", "world_size"):
        loader.load_state_dict({**state, name: 7, "next_row": 35})
        assert loader.state_dict()["next_row"] == 35


def test_values_of_numpy_and_torch_are_numbers_or_refused(datasets: Any) -> None:
    torch = pytest.importorskip("torch")
    loader = datasets["stages"]()
    state = {**loader.state_dict(), "next_row": NEXT_ROW}
    for scalar in (np.int64, np.array, torch.tensor):
        number = {"version": scalar(1), "next_row": scalar(NEXT_ROW), "batch_size": scalar(5)}
        loader.load_state_dict({**state, **number, "dataset": {**state["dataset"], "seed": scalar(4)}})
        check_refused(loader, replaced(state, ("dataset", "seed"), scalar(5)), scalar)
    for path, _ in fields(state):
        for value in (torch.tensor([1, 2]), torch.tensor([]), torch.ones(2, 2), np.zeros((2, 2))):
            check_refused(loader, replaced(state, path, value), path)


def test_a_later_stage_may_differ_only_in_a_state_that_agrees_with_itself(datasets: Any) -> None:
    loader = datasets["stages"]()
    state = {**loader.state_dict(), "next_row": NEXT_ROW}
    changed = replaced(state, ("dataset", "stages", "900"), [1.0, 1.0])
    with pytest.raises(
        UsageError, match="the state contradicts itself: its fingerprint is '.*load the state of anothe"
    ):
        loader.load_state_dict(changed)
