"""Carry out one call in a worker process: sample the inputs for the parity gate, tokenize a task, or read a stream.

An order is a few hundred bytes. The job, which is the same for all orders of a run, is sent to a process once, and the
process keeps its engine as long as the job stays the same. Every error becomes an answer, so that a run ends with a
sentence and never with a hang.

On a cluster, processes share at most a directory or a bucket with the run. Each publishes its own tasks there, and
a stream is read by several calls, which take turns with its tasks: reading costs a fifth of tokenizing, and no text has
to be passed from one machine to another.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec
import xxhash

from tokenmill.errors import DataError, TokenmillError
from tokenmill.executors.base import Post
from tokenmill.file_lock import try_lock
from tokenmill.pipeline.counts import Stages
from tokenmill.pipeline.input_file import Damage, UnconfirmedText, check_unchanged, find_damage
from tokenmill.pipeline.journal.finish import package_version
from tokenmill.pipeline.journal.journal import Journal, TaskEntry
from tokenmill.pipeline.journal.locks import SHARED, check_claim, claim, join_workers, wait_for_claim
from tokenmill.pipeline.journal.mirror import JOURNAL, Mirror, scratch_directory
from tokenmill.pipeline.plan.prepare import Job
from tokenmill.pipeline.plan.tasks import Stream, Task
from tokenmill.pipeline.task.gate_sample import GateSample, take_gate_sample
from tokenmill.pipeline.task.output import TaskOutput, publish_task
from tokenmill.pipeline.task.runner import TaskRunner
from tokenmill.pipeline.task.streams import cut_tasks, first_doubtful, take_file
from tokenmill.pipeline.workers.engine_cache import EngineCache
from tokenmill.pipeline.workers.messages import (
    Cut,
    CutStream,
    Failed,
    Finished,
    Order,
    Report,
    RunGate,
    RunStream,
    decode_order,
    encode,
)
from tokenmill.remote.paths import input_path
from tokenmill.remote.remote_errors import RemoteError

__all__ = ["RUN_CALL", "preload", "run_call", "share_job"]

RUN_CALL = f"{__name__}:run_call"
"""The interval between two notes of a process on another machine."""


def share_job(job: Job) -> bytes:
    """Encode the context of a run's calls. Where no lock reaches its processes, claim the store for them."""
    context = encode(msgspec.structs.replace(job, versions=_versions(job.engine)))
    if not job.shares_disk:
        claim(job.mirror or job.store, xxhash.xxh3_128_hexdigest(context))
    return context


def preload(_payload: bytes) -> None:
    """Import what every worker uses, while the run is still being planned."""
    import pyarrow.parquet  # noqa: F401

    from tokenmill.engines.gigatoken import return_plain_arrays

    return_plain_arrays()


def run_call(post: Post, context: bytes, payload: bytes) -> bytes:
    """Carry out one order and return the answer, which may be an error."""
    place = ""
    try:
        worker = _find_worker(context)
        place = worker.place
        return encode(worker.run(decode_order(payload), post))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except RemoteError as error:
        # Name the machine: it may lack a permission or a route that others have.
        return encode(Failed.from_error(RemoteError(f"{error} (on {socket.gethostname()})"), place))
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__ == "builtins":
            traceback.print_exc()
        return encode(Failed.from_error(error, place))


