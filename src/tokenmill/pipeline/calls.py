"""What a process does on a machine of a cluster: hold the gate, run one task, or a part of a stream.

A call is an order of a few hundred bytes. Everything else is in the store, a directory that all machines share or a
bucket: what the run does is posted there (`posting.py`), and the journal says what is done. For a bucket, a process has
a scratch directory of its own, and its tasks are published as those of any run into a bucket are.

A stream is read front to back by each of its calls, which take turns with its tasks: reading costs a fifth of
tokenizing, and nothing has to be passed from one machine to another.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from tokenmill.errors import DataError
from tokenmill.executors.base import Post
from tokenmill.pipeline.feeding import cut_tasks
from tokenmill.pipeline.gate import hold_gate
from tokenmill.pipeline.journal import Journal, TaskRecord
from tokenmill.pipeline.locking import Lock
from tokenmill.pipeline.messages import Failed, GateResult, Progress, RunGate, RunTask
from tokenmill.pipeline.mill import Mill
from tokenmill.pipeline.mirroring import JOURNAL, Mirror
from tokenmill.pipeline.plan import Stream, Task
from tokenmill.pipeline.posting import SHARED, check_current, see_job
from tokenmill.pipeline.scratch import scratch_directory
from tokenmill.pipeline.stages import Stages
from tokenmill.pipeline.task import Job
from tokenmill.remote.client import RemoteError
from tokenmill.remote.paths import input_path, is_remote

__all__ = ["ANSWER", "Finished", "Order", "Report", "RunStream", "answer", "decode_answer", "decode_report"]

ANSWER = "tokenmill.pipeline.calls:answer"
POST_SECONDS = 1.0


class RunStream(msgspec.Struct, tag=True, frozen=True):
    """Tokenize every task of a stream whose number leaves the remainder `part`."""

    stream: Stream
    part: int
    num_parts: int


class Order(msgspec.Struct, frozen=True):
    """What a call is to do, for which run."""

    place: str
    """The directory or the URL of the store."""
    digest: str
    """Of the job that is posted there."""
    work: RunGate | RunTask | RunStream


class Report(msgspec.Struct, frozen=True):
    """How far a call has come since it was begun."""

    task: str
    num_tasks: int
    disk_bytes: int
    work: Stages
    num_recycled: int
    memory_bytes: int


class Finished(msgspec.Struct, tag=True, frozen=True):
    """What a call has done; `numbers` are those of all tasks of its stream."""

    report: Report
    records: list[TaskRecord]
    numbers: list[int] = []


_encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(Order)
_answers: msgspec.msgpack.Decoder[GateResult | Finished | Failed] = msgspec.msgpack.Decoder(
    GateResult | Finished | Failed
)
decode_answer = _answers.decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def answer(post: Post, payload: bytes) -> bytes:
    """Obey one order; an error is an answer too, so that a run ends with a sentence."""
    order = _orders.decode(payload)
    try:
        return _encode(_find_site(order).obey(order.work, post))
    except RemoteError as error:
        # What this machine may not do, or cannot reach, another one may.
        return _encode(Failed.from_error(RemoteError(f"{error} (on {socket.gethostname()})"), order.place))
    except Exception as error:
        return _encode(Failed.from_error(error, order.place))


class _Site:
    """What a process keeps from call to call of one attempt."""

    def __init__(self, order: Order) -> None:
        self.digest = order.digest
        self._place = order.place
        self._scratch = ExitStack()
        self._job = self._settle(see_job(order.place, order.digest))
        self._journal = Journal(Path(self._job.store), mirror=Mirror(order.place) if is_remote(order.place) else None)
        self._mill = Mill(self._job, self._hear)
        self._post: Post = lambda _: None

    def _settle(self, job: Job) -> Job:
        """The job with a directory of this process, where the store is in a bucket."""
        if job.mirror is None:
            return job
        store = self._scratch.enter_context(scratch_directory(job.scratch)) / "store"
        (store / JOURNAL).mkdir(parents=True)
        Mirror(job.mirror).pull_tokenizer(store)
        return msgspec.structs.replace(job, store=str(store))

    def close(self) -> None:
        """Remove what this process alone has used."""
        self._scratch.close()

    def obey(self, work: RunGate | RunTask | RunStream, post: Post) -> GateResult | Finished:
        self._post = post
        self._posted = time.monotonic()
        self._task: Task | None = None
        self._num_tasks = self._disk_bytes = self._num_recycled = 0
        self._work = Stages()
        with self._joined():
            if isinstance(work, RunGate):
                return hold_gate(self._job, self._mill.load_engine())
            if isinstance(work, RunTask):
                record = self._run(work.task)
                return Finished(self._report(), [record])
            return self._run_stream(work)

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Where machines share locks too, a new run waits for a call that has not noticed that its own is gone."""
        check_current(self._place, self.digest)
        lock = Lock(Path(self._job.store))
        lock.join()
        thresholds = gc.get_threshold()
        # As in a worker; the process may have other work afterwards.
        gc.set_threshold(1_000_000)
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            lock.leave()

    def _run_stream(self, work: RunStream) -> Finished:
        """Tokenize the tasks of a part one after another; those that are in the journal are done."""
        records = []
        numbers = []
        with _nameless_file() as text:

            def slot(number: int) -> Path | None:
                is_mine = number % work.num_parts == work.part
                return text if is_mine and not self._is_done(work.stream.task_name(number)) else None

            for number, task, seconds in _cut(self._job, work.stream, slot):
                numbers.append(number)
                self._hear(Progress(Stages(decompress=seconds), 0))
                if task is not None:
                    records.append(self._run(task))
        return Finished(self._report(), records, numbers)

    def _is_done(self, name: str) -> bool:
        record = self._journal.published(name)
        return record is not None and not record.modified(self._job.inputs)

    def _run(self, task: Task) -> TaskRecord:
        self._task = task
        _check_inputs(self._job, task)
        output = self._mill.run(task, run=os.urandom(8).hex())
        try:
            check_current(self._place, self.digest)
            record = output.publish()
        except BaseException:
            output.discard()
            raise
        self._num_tasks += 1
        return record

    def _hear(self, progress: Progress) -> None:
        self._work.add(progress.stages)
        self._num_recycled += progress.num_recycled
        self._disk_bytes += _size_on_disk(self._task, progress.stages.num_bytes)
        if time.monotonic() - self._posted > POST_SECONDS:
            self._posted = time.monotonic()
            self._post(_encode(self._report()))

    def _report(self) -> Report:
        task = self._task.name if self._task is not None else ""
        return Report(task, self._num_tasks, self._disk_bytes, self._work, self._num_recycled, self._mill.memory_bytes)


