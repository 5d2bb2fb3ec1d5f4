"""What a worker process does: run tasks, feed a stream, or hold the parity gate.

It is started by an executor as `serve(channel, payload)`, obeys messages one at a time, and
turns every error into a message, so that a run ends with a sentence and never with a hang.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tokenmill.executors.base import Channel
from tokenmill.pipeline.feeding import cut_tasks
from tokenmill.pipeline.gate import hold_gate
from tokenmill.pipeline.locking import Lock
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
from tokenmill.pipeline.mill import Mill, WarmJob, keep_engine
from tokenmill.pipeline.plan import Stream
from tokenmill.pipeline.stages import Stages
from tokenmill.pipeline.task import Job, TaskOutput

__all__ = ["WarmJob", "preload", "serve", "warm"]


def preload(_payload: bytes) -> None:
    """Import what every worker uses, while the run is still being planned."""
    import pyarrow.parquet  # noqa: F401

    from tokenmill.engines.gigatoken import return_plain_arrays

    return_plain_arrays()


def warm(payload: bytes) -> None:
    """Load the engine in the nursery; workers forked from it share the memory."""
    # An error comes again in a worker, which can report it.
    with suppress(Exception):
        keep_engine(msgspec.json.decode(payload, type=WarmJob))


def serve(channel: Channel, payload: bytes) -> None:
    """Obey messages until the channel closes."""
    job = msgspec.msgpack.decode(payload, type=Job)
    # Kept in a name: the lock goes when nothing refers to it any more.
    lock = Lock(Path(job.store), job.share)
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
        self._mill = Mill(job, self._tell)
        self._held: TaskOutput | None = None
        self._profiler = cProfile.Profile()

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
            self._channel.send_bytes(encode(hold_gate(self._job, self._mill.load_engine())))

    def _run_task(self, message: RunTask) -> None:
        with self._profiled():
            output = self._mill.run(message.task, run=f"{os.getpid():x}")
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

    def _tell(self, progress: Progress) -> None:
        self._channel.send_bytes(encode(progress))

    def _feed(self, stream: Stream, done: set[int]) -> None:
        """Decompress a stream front to back, each span into a slot of its own."""

        def slot(number: int) -> Path | None:
            if number in done:
                return None
            self._channel.send_bytes(encode(NeedSlot()))
            answer = decode_to_worker(self._channel.recv_bytes())
            assert isinstance(answer, Slot)
            return Path(answer.path)

        numbers = []
        for number, task, seconds in cut_tasks(self._job, stream, slot):
            numbers.append(number)
            if task is not None:
                self._channel.send_bytes(encode(Cut(task)))
            self._tell(Progress(Stages(decompress=seconds), 0))
        self._channel.send_bytes(encode(StreamEnded(stream, numbers)))


def write_profile(profiler: cProfile.Profile, path: Path) -> None:
    """As `pstats` reads it; as a table of functions, by the time spent in them, where the name ends in .txt."""
    if path.suffix != ".txt":
        profiler.dump_stats(path)
        return
    with path.open("w") as file:
        pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(60)
