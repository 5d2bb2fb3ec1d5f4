"""From a row of a packing back to the places where it comes up, through shuffles, slices and mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import make_documents, make_store


@pytest.fixture(scope="module")
def packings(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("where")
    stores = [tm.open(make_store(folder / str(n), make_documents(80 + 60 * n, seed=n))) for n in range(3)]
    return [
        tm.pack(store, seq_len=16, method=method)
        for store, method in zip(stores, ("concat", "best-fit", "pad"), strict=True)
    ]


def mixture(packings: list[Any], **options: Any) -> tm.Rows:
    sources = [(tm.shuffle(rows, seed=n), n + 1) for n, rows in enumerate(packings)]
    return tm.mix(sources, seed=1, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p[0],
        lambda p: tm.shuffle(p[1], seed=3),
        lambda p: tm.slice(tm.shuffle(p[0], seed=3), 5, 20),
        lambda p: tm.shuffle(tm.skip(tm.shuffle(p[2], seed=3), 9), seed=4),
        mixture,
        lambda p: mixture(p, stages={50: [3, 1, 0], 90: [0, 0, 1]}),
        lambda p: mixture(p, max_epochs=1, on_exhausted="renormalize"),
        lambda p: mixture(p, max_epochs=1, on_exhausted="stop"),
        lambda p: tm.mix([(p[0], 1), (tm.shuffle(p[0]), 2)]),
        lambda p: tm.shuffle(mixture(p), seed=8),
    ],
)
def test_every_row_is_found_where_it_is(packings: list[Any], make: Any) -> None:
    rows = make(packings)
    stop = min(400, rows.limit or 400)
    expected: dict[tuple[int, int], list[int]] = {}
    for choice in rows.resolve(np.arange(stop)):
        places = np.arange(stop) if choice.at is None else choice.at
        leaf = next(n for n, packing in enumerate(packings) if packing is choice.rows)
        for place, number in zip(places.tolist(), (choice.numbers % len(choice.rows)).tolist(), strict=True):
            expected.setdefault((leaf, number), []).append(place)
    for leaf in rows.leaves():
        which = next(n for n, packing in enumerate(packings) if packing is leaf)
        for row in range(len(leaf)):
            assert rows.where(leaf, row, stop) == sorted(expected.get((which, row), []))
