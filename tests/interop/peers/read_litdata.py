"""litdata's StreamingDataset with a TokensLoader, by number and in order, and through its data loader."""

import json
import sys
from pathlib import Path

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.item_loader import TokensLoader

if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_bytes()):
        data = StreamingDataset(
            case["folder"], item_loader=TokensLoader(block_size=case["seq_len"]), shuffle=False, drop_last=False
        )
        assert len(data) == len(case["rows"]), (len(data), len(case["rows"]))
        assert [data[number].tolist() for number in range(len(data))] == case["rows"]
        assert [row.tolist() for row in data] == case["rows"]
        batches = StreamingDataLoader(data, batch_size=4)
        assert [row for batch in batches for row in batch.tolist()] == case["rows"]
        print(f"litdata    {case['name']:<24} {len(data)} rows equal, {data[0].dtype}")
