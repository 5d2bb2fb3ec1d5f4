"""mosaicml-streaming's StreamingDataset, which refuses unsafe types unless told otherwise."""

import json
import sys
import tempfile
from pathlib import Path

from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory

for case in json.loads(Path(sys.argv[1]).read_bytes()):
    clean_stale_shared_memory()
    # From a remote folder to a local one, as it is used; then in place.
    for places in ({"local": case["folder"]}, {"remote": case["folder"], "local": tempfile.mkdtemp()}):
        data = StreamingDataset(**places, shuffle=False, batch_size=1)
        assert len(data) == len(case["rows"]), (len(data), len(case["rows"]))
        for number, row in enumerate(case["rows"]):
            assert data[number]["tokens"].tolist() == row, number
        assert [sample["tokens"].tolist() for sample in data] == case["rows"]
        clean_stale_shared_memory()
    print(f"mds        {case['name']:<24} {len(data)} rows equal, {data[0]['tokens'].dtype}")
