"""Scale: a trillion tokens open at once, with few descriptors and little memory; ten million documents pack in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import collect, make_documents, make_store, sparse_store
from tokenmill.dataset.pack import pack
from tokenmill.store import mapping
from tokenmill.store.documents import Documents
from tokenmill.store.table import ShardTable

FIRST_BATCH = textwrap.dedent(
    """
    import json, resource, sys, time
    from pathlib import Path
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    import tokenmill as tm
    tm.open, tm.pack, tm.shuffle, tm.Loader

    def resident():
        line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    before, started = resident(), time.perf_counter()
    store = tm.open(sys.argv[1])
    loader = iter(tm.Loader(tm.shuffle(tm.pack(store, seq_len=2048)), batch_size=8))
    x, y = next(loader)
    seconds = time.perf_counter() - started
    print(json.dumps([store.num_tokens, seconds, resident() - before, list(x.shape), int(x.sum())]))
    for _ in range(30):
        next(loader)
    print(len(list(Path("/proc/self/fd").iterdir())))
    """
)


@pytest.mark.parametrize("num_shards", [2_000, 20_000])
def test_a_trillion_tokens_give_their_first_batch_at_once(tmp_path: Path, num_shards: int) -> None:
    store = sparse_store(tmp_path / "store", num_shards, 10**12 // num_shards)
    best = 9.0
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_BATCH, str(store)], capture_output=True, text=True, timeout=60, check=True
        )
        first, descriptors = done.stdout.splitlines()
        num_tokens, seconds, memory, shape, total = json.loads(first)
        assert (num_tokens, shape, total) == (10**12, [8, 2048], 0)
        assert memory < 60_000_000
        assert int(descriptors) < 20
        best = min(best, seconds)
    assert best < 0.5, "0.15 s on a quiet machine: benchmarks/scale.py"


def test_past_the_cap_on_mappings_rows_are_read_at_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, make_documents(400), num_shards=20)
    rows = tm.shuffle(tm.pack(tm.open(store), seq_len=32))
    expected = collect(tm.Loader(rows, batch_size=4, document_mask=True), 40)
    for cap in (0, 7):
        monkeypatch.setattr(mapping, "MAX_MAPPINGS", mapping.MappedFile.num_live + cap)
        for method in ("concat", "best-fit"):
            few = tm.shuffle(tm.pack(tm.open(store), seq_len=32, method=method))
            batches = collect(tm.Loader(few, batch_size=4, document_mask=True), 40)
            if method == "concat":
                assert all((x == a).all() and (y == b).all() for (x, y), (a, b) in zip(batches, expected, strict=True))
                assert all((s.positions == t.positions).all() for s, t in zip(batches, expected, strict=True))
            else:
                assert all((y[:, :-1] == x[:, 1:])[y[:, :-1] >= 0].all() for x, y in batches)


def test_best_fit_over_ten_million_documents_starts_within_seconds() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.05, 1.0, 10_000_000), 1, 10**6).astype(np.int64)
    ends = np.cumsum(lengths)
    table = ShardTable(["nowhere"], [len(lengths)], [int(ends[-1])], np.dtype("<u2"), {0: (ends - lengths) * 2})
    documents = Documents(table, "lengths", "0")
    for seq_len, most_padding in ((8192, 0.0005), (2048, 0.0005)):
        best = 99.0
        for _ in range(2):
            started = time.perf_counter()
            rows = pack(documents, seq_len=seq_len, method="best-fit")
            rows.spans(np.arange(0, len(rows), len(rows) // 8)[:8])
            best = min(best, time.perf_counter() - started)
        assert rows.report.padding < most_padding
        assert rows.num_tokens == int(ends[-1])
        assert best < 6, "three seconds on a quiet machine"
