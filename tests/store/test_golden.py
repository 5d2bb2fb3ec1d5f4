"""The bytes of a store never change unnoticed: a small one is kept in the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import tokenmill
from tests.golden.make import FLAGS, HERE, write_input

GOLDEN = HERE / "store"


def test_the_same_input_gives_the_golden_bytes(tmp_path: Path) -> None:
    tokenmill.tokenize(str(write_input(tmp_path)), tmp_path / "store", **FLAGS)
    names = sorted(str(p.relative_to(GOLDEN)) for p in GOLDEN.rglob("*") if p.is_file())
    assert [
        str(p.relative_to(tmp_path / "store")) for p in sorted((tmp_path / "store").rglob("*")) if p.is_file()
    ] == sorted([*names, "run.json"])
    for name in names:
        new, old = tmp_path / "store" / name, GOLDEN / name
        if name.endswith(".parquet"):
            assert pq.read_table(new).equals(pq.read_table(old))
        elif name == "manifest.json":
            assert comparable(new) == comparable(old)
        else:
            assert new.read_bytes() == old.read_bytes(), name


def comparable(path: Path) -> dict[str, Any]:
    """The manifest without what depends on versions of libraries: their names and the bytes of Parquet files."""
    manifest = json.loads(path.read_text())
    del manifest["checksum"], manifest["engine"]["version"]
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            del shard["files"][".docs.parquet"]
    return manifest


def test_the_golden_store_still_opens() -> None:
    store = tokenmill.open(GOLDEN)
    texts = {
        store.decode(store.splits[s].document(n)) for s in store.splits for n in range(store.splits[s].num_documents)
    }
    assert texts == {text + "<eos>" for text in ("The mill grinds.", "", "größer, 日本\n", "👩‍👩‍👧 <eos>", "last")}