class _Worker:
    """The state that a process keeps between the calls of one run."""

    def __init__(self, context: bytes) -> None:
        self.context = context
        self._digest = xxhash.xxh3_128_hexdigest(context)
        job = msgspec.msgpack.decode(context, type=Job)
        for name, version in _versions(job.engine).items():
            if version != job.versions[name]:
                # Another version could write other bytes.
                raise TokenmillError(
                    f"{socket.gethostname()} has {name} {version}, and the machine that started the run "
                    f"{job.versions[name]}; install the same version on all machines of the cluster"
                )
        self._shares_disk = job.shares_disk
        self.place = job.store if job.shares_disk else job.mirror or job.store
        self._resources = ExitStack()
        self.close = weakref.finalize(self, self._resources.close)
        """Release the store, and remove the files that only this process used; also called when the process ends."""
        self._job = job = self._take_store(job)
        mirror = Mirror(job.mirror, job.plan_tag) if job.mirror is not None else None
        self._journal = Journal(Path(job.store), job.share, job.attempt, mirror)
        self._engines = EngineCache(job)
        self._runner: TaskRunner | None = None
        self._profile: _Profile | None = None
        self._post: Post = lambda _: None

    def _take_store(self, job: Job) -> Job:
        """Hold the store, or give this process a directory of its own where the store is in a bucket."""
        if self._shares_disk:
            self._resources.enter_context(join_workers(Path(job.store), job.share))
            return job
        wait_for_claim(self.place, self._digest)
        if job.mirror is None:
            return job
        store = self._resources.enter_context(scratch_directory(job.scratch)) / "store"
        (store / JOURNAL).mkdir(parents=True)
        Mirror(job.mirror).pull_tokenizer(store)
        return msgspec.structs.replace(job, store=str(store))

    def run(self, order: Order, post: Post) -> GateSample | Finished:
        """Carry out one order."""
        self._post = post
        self._posted = time.monotonic()
        self._task: Task | None = None
        self._done = Report()
        self._engines.num_recycled = 0
        with ExitStack() as held:
            if not self._shares_disk:
                # A process that may outlive the run holds the store during a call only; others hold it all the time.
                check_claim(self.place, self._digest)
                held.enter_context(join_workers(Path(self._job.store)))
            thresholds = gc.get_threshold()
            # The records of JSON lines are many objects without cycles: looking for cycles takes a third of reading.
            gc.set_threshold(1_000_000)
            try:
                if isinstance(order, RunGate):
                    return take_gate_sample(self._job, self._engines.engine, with_awkward=order.with_awkward)
                if isinstance(order, CutStream):
                    return self._cut_stream(order.stream)
                if isinstance(order, RunStream):
                    return self._run_stream(order)
                output = self._tokenize(order.task)
                record = self._publish(output) if order.publish else output.record
                return Finished(self._report(), [record], None if order.publish else output.mark)
            finally:
                gc.set_threshold(*thresholds)

    def _cut_stream(self, stream: Stream) -> Finished:
        """Cut a stream into tasks whose text other processes take from spool files."""
        numbers = []

        def sink(number: int) -> Path | None:
            return None if self._is_done(stream.task_name(number)) else take_file(self._journal.spool, stream.name)

        damage = None
        try:
            for number, task, seconds in cut_tasks(self._job, stream, sink):
                numbers.append(number)
                if task is not None:
                    self._post(encode(Cut(task)))
                self._count(Stages(decompress=seconds))
        except UnconfirmedText as error:
            damage = self._find_damage(stream, error)
        return Finished(self._report(), [], numbers=numbers, damage=damage)

    def _find_damage(self, stream: Stream, error: UnconfirmedText) -> Damage | None:
        """Determine what a damaged frame costs, or raise the error if damage ends the run."""
        file = self._job.inputs[stream.input]
        check_unchanged([file])
        if self._job.stops_at_damage:
            raise error
        return find_damage(file, self._job.settings.reading)

    def _run_stream(self, order: RunStream) -> Finished:
        """Tokenize the tasks of a part of a stream one after another; those in the journal are done."""
        records: list[TaskEntry] = []
        numbers: list[int] = []
        with _nameless_file() as text:

            def sink(number: int) -> Path | None:
                is_mine = number % order.num_parts == order.part
                return text if is_mine and not self._is_done(order.stream.task_name(number)) else None

            try:
                for number, task, seconds in _cut_here(self._job, order.stream, sink):
                    numbers.append(number)
                    self._count(Stages(decompress=seconds))
                    if task is not None:
                        records.append(self._publish(self._tokenize(task)))
            except UnconfirmedText as error:
                damage = self._find_damage(order.stream, error)
            else:
                return Finished(self._report(), records, numbers=numbers)
        return self._run_again(order, numbers, damage)

    def _run_again(self, order: RunStream, numbers: list[int], damage: Damage | None) -> Finished:
        """Forget the tasks of this part that may have text of a damaged frame, and read the stream up to that frame."""
        assert damage is not None
        first = first_doubtful(numbers, damage, self._job.settings.task_bytes)
        for number in numbers:
            record = self._journal.published(order.stream.task_name(number))
            if number >= first and number % order.num_parts == order.part and record is not None:
                self._journal.forget(record)
                self._done.num_tasks -= 1
                self._done.work.num_rejects -= sum(record.rejects.values())
        stream = msgspec.structs.replace(order.stream, damage=damage)
        return self._run_stream(msgspec.structs.replace(order, stream=stream))

    def _is_done(self, name: str) -> bool:
        if self._shares_disk:
            # The run has checked the entries of earlier attempts and removed those that are not valid.
            return self._journal.has_entry(name)
        record = self._journal.published(name)
        return record is not None and not record.modified(self._job.inputs)

    def _tokenize(self, task: Task) -> TaskOutput:
        self._task, self._done.task = task, task.name
        for file in [] if self._shares_disk else [self._job.inputs[span.input] for span in task.spans]:
            if not input_path(file.path).exists():
                raise DataError(file.path, f"is not there on {socket.gethostname()}: {SHARED}")
        if self._runner is None:
            self._runner = TaskRunner(self._job, self._journal, self._engines.engine, self._engines.relieve)
            if self._job.profile is not None:
                self._profile = _claim_profile(Path(self._job.profile))
        with self._profile.running() if self._profile is not None else nullcontext():
            name = f"{os.getpid():x}" if self._shares_disk else os.urandom(8).hex()
            return self._runner.run(task, name, self._count)

    def _publish(self, output: TaskOutput) -> TaskEntry:
        try:
            if not self._shares_disk:
                check_claim(self.place, self._digest)
            publish_task(self._journal, output.record, output.mark)
        except BaseException:
            output.discard()
            raise
        self._done.num_tasks += 1
        return output.record

    def _count(self, stages: Stages) -> None:
        """Add up the work, and send a note at intervals."""
        self._done.work.add(stages)
        num_bytes, task = stages.num_bytes, self._task
        if task is not None and task.spool is not None:
            # Progress is counted in bytes on disk: text from a stream was decompressed.
            span = task.spans[0]
            num_bytes = num_bytes * task.bytes // max(1, (span.stop or 0) - span.start)
        self._done.disk_bytes += num_bytes
        if time.monotonic() - self._posted > self._job.note_seconds:
            self._posted = time.monotonic()
            self._post(encode(self._report()))

    def _report(self) -> Report:
        self._done.num_recycled, self._done.memory_bytes = self._engines.num_recycled, self._engines.memory_bytes
        return self._done


