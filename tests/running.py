"""What the end-to-end tests share: runs as a user starts them, and stores read back without tokenmill's readers."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tokenmill.executors.base import Death, Event, Message
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.progress import Silence
from tokenmill.store.store import TokenStore

TIMEOUT_SECONDS = 90


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "tokenmill", *map(str, arguments)]


def tokenmill(
    *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, never for longer than the timeout."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        **options,
    )


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start a run in a process group of its own; the caller ends it."""
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        **options,
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The error that a failed command printed: its last line, and the only one that begins like that."""
    assert done.returncode not in (0, None), done
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.endswith(lines[0] + "\n"), done.stderr
    return lines[0].removeprefix("error: ")


def snapshot(store: Path) -> dict[str, bytes]:
    """Every file of a store but the account of how the run went."""
    files = (path for path in sorted(store.rglob("*")) if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def ids_of(store: TokenStore, split: str = "train") -> list[list[int]]:
    """The ids of every document, read with numpy from what the manifest lists."""
    documents: list[list[int]] = []
    for shard in store.manifest.splits[split].shards:
        data = np.fromfile(f"{store.path / shard.name}.bin", store.manifest.dtype)
        index = Path(f"{store.path / shard.name}.idx").read_bytes()
        lengths = np.frombuffer(index, "<i4", shard.num_documents, 34)
        documents += [part.tolist() for part in np.split(data, np.cumsum(lengths)[:-1])]
    return documents


def texts_of(store: TokenStore, split: str = "train") -> list[str]:
    """The texts of a store that was made with the tokenizer `bytes`, EOS taken off."""
    return [bytes(token for token in ids if token < 256).decode() for ids in ids_of(store, split)]


def sources_of(store: TokenStore, split: str = "train") -> pa.Table:
    """The tables of documents of all shards, one below the other."""
    shards = store.manifest.splits[split].shards
    return pa.concat_tables([pq.read_table(f"{store.path / shard.name}.docs.parquet") for shard in shards])


def rejects_of(store: Path) -> list[dict[str, Any]]:
    path = store / "rejects.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def jsonl(texts: Iterable[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def compress(data: bytes, kind: str) -> bytes:
    """As one gzip member or one zstd frame; `none` as it is."""
    return {"none": lambda: data, "gz": lambda: gzip.compress(data, 1), "zst": lambda: zstd(data)}[kind]()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def write_parquet(path: Path, texts: Sequence[str | None], *, rows_per_group: int = 50, **columns: Any) -> Path:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **columns}), path, row_group_size=rows_per_group)
    return path


def write_damaged_parquet(path: Path, texts: Sequence[str], *, damaged_group: int, rows_per_group: int) -> Path:
    """A file with small pages, one of which, in the middle of a row group, is overwritten."""
    pq.write_table(
        pa.table({"text": texts}), path, row_group_size=rows_per_group, data_page_size=4096, write_batch_size=4,
        use_dictionary=False, compression="zstd", write_page_checksum=True, write_statistics=False,
    )  # fmt: skip
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(damaged_group).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 20] = bytes(20)
    path.write_bytes(content)
    return path


def wait_for(condition: Any, seconds: float = 30.0) -> Any:
    """What `condition()` gives as soon as it is true."""
    import time

    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


class ThreadWorker:
    """A worker in a thread of this process."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.pid = os.getpid()
        self.connection = connection

    def send(self, data: bytes) -> None:
        with suppress(OSError):
            self.connection.send_bytes(data)

    def kill(self) -> None:
        self.connection.close()


class ThreadExecutor:
    """Workers that are threads: the same code and messages, without the half second that processes take to start."""

    def __init__(self) -> None:
        self._workers: list[ThreadWorker] = []

    def warm(self, target: str, payload: bytes) -> None:
        pass

    def launch(self, name: str, target: str, payload: bytes) -> ThreadWorker:
        module, _, function = target.partition(":")
        ours, theirs = Pipe()
        serve = getattr(importlib.import_module(module), function)

        def live() -> None:
            with theirs, suppress(EOFError, OSError):
                serve(theirs, payload)

        threading.Thread(target=live, daemon=True).start()
        self._workers.append(ThreadWorker(name, ours))
        return self._workers[-1]

    def wait(self, timeout: float) -> list[Event]:
        by_connection = {worker.connection: worker for worker in self._workers if not worker.connection.closed}
        self._workers = list(by_connection.values())
        events: list[Event] = []
        for ready in wait(list(by_connection), timeout):
            worker = by_connection[ready]  # type: ignore[index]
            try:
                events.append(Message(worker, worker.connection.recv_bytes()))
            except (EOFError, OSError):
                events.append(Death(worker, "ended"))
                worker.connection.close()
        return events

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        self._workers = []


def tokenize_here(inputs: str | Path | list[str], out: Path, **flags: Any) -> TokenStore:
    """As `tokenmill.tokenize`, without starting processes; for tests of what a run writes, not of how it runs."""
    names = [str(inputs)] if isinstance(inputs, (str, Path)) else inputs
    request = Request.from_flags({"inputs": names, "out": str(out), **flags})
    run(request, Silence(), ThreadExecutor())  # type: ignore[arg-type]
    return TokenStore(out)
