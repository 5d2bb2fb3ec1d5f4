"""Exports and shards, read by other projects' own readers, each in an environment of its own.

    make test-interop

Builds `.interop/NAME` from PyPI if it is missing, makes small stores, exports them, and lets the other project read the
files: tokens and document boundaries must be equal. With names of projects as arguments, only those run.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenmill as tm
from tests.interop.environments import environment
from tests.interop.stores import make_stores
from tests.support.exports import documents_of, rows_of
from tests.support.flat import sequences_of
from tokenmill.formats import litdata, mds
from tokenmill.formats.export import ExportedSplit, export
from tokenmill.store.store import TokenStore

PEERS = Path(__file__).parent / "peers"
SEQ_LEN = 129
Case = dict[str, Any]
Stores = dict[str, TokenStore]


def megatron(stores: Stores, folder: Path) -> Iterator[Case]:
    """Cases of the store's own shards, one merged pair, and links."""
    for name, store in stores.items():
        documents = documents_of(store.split())
        flags = {"drop_mask": store.split().mask is not None}
        shards = [shard.name for shard in store.manifest.splits["train"].shards]
        yield {"name": f"{name}, shards", "prefixes": [f"{store.path}/{one}" for one in shards], "documents": documents}
        export(store.path, folder / f"{name}-merged", to="megatron", **flags)
        yield {"name": f"{name}, merged", "prefixes": [f"{folder}/{name}-merged/train"], "documents": documents}
        export(store.path, folder / f"{name}-links", to="megatron", links=True, **flags)
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
        has_eos = name != "bare"
        export(store.path, folder / f"{name}-merged", to="olmo", eos_check=has_eos)
        for split in store.splits:
            paths = [f"{folder}/{name}-merged/{split}.npy"]
            yield {"name": f"{name} {split}", "paths": paths, "has_eos": has_eos, **_facts(store, split)}
        if name != "supervised":
            export(store.path, folder / f"{name}-links", to="olmo", links=True, eos_check=has_eos)
            shards = [shard.name for shard in store.manifest.splits["train"].shards]
            paths = [f"{folder}/{name}-links/{one}.npy" for one in shards]
            yield {"name": f"{name}, links", "paths": paths, "has_eos": has_eos, **_facts(store, "train")}


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
            export(store.path, dest, to=to, seq_len=SEQ_LEN, drop_mask=store.split().mask is not None)
            for split in store.splits:
                place = dest / split if len(store.splits) > 1 else dest
                rows = rows_of(store.split(split), SEQ_LEN)
                yield {"name": f"{name} {split}", "folder": str(place), "rows": rows, "seq_len": SEQ_LEN}

    return make


def trl(stores: Stores, folder: Path) -> Iterator[Case]:
    """Tables for `SFTTrainer`, and flattened batches for comparison with the collator of Transformers."""
    chat, plain = stores["chat"], stores["narrow"]
    packed = {"packing": False, "padding_free": True, "max_length": None}
    skipped = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    # Each export with settings of `SFTConfig`. The first and the last are read as Parquet, too.
    exports: list[tuple[str, TokenStore, Case, list[Case]]] = [
        ("documents", chat, {}, [{"max_length": None}, packed, skipped, {"max_length": 256, "packing": True}]),
        # docs/export.md says so: without its flag, SFTTrainer drops this column.
        (
            "completion_mask",
            chat,
            {"columns": "completion_mask"},
            [{"completion_only_loss": True}, {"ignores_mask": True}],
        ),
        ("assistant_masks", chat, {"columns": "assistant_masks"}, [{}]),
        ("best-fit", chat, {"seq_len": 256}, [packed, packed | skipped]),
        ("concat", chat, {"seq_len": 100, "packing": "concat"}, [packed | skipped]),
        ("pad", chat, {"seq_len": 64, "packing": "pad"}, [skipped]),
        ("plain", plain, {"split": "val"}, [{"max_length": None}]),
        ("plain best-fit", plain, {"split": "val", "seq_len": 6000, "packing": "best-fit"}, [packed | skipped]),
    ]
    for to in ("hf", "parquet"):
        for name, store, flags, configs in exports if to == "hf" else exports[:1] + exports[-1:]:
            dest = folder / f"{name}-{to}"
            done = export(store.path, dest, to=to, **flags)
            documents = store.split(flags.get("split"))
            rows = tm.pack(documents, seq_len=1 << 16, method="pad")
            if "seq_len" in flags:
                if done.packing == "concat":
                    rows = tm.pack(documents, seq_len=flags["seq_len"])
                else:
                    rows = tm.pack(documents, seq_len=flags["seq_len"], method=done.packing)
            yield {
                "name": f"{to} {name}",
                "folder": str(dest),
                "to": to,
                "configs": configs,
                "sequences": _sequences(rows, documents, done.splits),
            }
    yield from _flat_batches(stores["supervised"])


def _sequences(rows: Any, documents: Any, splits: dict[str, ExportedSplit]) -> list[Any]:
    """Return ids and mask of each document's part of a row; they attend to nothing else."""
    (split,) = splits.values()
    index = np.arange(split.num_rows or 0)
    found, spans = rows.segments(index), rows.spans(index)
    if rows.method == "concat":
        edges = np.unique(
            np.concatenate(
                [
                    np.arange(0, split.num_tokens + 1, rows.seq_len),
                    np.cumsum(np.concatenate([*documents.lengths()])).clip(max=split.num_tokens),
                ]
            )
        ).tolist()
        pairs = list(itertools.pairwise(edges))
    else:
        pairs = list(zip(spans.starts.tolist(), (spans.starts + found.lengths).tolist(), strict=True))
    mask = documents.mask
    return [
        [documents.read(a, b).tolist(), mask.read(a, b).tolist() if mask is not None else [1] * (b - a)]
        for a, b in pairs
    ]


def _flat_batches(store: TokenStore) -> Iterator[Case]:
    """Batches of `layout="hf-flat"`, and the sequences that they hold."""
    for packing, document_mask in itertools.product(("concat", "best-fit", "pad"), (False, True)):
        flags: dict[str, Any] = {"seq_len": 512, "batch_size": 3, "packing": packing, "document_mask": document_mask}
        loaders = (
            tm.load(store.path, epochs=1, **flags),
            tm.load(store.path, layout="hf-flat", framework="torch", epochs=1, **flags),
        )
        for number, (batch, flat) in enumerate(zip(*loaders, strict=True)):
            parts = {
                name: part if isinstance(part, int) else [part.tolist(), str(part.dtype), list(part.shape)]
                for name, part in flat.items()
            }
            name = f"flat {packing}, document_mask={document_mask}, batch {number}"
            yield {"name": name, "flat": parts, "sequences": sequences_of(batch)}


PROJECTS: dict[str, Callable[[Stores, Path], Iterator[Case]]] = {
    "megatron": megatron,
    "datatrove": datatrove,
    "olmo": olmo,
    "mds": _of_rows("mds"),
    "litdata": _of_rows("litdata"),
    "trl": trl,
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
