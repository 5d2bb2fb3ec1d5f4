"""OLMo-core: rows of NumpyFSLDataset with their label mask, and documents from the table beside the array.

If documents end with EOS, NumpyPaddedFSLDataset, which ignores the table, must find the same ones.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from olmo_core.data.numpy_dataset import NumpyFSLDataset, NumpyPaddedFSLDataset
from olmo_core.data.utils import iter_document_indices, load_array_slice

SEQ_LEN, LONGEST = 64, 5001

for case in json.loads(Path(sys.argv[1]).read_bytes()):
    dtype = {2: np.uint16, 4: np.uint32}[case["token_size"]]
    first = 0
    for path in case["paths"]:
        found = list(iter_document_indices(path, use_array_if_local=False, dtype=dtype))
        # Documents without a token have no line there.
        documents = [ids for ids in case["documents"] if ids][first : first + len(found)]
        assert [load_array_slice(path, start, end, dtype).tolist() for start, end in found] == documents, path
        stream = [token for ids in documents for token in ids]
        settings = {
            "pad_token_id": 0,
            "eos_token_id": case["eos_id"],
            "vocab_size": 1 << 20,
            "dtype": dtype,
            "label_mask_paths": [path.replace(".npy", "_labels_mask.npy")] if case["mask"] else None,
        }
        rows = NumpyFSLDataset(path, sequence_length=SEQ_LEN, **settings)
        rows.work_dir = tempfile.mkdtemp()
        rows.prepare()
        assert len(rows) == len(stream) // SEQ_LEN
        for number in range(len(rows)):
            some = slice(number * SEQ_LEN, (number + 1) * SEQ_LEN)
            assert rows[number]["input_ids"].tolist() == stream[some], (path, number)
            if case["mask"]:
                assert rows[number]["label_mask"].tolist() == [bool(value) for value in case["mask"][some]]
        if case["has_eos"]:
            padded = NumpyPaddedFSLDataset(path, sequence_length=LONGEST, **settings)
            padded.work_dir = tempfile.mkdtemp()
            padded.prepare()
            assert len(padded) == len(documents), (path, len(padded), len(documents))
            seen = 0
            for number, ids in enumerate(documents):
                row = padded[number]
                padding = LONGEST - len(ids)
                mask = case["mask"][seen : seen + len(ids)] if case["mask"] else [1] * len(ids)
                assert row["input_ids"].tolist() == ids + [0] * padding, (path, number)
                assert row["label_mask"].tolist() == [bool(value) for value in mask] + [False] * padding
                seen += len(ids)
        first += len(found)
    assert first == sum(1 for ids in case["documents"] if ids)
    print(f"olmo       {case['name']:<24} {first} documents of {len(case['paths'])} arrays equal")
