"""Files written by other projects' own code, read by `tokenmill.open`: tokens and documents must be equal.

    python tests/interop/other_writers.py [NAME...]

Builds `.interop/NAME` from PyPI if it is missing, lets the project write files and read their documents with its own
reader, and opens them here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.interop.environments import environment

START = """
import json, sys, numpy as np
from pathlib import Path
folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
lengths = [3, 1, 40, 2, 7, 1, 300, 5] * 4
narrow = [rng.integers(0, 65_000, n).tolist() for n in lengths]
wide = [rng.integers(0, 4_000_000, n).tolist() for n in lengths]
found = []  # (path, options of tokenmill.open, documents, masks or None)
"""

WRITERS = {
    "datatrove": """
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
from datatrove.pipeline.tokens.merger import load_doc_ends
from datatrove.utils.dataset import DatatroveFileDataset
from tokenizers import Tokenizer, models, pre_tokenizers

def make_tokenizer(size):
    vocab = {f"w{n}": n for n in range(size)} | {"[UNK]": size, "</s>": size + 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    path = folder / f"tokenizer-{size}.json"
    tokenizer.save(str(path))
    return str(path)

def documents(count, number):
    for n in range(count):
        words = [f"w{w}" for w in rng.integers(0, 1000, rng.integers(2, 60))]
        half = len(" ".join(words[: len(words) // 2])) + 1  # where a word starts
        yield Document(" ".join(words), str(n), metadata={"no_loss_ranges": [(0, half)]} if number else {})

def files(place, width, loss):
    for path in sorted(place.glob("*.ds")):
        ends = load_doc_ends(open(f"{path}.index", "rb")).tolist()
        tokens = np.fromfile(path, "<u2" if width == 2 else "<u4").tolist()
        mask = np.fromfile(f"{path}.loss", "?").astype(int).tolist() if loss else None
        spans = list(zip([0, *ends[:-1]], ends))
        rows = DatatroveFileDataset(str(path), 30, token_size=width, return_positions=True)
        for row in range(len(rows)):  # their own idea of where documents start
            positions = rows[row]["positions"].tolist()
            begins = {p for p in range(1, 31) if positions[p] == 0}
            assert begins == {e - row * 31 for e in ends if 0 < e - row * 31 <= 30}, (row, begins)
        found.append((str(path), {}, [tokens[a:b] for a, b in spans], mask and [mask[a:b] for a, b in spans]))

for width, size in ((2, 1000), (4, 70_000)):
    for loss in (False, True):
        place = folder / f"{width}-{loss}"
        for rank in range(2):
            step = DocumentTokenizer(
                str(place), make_tokenizer(size), eos_token="</s>", save_loss_metadata=loss, seed=1,
                max_tokens_per_file=900, local_working_dir=str(folder / "tmp"))
            step.run(documents(60, loss), rank=rank, world_size=2)
        files(place, width, loss)
        found.append((str(place), {}, sum([d for p, _, d, _ in found if Path(p).parent == place], []), None))
        merged = folder / f"merged-{width}-{loss}"
        DocumentTokenizerMerger(
            str(place), str(merged), "all", save_loss_metadata=loss, seed=2, max_tokens_per_file=1500).run(None, 0, 1)
        files(merged, width, loss)
        assert loss is False or any(0 in mask for *_, masks in found if masks for mask in masks)
""",
    "olmo": """
from olmo_core.data.utils import get_document_indices, load_array_slice, write_document_indices
EOS = 7
for name, kind, documents in (("narrow", np.uint16, narrow), ("wide", np.uint32, wide)):
    documents = [[t for t in some if t != EOS] + [EOS] for some in documents]
    path = folder / f"{name}.npy"
    flat = sum(documents, [])
    tokens = np.memmap(path, mode="w+", dtype=kind, shape=(len(flat),))
    tokens[:] = flat
    tokens.flush()
    write_document_indices(path, dtype=kind, eos_token_id=EOS)
    spans = get_document_indices(str(path))
    read = [load_array_slice(str(path), a, b, kind).tolist() for a, b in spans]
    assert read == documents
    found.append((str(path), {}, read, None))
    found.append((str(path), {"dtype": kind.__name__}, read, None))
""",
    "dolma": """
from dolma.tokenizer.data_types import TokenizerOutput
from dolma.tokenizer.memmap_writer import MemmapWriter
for name, kind, documents in (("narrow", "uint16", narrow), ("wide", "uint32", wide)):
    left = [TokenizerOutput.from_tokens(tokens=d, id=f"a,b {n}", src="s.gz", loc=n) for n, d in enumerate(documents)]
    part = done = 0
    while left:
        with MemmapWriter(str(folder / f"{name}-{part:05d}"), np.dtype(kind), max_tokens=500) as writer:
            left = writer.write_many(left, flush=True)
        some = documents[done : len(documents) - len(left)]
        found.append((writer.memmap_path, {}, some, None))
        part, done = part + 1, done + len(some)
    assert part > 1
""",
    "megatron": """
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
import torch
for name, kind, documents in (("u2", np.uint16, narrow), ("i4", np.int32, wide), ("i8", np.int64, wide)):
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=kind)
    for number, document in enumerate(documents):
        half = len(document) // 2 if number % 3 == 0 else 0
        for part in ([document[:half], document[half:]] if half else [document]):
            builder.add_item(torch.tensor(part))
        builder.end_document()
    builder.finalize(str(folder / f"{name}.idx"))
    data = IndexedDataset(str(folder / name))
    edges = data.document_indices.tolist()
    read = [sum((data[n].tolist() for n in range(a, b)), []) for a, b in zip(edges, edges[1:])]
    assert read == documents
    found.append((str(folder / f"{name}.bin"), {}, read, None))
""",
}

FINISH = """
json.dump(found, open(folder / "found.json", "w"))
"""


def check(name: str, folder: Path) -> int:
    """Let a project write files, open them here, and return how many files and folders were equal."""
    import tokenmill

    program = START + WRITERS[name] + FINISH
    command = [str(environment(name)), "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} could not write its files:\n{done.stderr[-3000:]}")
    found = json.loads((folder / "found.json").read_text())
    for path, options, documents, masks in found:
        store = tokenmill.open(path, **options)
        read = [store.document(number).tolist() for number in range(store.num_documents)]
        assert read == documents, f"{name}: {path} has other documents"
        mask = store.split().mask
        if masks is not None:
            assert mask is not None
            assert [mask.document(number).tolist() for number in range(len(masks))] == masks, f"{name}: {path}.loss"
    print(f"{name}: {len(found)} files and folders equal, {sum(len(some[2]) for some in found)} documents")
    return len(found)


def main() -> None:
    names = sys.argv[1:] or list(WRITERS)
    total = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            total += check(name, Path(folder))
    print(f"{total} passed, 0 failed")


if __name__ == "__main__":
    main()
