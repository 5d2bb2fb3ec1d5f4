"""datatrove's DatatroveFolderDataset: every window and its positions, which come from the index; and its check of sizes."""

import io
import itertools
import json
import sys
from pathlib import Path

import numpy as np
from datatrove.tools.check_dataset import load_dataset_bytes, load_doc_ends
from datatrove.utils.dataset import DatatroveFolderDataset

SEQ_LEN = 50


def opened(path):
    return io.BytesIO(Path(path).read_bytes())


def positions_of(start, edges):
    """0 at the start of the window and of every document in it."""
    count = lambda position, place: 0 if start + place in edges else position + 1  # noqa: E731
    return list(itertools.accumulate(range(1, SEQ_LEN + 1), count, initial=0))


for case in json.loads(Path(sys.argv[1]).read_bytes()):
    size = case["token_size"]
    data = DatatroveFolderDataset(case["folder"], SEQ_LEN, token_size=size, return_positions=case["has_positions"])
    first, seen = 0, 0
    for file in data.files:
        path = Path(case["folder"]) / file.file_path
        ends = load_doc_ends(opened(f"{path}.index"))
        documents = case["documents"][first : first + len(ends)]
        stream = [token for ids in documents for token in ids]
        read = [np.frombuffer(ids, f"<u{size}").tolist() for ids in load_dataset_bytes(opened(path), ends, size)]
        assert read == documents, path
        assert len(file) == len(stream) // (SEQ_LEN + 1)
        for number in range(len(file)):
            start = number * (SEQ_LEN + 1)
            item = file[number]
            assert item["input_ids"].tolist() == stream[start : start + SEQ_LEN + 1], (path, number)
            if case["has_positions"]:
                assert item["positions"].tolist() == positions_of(start, set(ends)), (path, number)
        name, written_size, count = "|".join(Path(f"{path}.metadata").read_text().split("\n")[:2]).split("|")
        assert (name, int(written_size), int(count)) == (case["tokenizer"], size, len(stream))
        assert Path(f"{path}.loss").exists() == (case["mask"] is not None)
        if case["mask"] is not None:
            loss = b"".join(load_dataset_bytes(opened(f"{path}.loss"), ends, 1))
            assert list(loss) == case["mask"][seen : seen + len(stream)]
        first, seen = first + len(ends), seen + len(stream)
    assert first == len(case["documents"]), (first, len(case["documents"]))
    print(f"datatrove  {case['name']:<24} {first} documents, {len(data)} windows of {len(data.files)} files equal")
