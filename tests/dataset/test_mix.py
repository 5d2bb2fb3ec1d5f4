"""Mixing: shares are kept at every prefix, sources give their rows in order, weights change without losing a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.running import tokenize_here
from tests.support.stores import make_documents, make_store
from tokenmill.dataset.rows import Integers, ResolvedRows, Rows
from tokenmill.errors import UsageError


class Counted(Rows):
    """Rows that consist of their numbers only."""

    def __init__(self, num_rows: int, name: str = "counted", tokens_per_row: int = 8) -> None:
        self.seq_len = 8
        self.num_rows = num_rows
        self.num_tokens = num_rows * tokens_per_row
        self.name = name

    def resolve(self, index: Integers) -> list[ResolvedRows]:
        return [ResolvedRows(self, None, index)]  # type: ignore[arg-type]

    def where(self, leaf: Any, row: int, stop: int) -> list[int]:
        return list(range(row, stop, self.num_rows))

    def describe(self) -> dict[str, Any]:
        return {"kind": self.name, "num_rows": self.num_rows}

    def title(self) -> str:
        return self.name


def assign(mixture: Rows, num_rows: int) -> tuple[Integers, Integers]:
    """The source and the number in it of each row."""
    sources = [part for _, part in mixture.parts()]
    source, number = np.full(num_rows, -1), np.full(num_rows, -1)
    for choice in mixture.resolve(np.arange(num_rows)):
        which = next(i for i, part in enumerate(sources) if part is choice.rows)
        assert (source[choice.at] == -1).all()
        source[choice.at], number[choice.at] = which, choice.numbers
    assert (source >= 0).all()
    return source, number


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=16), st.integers(0, 2**32))
def test_every_source_is_within_three_rows_of_its_share_at_every_prefix(weights: list[float], seed: int) -> None:
    mixture = tm.mix([(Counted(1000), weight) for weight in weights], seed=seed)
    source, number = assign(mixture, 20_000)
    shares = np.array(mixture._stages[0].weights, float)
    shares /= shares.sum()
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 2e-5
    for which, share in enumerate(shares):
        mine = source == which
        assert np.abs(np.cumsum(mine) - share * np.arange(1, 20_001)).max() < 3
        assert number[mine].tolist() == list(range(int(mine.sum())))
    assert mixture.counts(20_000) == np.bincount(source, minlength=len(weights)).tolist()


@pytest.mark.parametrize("weights", [[7, 2, 1], [0.5, 0.5], [0.61, 0.2, 0.1, 0.05, 0.04], [1 / 3, 1 / 3, 1 / 3]])
def test_a_million_rows_stay_within_three_of_their_share(weights: list[float]) -> None:
    mixture = tm.mix([(Counted(1000), weight) for weight in weights], seed=3)
    source, _ = assign(mixture, 1_000_000)
    shares = np.array(mixture._stages[0].weights) / sum(mixture._stages[0].weights)
    for which, share in enumerate(shares):
        assert np.abs(np.cumsum(source == which) - share * np.arange(1, 1_000_001)).max() < 3


def test_any_row_is_found_without_the_ones_before() -> None:
    mixture = tm.mix([(Counted(50), 0.7), (Counted(30), 0.3)], seed=1, stages={400: [0.1, 0.9]})
    source, number = assign(mixture, 1000)
    for row in np.random.default_rng(0).integers(0, 1000, 50).tolist():
        (choice,) = mixture.resolve(np.array([row]))
        assert choice.rows is mixture.parts()[source[row]][1]
        assert choice.numbers.tolist() == [number[row]]


def test_weights_are_token_fractions() -> None:
    """Rows of the second source are half empty, so it needs twice the rows for the same tokens."""
    mixture = tm.mix([(Counted(500, "full", 8), 0.5), (Counted(500, "half", 4), 0.5)])
    first, second = mixture.counts(300_000)
    assert abs(first - 100_000) < 3
    assert abs(second - 200_000) < 3
    assert mixture.fractions(300_000) == pytest.approx([0.5, 0.5], abs=1e-4)


def test_stages_lose_and_repeat_nothing() -> None:
    mixture = tm.mix([(Counted(100), 0.9), (Counted(100), 0.1)], seed=2, stages={1000: [0.5, 0.5], 1500: [0.0, 1.0]})
    source, number = assign(mixture, 3000)
    for which in (0, 1):
        assert number[source == which].tolist() == list(range(int((source == which).sum())))
    assert abs(int((source[:1000] == 0).sum()) - 900) < 3
    assert abs(int((source[1000:1500] == 0).sum()) - 250) < 3
    assert (source[1500:] == 1).all()


def test_a_source_that_is_exhausted_stops_the_mixture() -> None:
    mixture = tm.mix([(Counted(100), 0.5), (Counted(30), 0.5)], max_epochs=2, on_exhausted="stop")
    assert mixture.limit is not None
    source, number = assign(mixture, mixture.limit)
    assert number[source == 1].max() == 59
    assert mixture.counts(mixture.limit)[1] == 60
    assert mixture.limit == len(mixture)
    with pytest.raises(IndexError):
        mixture[mixture.limit]


def test_a_source_that_is_exhausted_leaves_its_share_to_the_others() -> None:
    mixture = tm.mix(
        [(Counted(100), 0.5), (Counted(30), 0.4), (Counted(40), 0.1)],
        max_epochs=[3, 1, None],
        on_exhausted="renormalize",
    )
    assert mixture.limit is None
    source, number = assign(mixture, 5000)
    assert int((source == 1).sum()) == 30
    assert int((source == 0).sum()) == 300
    for which in (0, 1, 2):
        assert number[source == which].tolist() == list(range(int((source == which).sum())))
    end = int(np.flatnonzero(source == 1)[-1]) + 1
    after = source[end : end + 120]
    assert abs(int((after == 0).sum()) - 100) < 3
    assert (source[np.flatnonzero(source == 0)[-1] + 1 :] == 2).all()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rounding_does_not_add_up_over_stages(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    weights = st.lists(st.floats(0.001, 1.0), min_size=count, max_size=count)
    rows = sorted(data.draw(st.sets(st.integers(1, 3000), max_size=200)))
    changes = {0: data.draw(weights)} | {row: data.draw(weights) for row in rows}
    mixture = tm.mix(
        [(Counted(500), weight) for weight in changes[0]],
        seed=data.draw(st.integers(0, 99)),
        stages={row: changes[row] for row in rows},
    )
    source, _ = assign(mixture, 3500)
    shares = np.empty((3500, count))
    for row, some in changes.items():
        shares[row:] = np.array(some) / sum(some)
    given = np.cumsum(source[:, None] == np.arange(count), axis=0)
    assert np.abs(given - np.cumsum(shares, axis=0)).max() < 3
    assert mixture.counts(3500) == given[-1].tolist()


def test_a_slice_weighs_what_its_rows_hold(tmp_path: Path) -> None:
    uneven = tm.open(make_store(tmp_path / "uneven", [[1] * 16] * 100 + [[2] * 2] * 100))
    flat = tm.open(make_store(tmp_path / "flat", [[3] * 16] * 200))
    rows = tm.take(tm.pack(uneven, seq_len=16, method="pad"), 100)
    assert rows.num_tokens == 1600
    mixture = tm.mix([(rows, 0.5), (tm.pack(flat, seq_len=16, method="pad"), 0.5)])
    batch = next(iter(tm.Loader(mixture, batch_size=400, epochs=2)))
    assert (batch.inputs == 1).sum() == (batch.inputs == 3).sum()


def test_repeated_rows_never_end() -> None:
    mixture = tm.mix([(Counted(10), 1), (Counted(10), 1)])
    assert mixture.limit is None
    assert assign(mixture, 200)[1].max() == 99


def test_the_order_of_sources_never_changes_between_releases() -> None:
    mixture = tm.mix([(Counted(100), 0.5), (Counted(30), 0.3), (Counted(9), 0.2)], seed=9, stages={5000: [1, 2, 3]})
    source, number = assign(mixture, 20_000)
    digest = xxhash.xxh3_64_hexdigest(np.stack([source, number]).astype("<i8").tobytes())
    assert digest == GOLDEN


GOLDEN = "b4a3e4da61c83714"


def test_the_seed_changes_the_pattern_and_the_fingerprint() -> None:
    sources = [(Counted(100), 0.5), (Counted(30), 0.3), (Counted(9), 0.2)]
    ours, theirs = tm.mix(sources, seed=1), tm.mix(sources, seed=2)
    assert assign(ours, 100)[0].tolist() != assign(theirs, 100)[0].tolist()
    assert ours.fingerprint != theirs.fingerprint
    assert ours.fingerprint == tm.mix(sources, seed=1).fingerprint


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([], {}, "at least one source"),
        ([(Counted(3), -1.0)], {}, "must be numbers of at least 0"),
        ([(Counted(3), 0.0)], {}, "not all 0"),
        ([(Counted(3), float("nan"))], {}, "must be numbers"),
        ([(Counted(3), 1.0)], {"stages": {5: [1, 2]}}, "the stage at row 5 has 2 weights for 1 sources"),
        ([(Counted(3), 1.0)], {"stages": {-5: [1]}}, "a stage cannot begin at row -5"),
        (5, {}, "are rows with their weights"),
        ([Counted(3), Counted(3)], {}, "are rows with their weights"),
        ([("path", 1.0)], {}, "mix needs rows"),
        ([(Counted(3), "a")], {}, "a weight 'a' is not a number"),
        ([(Counted(3), None)], {}, "a weight None is not a number"),
        ([(Counted(3), 1.0)], {"seed": 1 << 64}, "seed"),
        ([(Counted(3), 1.0)], {"stages": [1, 2]}, "are not weights by row number"),
        ([(Counted(3), 1.0)], {"stages": {5: 1}}, "are not weights by row number"),
        ([(Counted(3), 1.0)], {"stages": {5: "a"}}, "a weight 'a' is not a number"),
        ([(Counted(3), 1.0)], {"max_epochs": "3", "on_exhausted": "stop"}, "max_epochs '3' is not a number"),
        ([(Counted(3), 1.0)], {"max_epochs": 1e-9, "on_exhausted": "stop"}, "is less than one row"),
        ([(Counted(3), 1.0)], {"max_epochs": 1}, "pass on_exhausted='stop' or 'renormalize'"),
        ([(Counted(3), 1.0)], {"on_exhausted": "cry"}, "on_exhausted 'cry' is unknown"),
        ([(Counted(3), 1.0)], {"max_epochs": 0, "on_exhausted": "stop"}, "max_epochs 0 must be above 0"),
        ([(Counted(3), 1.0)], {"stages": {1.5: [1]}}, "the row of a stage 1.5 must be a whole number"),
        ([(Counted(3), 1.0)], {"max_epochs": [1, 2]}, "max_epochs has 2 numbers for 1 sources"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tm.mix(sources, **options)


def test_rows_of_different_lengths_are_refused(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path, make_documents(200)))
    with pytest.raises(UsageError, match=r"rows of \[8, 16\] tokens; pack them with one seq_len"):
        tm.mix([(tm.pack(store, seq_len=8), 1), (tm.pack(store, seq_len=16), 1)])


def test_a_mixture_prints_itself_as_a_tree(tmp_path: Path) -> None:
    store = tm.open(make_store(tmp_path / "web", make_documents(200)))
    rows = tm.shuffle(tm.pack(store, seq_len=16), seed=0)
    lines = repr(tm.mix([(rows, 0.7), (tm.shuffle(tm.pack(store, seq_len=16, method="best-fit")), 0.3)])).splitlines()
    assert lines[0].startswith("mix, seed 0: ")
    assert lines[1].startswith("  70.")
    assert "shuffle, seed 0" in lines[1]
    assert lines[2].startswith("    pack concat, seq_len 16: ")
    assert lines[3].strip().startswith("web/train: 200 documents, ")
    assert all(line.endswith("]") for line in lines)


def test_stores_of_different_tokenizers_do_not_mix(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 50)
    (tmp_path / "copy").mkdir()
    for path in tiny_tokenizer.iterdir():
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    names = {"one": "bytes", "two": str(tiny_tokenizer), "three": str(tmp_path / "copy")}
    for name, tokenizer in names.items():
        tokenize_here(tmp_path / "a.txt", tmp_path / name, tokenizer=tokenizer)
    one, two, three = (tm.pack(tm.open(tmp_path / name), seq_len=16) for name in names)
    with pytest.raises(tm.UsageError, match=r"one/train was tokenized with bytes \(\w{6}\), and two/train was .* mix"):
        tm.mix([(one, 0.5), (tm.shuffle(two), 0.5)])
    assert tm.mix([(two, 0.5), (three, 0.5)]).num_rows == two.num_rows + three.num_rows
