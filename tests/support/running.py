"""What the end-to-end tests share: runs as a user starts them, and stores read back without tokenmill's readers."""

from __future__ import annotations

import gzip
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.support.program import Program
from tests.support.warm_python import ONE_THREAD, shared_warm_python
from tokenmill.display import Silence
from tokenmill.executors.base import Answer, Call, CallEvent, Capacity, Note, Place, Started, resolve
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.pipeline.task.gate_sample import GateSample
from tokenmill.pipeline.workers.messages import decode_answer, encode
from tokenmill.store.store import TokenStore

TIMEOUT_SECONDS = 90


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "tokenmill", *map(str, arguments)]


def tokenmill(
    *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, never for longer than the timeout."""
    # A warm program is a fork of another process, so limits that a test sets would not reach it.
    python = sys.executable if "preexec_fn" in options else str(shared_warm_python().folder / "python")
    return subprocess.run(
        [python, "-m", "tokenmill", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, **ONE_THREAD, "COLUMNS": "200", **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        **options,
    )


def start(*arguments: str | Path, **options: Any) -> Program[str]:
    """Start a run in a process group of its own; the caller ends it."""
    return Program(
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
    """Every file of a store except run.json."""
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
    """Wait until `condition()` is true, and return its value."""
    import time

    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


class ThreadExecutor:
    """Calls in threads: the same code and messages, without the half second that processes take to start."""

    shares_disk = True
    memory_per_call: int | None = None
    may_grow = False

    def __init__(self) -> None:
        self._events: queue.Queue[CallEvent] = queue.Queue()
        self._idle: list[queue.Queue[Call | None]] = []
        self._closing = threading.Lock()
        self._num_threads = 0
        self._num_running = 0

    def join(self, num_calls: int | None) -> None:
        pass

    def pin(self, cpus: Sequence[int]) -> None:
        pass

    def warm(self, target: str, payload: bytes) -> None:
        pass

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        return Capacity(2, 1 << 30)

    def submit(self, call: Call) -> None:
        calls = self._idle.pop() if self._idle and not call.is_last else self._start_thread()
        self._events.put(Started(call, Place("", os.getpid(), f"worker {self._num_threads}")))
        with self._closing:
            self._num_running += 1
        calls.put(call)

    def _start_thread(self) -> queue.Queue[Call | None]:
        calls: queue.Queue[Call | None] = queue.Queue()
        self._num_threads += 1
        threading.Thread(target=self._work, args=(calls, self._events), daemon=True).start()
        return calls

    def _work(self, calls: queue.Queue[Call | None], events: queue.Queue[CallEvent]) -> None:
        while (call := calls.get()) is not None:

            def post(data: bytes, call: Call = call) -> None:
                if self._events is not events:
                    raise BrokenPipeError("the run is gone")
                events.put(Note(call, data))

            try:
                answer = resolve(call.target)(post, call.context, call.payload)
            except BrokenPipeError:
                return
            finally:
                with self._closing:
                    self._num_running -= 1
            with self._closing:
                if self._events is not events:
                    return
                if not call.is_last:
                    self._idle.append(calls)
                events.put(Answer(call, answer))
            if call.is_last:
                return

    def wait(self, timeout: float) -> list[CallEvent]:
        events = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        return events

    def close(self) -> None:
        with self._closing:
            for calls in self._idle:
                calls.put(None)
            self._events, self._idle = queue.Queue(), []
        # A process would be killed; a thread ends with its call, unless that waits for another call.
        with suppress(AssertionError):
            wait_for(lambda: not self._num_running, 1.0)


class Contradicting:
    """Mixed into an executor: its engine gives one document of the parity gate another id at the end."""

    def wait(self, timeout: float) -> list[CallEvent]:
        return [self._contradict(event) for event in super().wait(timeout)]  # type: ignore[misc]

    def _contradict(self, event: CallEvent) -> CallEvent:
        message = decode_answer(event.data) if isinstance(event, Answer) else None
        if not isinstance(event, Answer) or not isinstance(message, GateSample) or not message.texts:
            return event
        first, *rest = message.texts
        wrong = msgspec.structs.replace(first, ids=first.ids + bytes(4))
        return Answer(event.call, encode(msgspec.structs.replace(message, texts=[wrong, *rest])))


def tokenize_here(inputs: str | Path | list[str], out: Path, **flags: Any) -> TokenStore:
    """As `tokenmill.tokenize`, without starting processes; for tests of the output of a run, not of its execution."""
    names = [str(inputs)] if isinstance(inputs, (str, Path)) else inputs
    request = Request.from_flags({"inputs": names, "out": str(out), **flags})
    run(request, Silence(), ThreadExecutor())
    return TokenStore(out)
