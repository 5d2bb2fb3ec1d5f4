"""What a worker process does: run tasks, feed a stream, or hold the parity gate.

It is started by an executor as `serve(channel, payload)`, obeys messages one at a time, and
turns every error into a message, so that a run ends with a sentence and never with a hang.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from tokenmill.engines import Engine, Tokenizer, create, open_tokenizer
from tokenmill.executors.base import Channel
from tokenmill.pipeline.gate import hold_gate
from tokenmill.pipeline.journal import Lock
from tokenmill.pipeline.messages import (
    Cut,
    Done,
    Failed,
    FeedStream,
    Held,
    MayPublish,
    NeedSlot,
    Progress,
    RunGate,
    RunTask,
    Slot,
    StreamEnded,
    decode_to_worker,
    encode,
)
from tokenmill.pipeline.plan import Span, Stream, Task
from tokenmill.pipeline.reading import TextStream
from tokenmill.pipeline.stages import Stages
from tokenmill.pipeline.task import Job, TaskOutput, TaskRunner
from tokenmill.readers import reader_for
from tokenmill.readers.cutting import cut_stream
from tokenmill.readers.parquet import ParquetReader

__all__ = ["WarmJob", "preload", "preload_writing", "serve", "warm"]

REPORT_SECONDS = 0.25
SMALLEST_CACHE = 100_000_000

_warm_engines: dict[str, Engine] = {}


def preload(_payload: bytes) -> None:
    """Import what the gate and every worker use, while the run is still being planned."""
    from tokenmill.engines.gigatoken import return_plain_arrays

    return_plain_arrays()


def preload_writing(_payload: bytes) -> None:
    """Import what only workers use, while the gate is held."""
    import pyarrow.parquet  # noqa: F401


def warm(payload: bytes) -> None:
    """Load the engine in the nursery; workers forked from it share the memory."""
    job = msgspec.json.decode(payload, type=WarmJob)
    try:
        _warm_engines[job.key] = create(job.engine, _tokenizer(job.store), job.special_tokens)  # type: ignore[arg-type]
    except Exception:
        # The same error comes again in a worker, which can report it.
        return


class WarmJob(msgspec.Struct, frozen=True):
    """Which engine workers will need."""

    store: str
    engine: str
    special_tokens: str
    sha256: str

    @property
    def key(self) -> str:
        """Engines with the same key give the same ids."""
        return f"{self.engine} {self.special_tokens} {self.sha256}"


def serve(channel: Channel, payload: bytes) -> None:
    """Obey messages until the channel closes."""
    job = msgspec.msgpack.decode(payload, type=Job)
    # Kept in a name: the lock goes when nothing refers to it any more.
    lock = Lock(Path(job.store))
    lock.join()
    # Records of JSON are many objects and no cycles; looking for these takes a third of reading them.
    gc.set_threshold(1_000_000)
    worker = _Worker(job, channel)
    while True:
        try:
            worker.obey(channel.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            if not isinstance(error, (OSError,)) and type(error).__module__ == "builtins":
                import traceback

                traceback.print_exc()
            channel.send_bytes(encode(Failed.from_error(error, job.store)))


class _Worker:
    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._engine: Engine | None = None
        self._held: TaskOutput | None = None
        self._runner: TaskRunner | None = None
        self._profiler = cProfile.Profile()
        self._process = psutil.Process()
        self._memory_limit = job.worker_bytes
        self._pending = Stages()
        self._num_recycled = 0
        self._reported = time.monotonic()

    def obey(self, data: bytes) -> None:
        message = decode_to_worker(data)
        if isinstance(message, RunTask):
            self._run_task(message)
        elif isinstance(message, MayPublish):
            # A task that failed while the gate was held has left nothing to publish.
            if self._held is not None:
                self._publish(self._held)
        elif isinstance(message, FeedStream):
            self._feed(message.stream, set(message.done))
        elif isinstance(message, RunGate):
            self._channel.send_bytes(encode(hold_gate(self._job, self._load_engine())))

    def _run_task(self, message: RunTask) -> None:
        if self._runner is None:
            self._runner = TaskRunner(self._job, self._load_engine(), self._report, self._relieve)
        with self._profiled():
            output = self._runner.run(message.task, run=f"{os.getpid():x}")
        self._flush()
        if message.hold:
            self._held = output
            self._channel.send_bytes(encode(Held()))
        else:
            self._publish(output)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Profile tasks, if that was asked for; the file is written anew after each, since a run may be killed."""
        if self._job.profile is None:
            yield
            return
        self._profiler.enable()
        try:
            yield
        finally:
            self._profiler.disable()
            write_profile(self._profiler, Path(self._job.profile))

    def _publish(self, output: TaskOutput) -> None:
        self._held = None
        try:
            record = output.publish()
        except BaseException:
            output.discard()
            raise
        self._channel.send_bytes(encode(Done(record)))

    def _load_engine(self) -> Engine:
        if self._engine is None:
            policy, settings = self._job.settings.policy, self._job.settings
            key = WarmJob(self._job.store, self._job.engine, policy.special_tokens, settings.tokenizer_sha256).key
            self._engine = _warm_engines.get(key) or create(
                self._job.engine,  # type: ignore[arg-type]
                _tokenizer(self._job.store),
                policy.special_tokens,
            )
            # Whatever the budget, a cache needs some room, or the engine would be recycled all the time.
            self._memory_limit = max(self._job.worker_bytes, self._process.memory_info().rss + SMALLEST_CACHE)
        return self._engine

    def _report(self, stages: Stages) -> None:
        """Tell the run what was done, now and then."""
        self._pending.add(stages)
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._flush()

    def _relieve(self) -> None:
        """Recycle an engine whose cache has outgrown the worker's share of memory."""
        if self._process.memory_info().rss > self._memory_limit:
            self._load_engine().recycle()
            self._num_recycled += 1

    def _flush(self) -> None:
        self._channel.send_bytes(encode(Progress(self._pending, self._num_recycled)))
        self._pending, self._num_recycled = Stages(), 0
        self._reported = time.monotonic()

    def _feed(self, stream: Stream, done: set[int]) -> None:
        """Decompress a stream front to back, each span into a slot of its own."""
        job = self._job
        file = job.inputs[stream.input]
        reader = reader_for(file.format, job.settings.reading)
        assert not isinstance(reader, ParquetReader)
        text = TextStream(file, job.settings.reading, stop=stream.stop)
        slots: dict[int, str] = {}

        def sink(number: int) -> BinaryIO | None:
            if number in done:
                return None
            self._channel.send_bytes(encode(NeedSlot()))
            answer = decode_to_worker(self._channel.recv_bytes())
            assert isinstance(answer, Slot)
            slots[number] = answer.path
            return Path(answer.path).open("r+b" if Path(answer.path).exists() else "w+b", buffering=0)

        num_tasks = 0
        consumed = 0
        reported = 0.0
        for cut in cut_stream(text, delimiter=reader.delimiter, task_bytes=job.settings.task_bytes, sink=sink):
            num_tasks += 1
            size, consumed = text.consumed - consumed, text.consumed
            if cut.damage is not None and cut.number not in slots and (empty := sink(cut.number)) is not None:
                # Damage right at a cut, or at the very start, has no text of its own but must be told.
                empty.truncate(0)
                empty.close()
            if cut.number in slots:
                task = Task(
                    input=stream.input,
                    number=cut.number,
                    spans=[Span(stream.input, cut.start, cut.stop)],
                    bytes=size,
                    spool=slots.pop(cut.number),
                    first_line=cut.first_line,
                    damage=cut.damage,
                )
                self._channel.send_bytes(encode(Cut(task)))
            taken, reported = text.seconds - reported, text.seconds
            self._channel.send_bytes(encode(Progress(Stages(decompress=taken), 0)))
        self._channel.send_bytes(encode(StreamEnded(stream, num_tasks)))


def write_profile(profiler: cProfile.Profile, path: Path) -> None:
    """As `pstats` reads it; as a table of functions, by the time spent in them, where the name ends in .txt."""
    if path.suffix != ".txt":
        profiler.dump_stats(path)
        return
    with path.open("w") as file:
        pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(60)


def _tokenizer(store: str) -> Tokenizer:
    return open_tokenizer(Path(store) / "tokenizer", name="tokenizer")
