"""Shards read by other projects' own readers, each in an environment of its own.

    make test-interop

Builds `.interop/NAME` from PyPI when it is not there, makes small stores, and lets the other project
read them as they are: tokens and document boundaries must be equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".interop"

MEGATRON = """
import json, sys
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
for prefix, expected in json.load(open(sys.argv[1])):
    for mmap in (True, False):
        data = IndexedDataset(prefix, mmap=mmap)
        assert len(data) == len(expected), (len(data), len(expected))
        for number, ids in enumerate(expected):
            assert data[number].tolist() == ids, (prefix, number)
        assert data.document_indices.tolist() == list(range(len(expected) + 1))
        assert data.sequence_lengths.tolist() == [len(ids) for ids in expected]
    print(prefix.split("/")[-1], data.index.dtype.__name__, len(data), "documents equal")
"""

PEERS = {"megatron": ["torch==2.13.0", "numpy", "megatron-core>=0.12"]}


def environment(name: str) -> Path:
    python = HOME / name / "bin" / "python"
    if not (HOME / name / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS[name]], check=True)
        (HOME / name / "ready").touch()
    return python


def make_stores(folder: Path) -> list[tuple[str, list[list[int]]]]:
    """One store of uint16 and one of int32, with an empty document, and what each shard holds."""
    import tokenmill

    texts = ["one document", "", "größer 日本", "x" * 5000, "the last"]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 50))
    wide = folder / "wide"
    make_wide_tokenizer(wide)
    shards = []
    for name, tokenizer in (("narrow", "bytes"), ("wide", str(wide))):
        store = tokenmill.tokenize(str(source), folder / f"store-{name}", tokenizer=tokenizer, task_bytes=100_000)
        first = 0
        for shard in store.manifest.splits["train"].shards:
            numbers = range(first, first + shard.num_documents)
            shards.append((str(store.path / shard.name), [store.document(number).tolist() for number in numbers]))
            first += shard.num_documents
    return shards


def make_wide_tokenizer(folder: Path) -> None:
    """A vocabulary above 65,536, so that ids are int32."""
    vocab = {f"w{number}": number for number in range(70_000)}
    vocab |= {"[UNK]": 70_000, "</s>": 70_001}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    config = {
        "version": "1.0",
        "added_tokens": [{"id": 70_001, "content": "</s>", **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shards = make_stores(Path(folder))
        expected = Path(folder) / "expected.json"
        expected.write_text(json.dumps(shards))
        python = environment("megatron")
        done = subprocess.run([str(python), "-c", MEGATRON, str(expected)], capture_output=True, text=True)
        print(done.stdout, end="")
        if done.returncode:
            sys.exit(f"megatron could not read the shards:\n{done.stderr[-3000:]}")
    print(f"{len(shards)} passed, 0 failed")


if __name__ == "__main__":
    main()