_site: _Site | None = None


def _find_site(order: Order) -> _Site:
    """The site of an attempt; that of the one before goes, with its engine."""
    global _site
    if _site is None or _site.digest != order.digest:
        if _site is not None:
            _site.close()
            atexit.unregister(_site.close)
        _site = None
        _site = _Site(order)
        atexit.register(_site.close)
    return _site


def _check_inputs(job: Job, task: Task) -> None:
    for span in task.spans:
        file = job.inputs[span.input]
        if not input_path(file.path).exists():
            raise DataError(file.path, f"is not there on {socket.gethostname()}: {SHARED}")


def _cut(job: Job, stream: Stream, slot: Callable[[int], Path | None]) -> Iterator[tuple[int, Task | None, float]]:
    """The tasks of a stream; what cannot be written on the way is on this machine's own disk."""
    try:
        yield from cut_tasks(job, stream, slot)
    except OSError as error:
        error.filename = error.filename or f"{tempfile.gettempdir()} on {socket.gethostname()}"
        raise


@contextmanager
def _nameless_file() -> Iterator[Path]:
    """A file on this machine's own disk, which goes with the process, whatever ends it."""
    if sys.platform == "linux":
        with tempfile.TemporaryFile() as file:
            yield Path(f"/proc/self/fd/{file.fileno()}")
    else:
        with tempfile.NamedTemporaryFile(prefix="tokenmill-") as file:
            yield Path(file.name)


def _size_on_disk(task: Task | None, num_bytes: int) -> int:
    """Progress is counted in bytes on disk: text from a stream was decompressed."""
    if task is None or task.spool is None:
        return num_bytes
    span = task.spans[0]
    return num_bytes * task.bytes // max(1, (span.stop or 0) - span.start)
