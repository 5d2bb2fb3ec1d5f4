"""Settings that are tested one by one elsewhere, used together: chosen documents in a mixture, cut, dealt and shared."""

from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.errors import UsageError

FIELDS = ("inputs", "targets", "positions", "segment_ids", "token_sources", "sources")
PACKINGS: list[dict[str, Any]] = [
    {"method": "concat"},
    {"method": "concat", "max_documents": 3},
    {"method": "best-fit"},
    {"method": "best-fit", "max_documents": 3},
    {"method": "pad"},
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Scattered documents of one store, and all of another."""
    folder = tmp_path_factory.mktemp("together")
    first = tm.open(make_store(folder / "first", make_documents(400, longest=40), num_shards=4))
    second = tm.open(make_store(folder / "second", make_documents(100, longest=60), num_shards=2))
    return tm.sample(first, 0.5, seed=1), second


@pytest.fixture(params=PACKINGS, ids=lambda packing: "-".join(map(str, packing.values())))
def rows(request: pytest.FixtureRequest, documents: tuple[Any, Any]) -> Any:
    """A mixture of both."""
    packed = (tm.shuffle(tm.pack(some, seq_len=32, **request.param)) for some in documents)
    return tm.mix([(part, share) for part, share in zip(packed, (0.6, 0.4), strict=True)])


def take(rows: Any, count: int, **settings: Any) -> list[list[np.ndarray[Any, Any]]]:
    batches = iter(tm.Loader(rows, batch_size=4, document_mask=True, **settings))
    return [
        [np.array(getattr(batch, name)) for name in FIELDS] for batch, _ in zip(batches, range(count), strict=False)
    ]


def test_context_parallel_peers_hold_the_parts_of_each_field(rows: Any) -> None:
    first, second = (take(rows, 10, cp_rank=rank, cp_size=2) for rank in range(2))
    for whole, *parts in zip(take(rows, 10), first, second, strict=True):
        for all_of_it, outer, inner in zip(whole[:-1], *(part[:-1] for part in parts), strict=True):
            np.testing.assert_array_equal(np.concatenate([outer[:, :8], inner, outer[:, 8:]], axis=1), all_of_it)
        for part in parts:
            np.testing.assert_array_equal(part[-1], whole[-1])


def test_balanced_ranks_hold_the_rows_of_the_global_batch(rows: Any) -> None:
    ranks = [take(rows, 4, rank=rank, world_size=2, balance=True) for rank in range(2)]
    for step in range(4):
        whole = np.concatenate([batch[0] for batch in take(rows, 8)[2 * step : 2 * step + 2]])
        dealt = np.concatenate([rank[step][0] for rank in ranks])
        assert sorted(dealt.tolist()) == sorted(whole.tolist())


@pytest.mark.parametrize(
    "settings",
    [
        {"cp_rank": 1, "cp_size": 2},
        {"rank": 1, "world_size": 2, "balance": True},
        {"ignore_index": -1},
        {"layout": "flat", "fields": ["sources", "token_sources"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_worker_processes_change_nothing(rows: Any, settings: Any) -> None:
    def batches(num_workers: int) -> Any:
        loader: Any = tm.load(
            rows, batch_size=4, framework="torch", document_mask=True, num_workers=num_workers, **settings
        )
        return zip(range(6), loader, strict=False)

    for (_, here), (_, there) in zip(batches(0), batches(2), strict=True):
        names = here if isinstance(here, dict) else FIELDS
        for name in names:
            one, other = (batch[name] if isinstance(batch, dict) else getattr(batch, name) for batch in (here, there))
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_masks_from_tokens_need_whole_rows(rows: Any) -> None:
    with pytest.raises(UsageError, match="token_masks look at whole rows"):
        tm.Loader(rows, batch_size=2, document_mask=True, cp_rank=0, cp_size=2, token_masks=[tm.Goldfish()])
