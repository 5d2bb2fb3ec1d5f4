"""Data sets for the loopback Hub, with the layouts and cards that those of the same names have."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.support.hub_server import Hub

__all__ = ["OPENWEBTEXT_PARQUET", "add_named", "card", "jsonl", "jsonl_zst", "parquet", "texts_of"]

FINEWEB_CARD = """
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
- config_name: CC-MAIN-2013-20
  data_files:
  - split: train
    path: data/CC-MAIN-2013-20/*
"""
WIKITEXT_CARD = """
dataset_info:
- config_name: wikitext-103-raw-v1
  features:
  - name: text
    dtype: string
- config_name: wikitext-2-raw-v1
  features:
  - name: text
    dtype: string
configs:
- config_name: wikitext-103-raw-v1
  data_files:
  - split: test
    path: wikitext-103-raw-v1/test-*
  - split: train
    path: wikitext-103-raw-v1/train-*
  - split: validation
    path: wikitext-103-raw-v1/validation-*
- config_name: wikitext-2-raw-v1
  data_files:
  - split: train
    path: wikitext-2-raw-v1/train-*
"""
TINYSTORIES_CARD = """
dataset_info:
  features:
  - name: text
    dtype: string
"""
OPENWEBTEXT_CARD = """
dataset_info:
  config_name: plain_text
  features:
  - name: text
    dtype: string
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
"""


def texts_of(name: str, count: int = 30) -> list[str]:
    """Documents that contain their own origin."""
    return [f"{name} document {number} " + "word " * (number % 7) for number in range(count)]


def parquet(texts: Sequence[str], key: str = "text", **columns: Any) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table({key: list(texts), **columns}), data)
    return data.getvalue()


def jsonl_zst(texts: Sequence[str]) -> bytes:
    lines = "".join(json.dumps({"text": text, "meta": {"redpajama_set_name": "Wiki"}}) + "\n" for text in texts)
    return zstandard.ZstdCompressor().compress(lines.encode())


def jsonl(texts: Sequence[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def card(metadata: str) -> bytes:
    return f"---\n{metadata.strip()}\n---\n\n# A data set\n".encode()


OPENWEBTEXT_PARQUET = {
    "README.md": card(OPENWEBTEXT_CARD),
    **{f"plain_text/train-0000{n}-of-00002.parquet": parquet(texts_of(f"web-{n}")) for n in range(2)},
}
"""The same data set without its loading script."""


def add_named(hub: Hub) -> None:
    """The five data sets that have names of their own."""
    hub.add(
        "HuggingFaceFW/fineweb-edu",
        {
            "README.md": card(FINEWEB_CARD),
            "sample/10BT/000_00000.parquet": parquet(texts_of("10BT-0", 60), id=[str(n) for n in range(60)]),
            "sample/10BT/001_00000.parquet": parquet(texts_of("10BT-1"), id=[str(n) for n in range(30)]),
            "data/CC-MAIN-2013-20/train-00000-of-00001.parquet": parquet(texts_of("2013-20")),
            "data/CC-MAIN-2024-10/000_00000.parquet": parquet(texts_of("2024-10")),
        },
    )
    splits = [f"wikitext-103-raw-v1/{split}" for split in ("test", "train", "validation")] + ["wikitext-2-raw-v1/train"]
    wikitext = {f"{split}-00000-of-00001.parquet": parquet(texts_of(split)) for split in splits}
    hub.add("Salesforce/wikitext", {"README.md": card(WIKITEXT_CARD), **wikitext})
    hub.add(
        "roneneldan/TinyStories",
        {
            "README.md": card(TINYSTORIES_CARD),
            "data/train-00000-of-00002-2d5a1467fff1081b.parquet": parquet(texts_of("story-0", 80)),
            "data/train-00001-of-00002-5852b56a2bd28fd9.parquet": parquet(texts_of("story-1")),
            "data/validation-00000-of-00001-869c898b519ad725.parquet": parquet(texts_of("story-v", 5)),
            "TinyStories-train.txt": b"Once upon a time\n",
            "TinyStoriesV2-GPT4-train.txt": b"Once upon a time\n",
            "TinyStories-valid.txt": b"Once upon a time\n",
        },
    )
    script = {
        "README.md": b"# no metadata",
        "openwebtext.py": b"import datasets",
        "subsets/urlsf_subset00.tar": b"x" * 99,
    }
    openwebtext = hub.add("Skylion007/openwebtext", script)
    converted = {f"plain_text/train/000{n}.parquet": parquet(texts_of(f"web-{n}")) for n in range(2)}
    openwebtext.commit(converted, "refs/convert/parquet")
    pajama = {
        f"{split}/chunk{chunk}/example_{split}_{n}.jsonl.zst": jsonl_zst(texts_of(f"{split}-{chunk}-{n}"))
        for split, chunks in (("train", 2), ("validation", 1), ("test", 1))
        for chunk in range(1, chunks + 1)
        for n in range(2)
    }
    hub.add("cerebras/SlimPajama-627B", {"README.md": b"# SlimPajama", **pajama})
