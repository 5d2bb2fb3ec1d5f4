"""Megatron's IndexedDataset: every document, its length, and the document index."""

import json
import sys
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset

for case in json.loads(Path(sys.argv[1]).read_bytes()):
    first = 0
    for prefix in case["prefixes"]:
        for mmap in (True, False):
            data = IndexedDataset(prefix, mmap=mmap)
            expected = case["documents"][first : first + len(data)]
            for number, ids in enumerate(expected):
                assert data[number].tolist() == ids, (prefix, number)
            assert data.document_indices.tolist() == list(range(len(expected) + 1))
            assert data.sequence_lengths.tolist() == [len(ids) for ids in expected]
        first += len(data)
    assert first == len(case["documents"]), (first, len(case["documents"]))
    print(f"megatron   {case['name']:<24} {first} documents equal, {data.index.dtype.__name__}")
