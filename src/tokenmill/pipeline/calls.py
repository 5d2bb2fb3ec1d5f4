"""What a process does on a machine of a cluster: hold the gate, run one task, or a part of a stream.

A call is an order of a few hundred bytes. Everything else is in the store, which all machines share: `job.json`
says what the run does, the journal what is done. `job.json` is another one for every attempt at a run, so a
call that outlives its run finds that out before it publishes anything.

A stream is read front to back by each of its calls, which take turns with its tasks: reading costs a fifth of
tokenizing, and nothing has to be passed from one machine to another.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from tokenmill.errors import DataError, StoreError, TokenmillError
from tokenmill.executors.base import Post
from tokenmill.files import write_durably
from tokenmill.pipeline.feeding import cut_tasks
from tokenmill.pipeline.finish import package_version
from tokenmill.pipeline.gate import hold_gate
from tokenmill.pipeline.journal import Journal, TaskRecord
from tokenmill.pipeline.locking import Lock
from tokenmill.pipeline.messages import Failed, GateResult, Progress, RunGate, RunTask
from tokenmill.pipeline.mill import Mill
from tokenmill.pipeline.plan import Stream, Task
from tokenmill.pipeline.stages import Stages
from tokenmill.pipeline.task import Job
from tokenmill.remote.paths import input_path

__all__ = ["ANSWER", "Finished", "Order", "Report", "RunStream", "answer", "decode_answer", "decode_report", "post_job"]

ANSWER = "tokenmill.pipeline.calls:answer"
POST_SECONDS = 1.0
SEEN_SECONDS = 5.0
"""How long a machine may take to see what another one has written."""
SHARED = "the store and its inputs must be on storage that all machines of the cluster share"


class RunStream(msgspec.Struct, tag=True, frozen=True):
    """Tokenize every task of a stream whose number leaves the remainder `part`."""

    stream: Stream
    part: int
    num_parts: int


class Order(msgspec.Struct, frozen=True):
    """What a call is to do, for which run."""

    store: str
    digest: str
    """Of the run's `job.json`."""
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


class SharedJob(msgspec.Struct, frozen=True):
    """`job.json`: what the machines of a cluster have to know, and which packages they have to have."""

    job: Job
    versions: dict[str, str]


_encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(Order)
_answers: msgspec.msgpack.Decoder[GateResult | Finished | Failed] = msgspec.msgpack.Decoder(
    GateResult | Finished | Failed
)
decode_answer = _answers.decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def post_job(job: Job) -> str:
    """Write `job.json` for the calls of an attempt, which takes the right to publish from those of earlier ones."""
    data = msgspec.json.encode(SharedJob(job, _versions(job.engine)))
    write_durably(_job_path(job.store), data)
    return xxhash.xxh3_128_hexdigest(data)


def answer(post: Post, payload: bytes) -> bytes:
    """Obey one order; an error is an answer too, so that a run ends with a sentence."""
    order = _orders.decode(payload)
    try:
        return _encode(_find_site(order).obey(order.work, post))
    except Exception as error:
        return _encode(Failed.from_error(error, order.store))


class _Site:
    """What a process keeps from call to call of one attempt."""

    def __init__(self, order: Order) -> None:
        self.digest = order.digest
        shared = _see_job(order)
        self._job = shared.job
        _check_versions(shared)
        self._journal = Journal(Path(order.store))
        self._mill = Mill(self._job, self._hear)
        self._post: Post = lambda _: None

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
        self._check_current()
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
        record = self._journal.record(name)
        return record is not None and not record.modified(self._job.inputs)

    def _run(self, task: Task) -> TaskRecord:
        self._task = task
        _check_inputs(self._job, task)
        output = self._mill.run(task, run=os.urandom(8).hex())
        try:
            self._check_current()
            record = output.publish()
        except BaseException:
            output.discard()
            raise
        self._num_tasks += 1
        return record

    def _check_current(self) -> None:
        """A call whose run was killed and begun again must leave the store to the new one."""
        if _read_digest(self._job.store) != self.digest:
            raise StoreError(f"{self._job.store} has been taken over by another run")

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
        _site = None
        _site = _Site(order)
    return _site


def _job_path(store: str) -> Path:
    return Path(store) / ".tasks" / "job.json"


def _read_digest(store: str) -> str | None:
    try:
        return xxhash.xxh3_128_hexdigest(_job_path(store).read_bytes())
    except FileNotFoundError:
        return None


def _see_job(order: Order) -> SharedJob:
    """The job as the machine that started the run has written it, or a sentence on storage that is not shared."""
    deadline = time.monotonic() + SEEN_SECONDS
    while _read_digest(order.store) != order.digest:
        if time.monotonic() > deadline:
            raise StoreError(
                f"{socket.gethostname()} does not see {order.store} as the machine does that started the run: {SHARED}"
            )
        time.sleep(0.2)
    return msgspec.json.decode(_job_path(order.store).read_bytes(), type=SharedJob)


def _check_inputs(job: Job, task: Task) -> None:
    for span in task.spans:
        file = job.inputs[span.input]
        if not input_path(file.path).exists():
            raise DataError(file.path, f"is not there on {socket.gethostname()}: {SHARED}")


def _versions(engine: str) -> dict[str, str]:
    """The packages that decide the bytes of a store."""
    return {name: package_version(name) for name in ("tokenmill", "pyarrow", engine)}


def _check_versions(shared: SharedJob) -> None:
    """Machines with other versions would write other bytes than a run without them."""
    for name, version in _versions(shared.job.engine).items():
        if version != shared.versions[name]:
            raise TokenmillError(
                f"{socket.gethostname()} has {name} {version}, and the machine that started the run "
                f"{shared.versions[name]}; install the same version on all machines of the cluster"
            )


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