_here = threading.local()
"""The worker of a process; a thread may stand for one."""


def _find_worker(context: bytes) -> _Worker:
    """Return the worker of a run; close that of an earlier run, with its engine."""
    worker: _Worker | None = getattr(_here, "worker", None)
    if worker is None or worker.context != context:
        if worker is not None:
            worker.close()
        # Free the old engine before a new one is loaded.
        worker = _here.worker = None
        worker = _here.worker = _Worker(context)
    return worker


def _versions(engine: str) -> dict[str, str]:
    """Return the versions of the packages that decide the bytes of a store."""
    return {name: package_version(name) for name in ("tokenmill", "pyarrow", engine)}


def _cut_here(job: Job, stream: Stream, sink: Callable[[int], Path | None]) -> Iterator[tuple[int, Task | None, float]]:
    """Cut a stream; a write error names this machine, because the text is on its own disk."""
    try:
        yield from cut_tasks(job, stream, sink)
    except OSError as error:
        error.filename = error.filename or f"{tempfile.gettempdir()} on {socket.gethostname()}"
        raise


@contextmanager
def _nameless_file() -> Iterator[Path]:
    """Open a file on this machine's disk that disappears with the process, even if it is killed."""
    if sys.platform == "linux":
        with tempfile.TemporaryFile() as file:
            yield Path(f"/proc/self/fd/{file.fileno()}")
    else:
        with tempfile.NamedTemporaryFile(prefix="tokenmill-") as file:
            yield Path(file.name)


class _Profile:
    """The profile of one worker for --profile, written again after each task, because a run may be killed."""

    def __init__(self, path: Path, lock: object) -> None:
        self._path = path
        self._lock = lock
        """Held until the process ends."""
        self._profiler = cProfile.Profile()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile a block, and write the result for `pstats`, or as a table if the name of the file ends in .txt."""
        try:
            with self._profiler:
                yield
        finally:
            if self._path.suffix != ".txt":
                self._profiler.dump_stats(self._path)
            else:
                with self._path.open("w") as file:
                    pstats.Stats(self._profiler, stream=file).sort_stats("tottime").print_stats(60)


def _claim_profile(path: Path) -> _Profile | None:
    """Start a profile, unless another worker has the lock on its file."""
    file = path.open("ab")
    with suppress(OSError):
        if try_lock(file):
            return _Profile(path, file)
    file.close()
    return None
