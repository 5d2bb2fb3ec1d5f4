"""Parquet files that expand: rows that share a text, values that repeat the one before, pages that do not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.running import sentence, tokenmill
from tokenmill.readers import _arrow_memory
from tokenmill.readers._arrow_memory import AllocationLimit, expanded_bytes, halve
from tokenmill.readers.base import ExceedsMemory, ReadOptions
from tokenmill.readers.parquet import ParquetReader

needs_limit = pytest.mark.skipif(not _arrow_memory.STATUS.exists(), reason="only Linux counts the memory of a process")
TEXT = "many words of one text " * 40_000
CHILD = """
import sys
from pathlib import Path
from tokenmill.readers.base import ReadOptions
from tokenmill.readers.parquet import ParquetReader
reader, num_rows, num_bytes = ParquetReader(ReadOptions(memory_bytes=200 << 20, packed=True)), 0, 0
for batch in reader.read_range(Path(sys.argv[1]), 0, 300):
    num_rows, num_bytes = num_rows + len(batch.texts), num_bytes + sum(map(len, batch.texts))
peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(num_rows, num_bytes, int(peak) >> 10)
"""


def write(path: Path, texts: Any, **options: Any) -> Path:
    settings = {"compression": "zstd", "write_statistics": False, "store_schema": False, **options}
    pq.write_table(pa.table({"text": texts}), path, **settings)
    return path


def shared(count: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [TEXT])


@needs_limit
@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (lambda: shared(5000), {}),
        (lambda: shared(5000), {"store_schema": True}),
        (lambda: [TEXT] * 500, {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}),
    ],
    ids=["dictionary", "dictionary kept by Arrow", "prefixes"],
)
def test_rows_that_share_a_text_are_all_read_within_the_memory(
    tmp_path: Path, texts: Any, options: dict[str, Any]
) -> None:
    path = write(tmp_path / "in.parquet", texts(), **options)
    assert path.stat().st_size < 10_000
    done = subprocess.run([sys.executable, "-c", CHILD, path], capture_output=True, text=True, check=True)
    num_rows, num_bytes, peak = map(int, done.stdout.split())
    assert (num_rows, num_bytes) == (300, 300 * len(TEXT))
    assert peak < 450, f"{peak} MiB"


@needs_limit
def test_a_page_that_does_not_fit_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", ["a" * 150_000_000], use_dictionary=False)
    with pytest.raises(ExceedsMemory, match=r"the pages of row 1 do not fit the memory of a worker; raise --memory"):
        list(ParquetReader(ReadOptions(memory_bytes=150 << 20)).read_range(path, 0, None))
    assert len(list(ParquetReader(ReadOptions()).read_range(path, 0, None))) == 1
    arguments = ("--tokenizer", "bytes", "--memory", "500MB", "--on-error", "skip")
    done = tokenmill("tokenize", path, "-o", tmp_path / "store", *arguments)
    assert "the pages of row 1 do not fit the memory of a worker" in sentence(done)


def test_batches_after_one_that_did_not_fit_are_smaller_and_the_documents_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text {number}" for number in range(1000)]
    path, asked = write(tmp_path / "in.parquet", texts), []
    real = pq.ParquetFile.iter_batches

    def iter_batches(self: Any, batch_size: int, **options: Any) -> Any:
        asked.append(batch_size)
        for number, batch in enumerate(real(self, batch_size, **options)):
            if batch_size > 1 and number == 2:
                raise pa.ArrowMemoryError("malloc of size 5 failed")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    monkeypatch.setattr("tokenmill.readers.parquet.MOST_BATCH_ROWS", 100)
    batches = list(ParquetReader(ReadOptions()).read_range(path, 0, None))
    assert [text for batch in batches for text in batch.texts] == texts
    assert [place for batch in batches for place in batch.positions.tolist()] == list(range(1000))
    assert asked == [100, 64, 1]


@needs_limit
def test_a_limit_ends_with_its_block_also_when_threads_share_it() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = AllocationLimit(1 << 40)
    with limit():
        during = resource.getrlimit(resource.RLIMIT_DATA)
        with limit():
            assert resource.getrlimit(resource.RLIMIT_DATA) == during
        assert resource.getrlimit(resource.RLIMIT_DATA) == during != before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(MemoryError), AllocationLimit(64 << 20)():
        bytearray(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_large_batch_is_cut_in_half_until_its_parts_are_small() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(["a" * 1_000_000] * 11)], names=["text"])
    parts = list(halve(rows))
    assert sum(map(len, parts)) == 11
    assert max(part.nbytes for part in parts) <= _arrow_memory.MOST_BATCH_BYTES
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([rows]))


def conversations(lengths: list[int]) -> Any:
    """Conversations of so many messages, all of which refer to one text."""
    count = sum(lengths)
    content = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [TEXT])
    messages = pa.StructArray.from_arrays([pa.array(["user"] * count), content], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array([0, *np.cumsum(lengths)], pa.int32()), messages)


def test_a_conversation_whose_messages_share_a_text_counts_all_of_them(tmp_path: Path) -> None:
    made = conversations([2, 400, 3])
    assert expanded_bytes(made) > 405 * len(TEXT)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"messages": made}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    options = ReadOptions(record_keys=("messages",), max_document_bytes=100 << 20)
    batches = list(ParquetReader(options).read_range(path, 0, None))
    assert [len(record[0]) for batch in batches for record in batch.records or ()] == [2, 3]
    (reject,) = [reject for batch in batches for reject in batch.rejects]
    assert (reject.position, reject.reason) == (1, "too-long")
    options = ReadOptions(record_keys=("messages",), max_document_bytes=1 << 30, memory_bytes=100 << 20)
    with pytest.raises(ExceedsMemory, match=r"the document at row 2 has 36[0-9,]* bytes, more than the memory"):
        list(ParquetReader(options).read_range(path, 0, None))
