"""Exports and shards, read by other projects' own readers, each in an environment of its own.

    make test-interop

Builds `.interop/NAME` from PyPI if it is missing, makes small stores, exports them, and lets the other project read the
files: tokens and document boundaries must be equal. With names of projects as arguments, only those run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.interop.environments import environment
from tests.interop.stores import make_stores
from tests.support.exports import documents_of, rows_of
from tokenmill.formats import litdata, mds
from tokenmill.formats.export import export
from tokenmill.store.store import TokenStore

PEERS = Path(__file__).parent / "peers"
SEQ_LEN = 129
Case = dict[str, Any]
Stores = dict[str, TokenStore]


def megatron(stores: Stores, folder: Path) -> Iterator[Case]:
    """Cases of the store's own shards, one merged pair, and links."""
    for name, store in stores.items():
        documents = documents_of(store.split())
        shards = [shard.name for shard in store.manifest.splits["train"].shards]
        yield {"name": f"{name}, shards", "prefixes": [f"{store.path}/{one}" for one in shards], "documents": documents}
        export(store.path, folder / f"{name}-merged", to="megatron")
        yield {"name": f"{name}, merged", "prefixes": [f"{folder}/{name}-merged/train"], "documents": documents}
        export(store.path, folder / f"{name}-links", to="megatron", links=True)
        prefixes = [f"{folder}/{name}-links/{one}" for one in shards]
        yield {"name": f"{name}, links", "prefixes": prefixes, "documents": documents}
    export(stores["narrow"].path, folder / "val", to="megatron", split="val")
    yield {"name": "val", "prefixes": [f"{folder}/val/val"], "documents": documents_of(stores["narrow"].split("val"))}


def datatrove(stores: Stores, folder: Path) -> Iterator[Case]:
    """Cases of merged files and links; each of two splits has a folder."""
    for name, store in stores.items():
        for links in (False, True):
            dest = folder / f"{name}-{links}"
            export(store.path, dest, to="datatrove", links=links)
            for split in store.splits:
                yield {
                    "name": f"{name} {split}{', links' * links}",
                    "folder": str(dest / split if len(store.splits) > 1 else dest),
                    # Its reader counts positions wrongly if a document has no tokens.
                    "has_positions": name != "bare",
                    **_facts(store, split),
                }


def olmo(stores: Stores, folder: Path) -> Iterator[Case]:
    """Cases of merged files and links."""
    for name, store in stores.items():
        export(store.path, folder / f"{name}-merged", to="olmo")
        for split in store.splits:
            paths = [f"{folder}/{name}-merged/{split}.npy"]
            yield {"name": f"{name} {split}", "paths": paths, **_facts(store, split)}
        if name != "supervised":
            export(store.path, folder / f"{name}-links", to="olmo", links=True)
            shards = [shard.name for shard in store.manifest.splits["train"].shards]
            paths = [f"{folder}/{name}-links/{one}.npy" for one in shards]
            yield {"name": f"{name}, links", "paths": paths, **_facts(store, "train")}


def _facts(store: TokenStore, split: str) -> Case:
    documents = store.split(split)
    return {
        "documents": documents_of(documents),
        "mask": documents.mask.read(0, documents.num_tokens).tolist() if documents.mask else None,
        "token_size": documents.dtype.itemsize,
        "tokenizer": store.manifest.tokenizer.name,
        "eos_id": store.manifest.special_tokens.eos_id or 0,
    }


def _of_rows(to: str) -> Callable[[Stores, Path], Iterator[Case]]:
    # Small files, so that there are several.
    mds.MosaicShards.file_bytes = litdata.LitChunks.file_bytes = 200_000

    def make(stores: Stores, folder: Path) -> Iterator[Case]:
        for name, store in stores.items():
            dest = folder / name
            export(store.path, dest, to=to, seq_len=SEQ_LEN)
            for split in store.splits:
                place = dest / split if len(store.splits) > 1 else dest
                rows = rows_of(store.split(split), SEQ_LEN)
                yield {"name": f"{name} {split}", "folder": str(place), "rows": rows, "seq_len": SEQ_LEN}

    return make


PROJECTS: dict[str, Callable[[Stores, Path], Iterator[Case]]] = {
    "megatron": megatron,
    "datatrove": datatrove,
    "olmo": olmo,
    "mds": _of_rows("mds"),
    "litdata": _of_rows("litdata"),
}


def main(names: list[str]) -> None:
    """Run the projects one after the other, and print how many cases passed."""
    num_passed, failed = 0, []
    with tempfile.TemporaryDirectory() as folder:
        stores = make_stores(Path(folder))
        for name in names or PROJECTS:
            cases = list(PROJECTS[name](stores, Path(folder) / name))
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(cases))
            command = [str(environment(name)), str(PEERS / f"read_{name}.py"), str(path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            print(done.stdout, end="", flush=True)
            if done.returncode:
                failed.append(name)
                print(f"{name} could not read them:\n{done.stderr[-3000:]}", file=sys.stderr)
            else:
                num_passed += len(cases)
    print(f"{num_passed} passed, {len(failed)} projects failed" + (f": {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
