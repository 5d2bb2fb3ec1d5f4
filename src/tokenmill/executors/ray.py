"""Calls as tasks of a Ray cluster: one that runs already, or one that is started for the run and ends with it.

Ray places calls, retries them when a process or a machine is lost, and ends them when the run is gone; this module
does none of that. Calls, notes and answers are small; the files that calls read and write are on storage that all
machines share.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError
from tokenmill.executors.base import ONE_THREAD, Answer, Call, CallEvent, Capacity, Lost, Note, Place, Started, resolve
from tokenmill.machine import parse_bytes, usable_cores

__all__ = ["RayExecutor", "keep_stdout_clean"]

OBJECT_STORE_BYTES = 100_000_000
"""The object store of a cluster that is started here: answers are small, and nothing else uses it."""
LOOPBACK = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the address under which other machines see this one, but not this address."""
CONNECT_SECONDS = 10.0
TAKE_SECONDS = 0.25
CLOSE_SECONDS = 20.0
MOST_WORDS = 400
BUSY = "look for other programs that keep this machine busy, and run the same command again"
STRANGE = "it needs the Ray and the Python that it runs with, and its token where it has one (RAY_AUTH_MODE=token)"
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}


def keep_stdout_clean() -> None:
    """Keep Ray's messages about losses off stdout; call this before Ray is used, if a program prints results there."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")


class RayExecutor:
    """Runs the tasks of a store on a Ray cluster.

    The cluster is the one at `address`, else at the environment's `RAY_ADDRESS`, else one that is started on this
    machine for the run. A program that has called `ray.init` itself uses that. A task asks for CPUs and memory;
    one that is lost with its process or machine is run again up to `max_retries` times.
    """

    shares_disk = False

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus_per_task: float = 1,
        memory_per_task: int | str | None = None,
        max_retries: int = 1,
    ) -> None:
        if find_spec("ray") is None:
            # Say so before any work, and leave the import, which takes a second, to `join`.
            raise MissingDependencyError("--executor ray", "ray")
        if not num_cpus_per_task > 0:
            raise UsageError(f"num_cpus_per_task {num_cpus_per_task} must be positive")
        if max_retries < 0:
            raise UsageError(f"max_retries {max_retries} must be at least 0")
        memory = None if memory_per_task is None else parse_bytes(memory_per_task, "memory_per_task")
        if memory is not None and memory < 1:
            raise UsageError(f"memory_per_task {memory_per_task} must be positive")
        self.memory_per_call = memory
        self._warmings: list[tuple[str, bytes]] = []
        self._contexts: dict[bytes, Any] = {}
        self._address = address
        self._num_cpus = num_cpus_per_task
        self._max_retries = max_retries
        self._ray: Any = None
        self._is_ours = False
        self._calls: dict[Any, Call] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Calls that have ended, as Ray reports them. `ray.wait` would look at every running call for each one."""
        self._attempts: dict[str, _Attempts] = {}
        self._mailbox: Any = None
        self._taken = 0.0

    def __str__(self) -> str:
        return "Ray, started on this machine" if self._where == "local" else f"Ray at {self._where}"

    def join(self, num_calls: int | None) -> None:
        """Connect to the cluster; one that is started here has room for this many calls, or uses all cores."""
        if self._ray is not None:
            return
        ray = _import_ray()
        if not ray.is_initialized():
            self._is_ours = True
            self._connect(ray, num_calls)
        self._ray = ray
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        self._mailbox = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(_Mailbox).remote()
        options = {"num_cpus": self._num_cpus, "max_retries": self._max_retries, "scheduling_strategy": "SPREAD"}
        options["name"] = "tokenmill"
        self._run_call = ray.remote(**options)(_run_call)
        self._run_last_call = ray.remote(**options, max_calls=1)(_run_call)

    def pin(self, cpus: Sequence[int]) -> None:
        """Ignore CPUs of this machine: Ray decides where a call runs."""

    def warm(self, target: str, payload: bytes) -> None:
        """Have processes call a function before their first call, unless they may belong to another program."""
        self._warmings.append((target, payload))

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        """Return how many calls of this size fit now, and how much memory each could take with all CPUs in use."""
        least = self.memory_per_call or memory_bytes
        num_calls = 0
        shares = []
        for node in self._ray.nodes():
            resources = node.get("Resources", {})
            room = int(resources.get("CPU", 0) / self._num_cpus) if node["Alive"] else 0
            memory = int(resources.get("memory", 0))
            fitting = min(room, memory // least) if least else room
            if fitting:
                num_calls += fitting
                shares.append(memory // room)
        return Capacity(num_calls, min(shares, default=0))

    def submit(self, call: Call) -> None:
        """Hand a call to Ray, which starts calls with the same needs in the order of submission."""
        if call.context not in self._contexts:
            # All calls share one copy in Ray's object store.
            self._contexts = {call.context: self._ray.put(call.context)}
        context, warmings = self._contexts[call.context], self._warmings if self._is_ours else []
        function = self._run_last_call if call.is_last else self._run_call
        ref = function.options(memory=self.memory_per_call or call.memory_bytes).remote(
            self._mailbox, call.name, call.target, context, call.payload, warmings
        )
        self._calls[ref] = call
        ended = self._ended
        ref.future().add_done_callback(lambda _: ended.put(ref))
        self._attempts[call.name] = _Attempts(call)

    def wait(self, timeout: float) -> list[CallEvent]:
        """Return what has happened; notes come before answers, so that a call starts before it ends."""
        ready: list[Any] = []
        events: list[CallEvent] = []
        try:
            with suppress(queue.Empty):
                ready.append(self._ended.get(timeout=timeout))
                while True:
                    ready.append(self._ended.get_nowait())
            if ready or time.monotonic() - self._taken > TAKE_SECONDS:
                events += self._take_notes()
            return events + [self._end(ref) for ref in ready if ref in self._calls]
        except SystemError as error:
            # Ray wraps what a signal handler raises while it waits.
            raise error.__cause__ or error from None

    def close(self) -> None:
        """End all calls, so that none of them writes any more, and leave the cluster; end it if it was started here."""
        ray, self._ray = self._ray, None
        if ray is None:
            if self._is_ours:
                # Ray was interrupted while it started.
                _import_ray().shutdown()
            self._is_ours = False
            return
        refs = list(self._calls)
        with suppress(Exception):
            for ref in refs:
                ray.cancel(ref, force=True)
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=CLOSE_SECONDS, fetch_local=False)
            ray.kill(self._mailbox)
        self._calls, self._attempts, self._contexts, self._mailbox = {}, {}, {}, None
        self._ended = queue.SimpleQueue()
        if self._is_ours:
            ray.shutdown()
        self._is_ours = False

    @property
    def may_grow(self) -> bool:
        """A cluster that was started here has this machine and no other."""
        return not self._is_ours or self._where != "local"

    @property
    def _where(self) -> str:
        return self._address or os.environ.get("RAY_ADDRESS") or "local"

    def _connect(self, ray: Any, num_calls: int | None) -> None:
        address = self._where
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            wanted = math.ceil((num_calls or 1) * self._num_cpus)
            num_cpus = wanted if num_calls is not None else max(wanted, usable_cores())
            options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
            if sys.platform == "linux":
                options["_node_ip_address"] = LOOPBACK
        else:
            _check_reachable(address)
        try:
            with _signals_kept(), _environment(NO_STATISTICS):
                ray.init(address=address, **options)
        except Exception as error:
            failed, advice = f"join the Ray cluster at {address}", STRANGE
            if address == "local":
                failed, advice = "start a Ray cluster on this machine", BUSY
            raise TokenmillError(f"cannot {failed}: {_reason(error)}; {advice}") from None

    def _take_notes(self) -> list[CallEvent]:
        """Return what calls have sent. A lost mailbox restarts empty, which only loses notes."""
        posted: list[tuple[str, str, bytes | Place]] = []
        with suppress(self._ray.exceptions.RayError, self._ray.exceptions.GetTimeoutError):
            posted = self._ray.get(self._mailbox.take.remote(), timeout=CONNECT_SECONDS)
        self._taken = time.monotonic()
        events: list[CallEvent] = []
        for name, node, content in posted:
            attempts = self._attempts.get(name)
            if attempts is None:
                continue
            if isinstance(content, bytes):
                events.append(Note(attempts.call, content))
            else:
                events.append(self._begin(attempts, node, content))
        return events

    def _begin(self, attempts: _Attempts, node: str, place: Place) -> CallEvent:
        """Record where a call runs. Ray by itself would retry a call forever that runs out of memory each time."""
        lost = attempts.place
        if lost is not None and self._lives(attempts.node):
            attempts.num_deaths += 1
        attempts.node, attempts.place = node, place
        if attempts.num_deaths > self._max_retries:
            ref = next(ref for ref, call in self._calls.items() if call is attempts.call)
            self._ray.cancel(ref, force=True)
            self._forget(ref)
            return self._lose(attempts.call, f"was lost with {lost}")
        return Started(attempts.call, place, None if lost is None else f"was lost with {lost}")

    def _lives(self, node: str) -> bool:
        return any(known["NodeID"] == node and known["Alive"] for known in self._ray.nodes())

    def _end(self, ref: Any) -> CallEvent:
        call = self._calls[ref]
        place = self._attempts[call.name].place
        self._forget(ref)
        try:
            return Answer(call, self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            kind = self._ray.exceptions
            if isinstance(error, kind.OutOfMemoryError):
                return self._lose(call, f"took more memory than there was, and was ended by Ray in {place}")
            if isinstance(error, (kind.WorkerCrashedError, kind.NodeDiedError, kind.LocalRayletDiedError)):
                return self._lose(call, f"was lost with {place}")
            if isinstance(error, kind.RayTaskError):
                how = f"cannot be run by Ray: {_lines(error)[-1]}"
                return Lost(call, how, "install the same tokenmill on all machines of the cluster")
            return Lost(call, f"failed in Ray: {_lines(error)[0]}", "look at the logs of Ray")

    def _lose(self, call: Call, how: str) -> Lost:
        attempts = "1 attempt" if self._max_retries == 0 else f"{self._max_retries + 1} attempts"
        return Lost(call, f"{how}, the last of {attempts}")

    def _forget(self, ref: Any) -> None:
        del self._attempts[self._calls.pop(ref).name]


_warmed: set[tuple[str, bytes]] = set()
"""The warm-up functions that this process has called."""


@dataclass
class _Attempts:
    """Where a call runs, and how often its process died on a machine that is still alive."""

    call: Call
    node: str = ""
    place: Place | None = None
    num_deaths: int = 0


class _Mailbox:
    """Collects the notes of calls on the run's own machine, so that the loss of another machine loses none."""

    def __init__(self) -> None:
        self._notes: list[tuple[str, str, bytes | Place]] = []

    def put(self, name: str, node: str, content: bytes | Place) -> None:
        """Keep a note of a call, or the place where it begins."""
        self._notes.append((name, node, content))

    def take(self) -> list[tuple[str, str, bytes | Place]]:
        """Return all notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


def _run_call(
    mailbox: Any, name: str, target: str, context: bytes, payload: bytes, warmings: list[tuple[str, bytes]]
) -> bytes:
    """Run a call on a machine of the cluster, where Ray calls this."""
    import ray

    for warming in warmings:
        if warming not in _warmed:
            _warmed.add(warming)
            resolve(warming[0])(warming[1])

    node = ray.get_runtime_context().get_node_id()
    put = mailbox.put.options(num_returns=0)
    machine = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    put.remote(name, node, Place(machine, os.getpid()))
    with _environment(ONE_THREAD):
        answer: bytes = resolve(target)(lambda data: put.remote(name, node, data), context, payload)
    return answer


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside a block; the process may belong to another program."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingDependencyError("--executor ray", "ray") from None
    return ray


def _check_reachable(address: str) -> None:
    """Raise if no server answers at an address; Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise TokenmillError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one there with: ray start --head, "
            "or unset RAY_ADDRESS for one on this machine"
        ) from None


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the run's handler for SIGTERM, which `ray.init` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def _reason(error: BaseException) -> str:
    """Return the reason of an error of Ray: the end of the traceback in its message, or the whole message."""
    cause = error.__cause__ or error
    said = _lines(cause)[-1].split(". ")[0] if "Traceback" in str(cause) else " ".join(_lines(cause))
    return said[:MOST_WORDS]


def _lines(error: BaseException) -> list[str]:
    return [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
