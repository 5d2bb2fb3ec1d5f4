"""Calls as tasks of a Ray cluster: one that runs already, or one that is started for the run and ends with it.

Ray places calls, runs them again when a process or a machine is lost, and ends them when the run is gone;
nothing of that is done here. Only names, small orders, notes and answers travel; what calls read and write
is on storage that all machines share.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tokenmill.errors import MissingDependencyError, TokenmillError, UsageError
from tokenmill.executors.base import Answer, Begun, Call, CallEvent, Capacity, Loss, Note, Place, resolve
from tokenmill.machine import parse_bytes, usable_cores

__all__ = ["RayExecutor", "keep_stdout_clean"]

OBJECT_STORE_BYTES = 100_000_000
"""Of a cluster that is started here: answers are small, and nothing else goes through it."""
LOOPBACK = "127.0.0.2"
"""For 127.0.0.1 Ray would take the address under which others see the machine."""
CONNECT_SECONDS = 10.0
TAKE_SECONDS = 0.25
CLOSE_SECONDS = 20.0
MOST_WORDS = 400
BUSY = "look for other programs that keep this machine busy, and run the same command again"
STRANGE = "it needs the Ray and the Python that it runs with, and its token where it has one (RAY_AUTH_MODE=token)"
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}
# Calls are the parallelism: libraries must not start thread pools of their own.
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def keep_stdout_clean() -> None:
    """For a program with results on stdout, before it uses Ray, which prints there what it has to say of losses."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")


class RayExecutor:
    """Runs the tasks of a store on a Ray cluster.

    The cluster is the one at `address`, else at the environment's `RAY_ADDRESS`, else one that is started on this
    machine for the run. A program that has called `ray.init` itself uses that. A task asks for CPUs and memory;
    one that is lost with its process or machine is run again up to `max_retries` times.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus_per_task: float = 1,
        memory_per_task: int | str | None = None,
        max_retries: int = 1,
    ) -> None:
        if not num_cpus_per_task > 0:
            raise UsageError(f"num_cpus_per_task {num_cpus_per_task} must be positive")
        if max_retries < 0:
            raise UsageError(f"max_retries {max_retries} must be at least 0")
        memory = (
            parse_bytes(memory_per_task, "memory_per_task") if isinstance(memory_per_task, str) else memory_per_task
        )
        if memory is not None and memory < 1:
            raise UsageError(f"memory_per_task {memory_per_task} must be positive")
        self.memory_per_call = memory
        self._address = address
        self._num_cpus = num_cpus_per_task
        self._max_retries = max_retries
        self._ray: Any = None
        self._is_ours = False
        self._calls: dict[Any, Call] = {}
        self._attempts: dict[str, _Attempts] = {}
        self._mailbox: Any = None
        self._taken = 0.0

    def __str__(self) -> str:
        return "Ray, started on this machine" if self._where == "local" else f"Ray at {self._where}"

    def join(self, num_calls: int | None) -> None:
        """Connect to the cluster; one that is started here has room for so many calls, or uses all cores."""
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

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        """How many calls that take so much memory fit now, and how much each could take with all CPUs in use."""
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
        """Hand a call to Ray, which begins those with the same needs in the order they came in."""
        function = self._run_last_call if call.is_last else self._run_call
        ref = function.options(memory=self.memory_per_call or call.memory_bytes).remote(
            self._mailbox, call.name, call.target, call.payload, is_ours=self._is_ours
        )
        self._calls[ref] = call
        self._attempts[call.name] = _Attempts(call)

    def wait(self, timeout: float) -> list[CallEvent]:
        """What has happened, after at most `timeout` seconds."""
        try:
            return self._wait(timeout)
        except SystemError as error:
            # Ray wraps what a signal handler raises while it waits.
            raise error.__cause__ or error from None

    def _wait(self, timeout: float) -> list[CallEvent]:
        """Notes first, so that a call is known to have begun when its answer comes."""
        refs = list(self._calls)
        ready: list[Any] = []
        if refs:
            self._ray.wait(refs, timeout=timeout, fetch_local=False)
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        events: list[CallEvent] = []
        if ready or time.monotonic() - self._taken > TAKE_SECONDS:
            events += self._take_notes()
        return events + [self._end(ref) for ref in ready if ref in self._calls]

    def close(self) -> None:
        """End all calls, so that none of them writes any more, and leave the cluster; end it if it was started here."""
        ray, self._ray = self._ray, None
        if ray is None:
            if self._is_ours:
                # The start was interrupted.
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
        self._calls, self._attempts, self._mailbox = {}, {}, None
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
            what = "a Ray cluster on this machine" if address == "local" else f"the Ray cluster at {address}"
            verb = "start" if address == "local" else "join"
            advice = BUSY if address == "local" else STRANGE
            raise TokenmillError(f"cannot {verb} {what}: {_reason(error)}; {advice}") from None

    def _take_notes(self) -> list[CallEvent]:
        """What calls have sent; a mailbox that was lost comes back empty, and only notes are missing."""
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
        """Note where a call runs; Ray alone would run one for ever that again and again takes too much memory."""
        lost = attempts.place
        if lost is not None and self._lives(attempts.node):
            attempts.num_deaths += 1
        attempts.node, attempts.place = node, place
        if attempts.num_deaths > self._max_retries:
            ref = next(ref for ref, call in self._calls.items() if call is attempts.call)
            self._ray.cancel(ref, force=True)
            self._forget(ref)
            return self._lose(attempts.call, f"was lost with {lost}")
        return Begun(attempts.call, place, lost)

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
                return Loss(call, how, "install the same tokenmill on all machines of the cluster")
            return Loss(call, f"failed in Ray: {_lines(error)[0]}", "look at the logs of Ray")

    def _lose(self, call: Call, how: str) -> Loss:
        attempts = "1 attempt" if self._max_retries == 0 else f"{self._max_retries + 1} attempts"
        remedy = "give tasks more memory (--memory, or fewer --workers)"
        return Loss(call, f"{how}, the last of {attempts}", remedy)

    def _forget(self, ref: Any) -> None:
        del self._attempts[self._calls.pop(ref).name]


class _Attempts:
    """Where a call runs, and how often its process died on a machine that lives."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.node = ""
        self.place: Place | None = None
        self.num_deaths = 0


class _Mailbox:
    """Where calls leave notes for the run: on its own machine, so that losing another one loses none."""

    def __init__(self) -> None:
        self._notes: list[tuple[str, str, bytes | Place]] = []

    def put(self, name: str, node: str, content: bytes | Place) -> None:
        """Keep a note of a call, or the place where it begins."""
        self._notes.append((name, node, content))

    def take(self) -> list[tuple[str, str, bytes | Place]]:
        """All notes since the last time."""
        notes, self._notes = self._notes, []
        return notes


def _run_call(mailbox: Any, name: str, target: str, payload: bytes, *, is_ours: bool) -> bytes:
    """What Ray runs on a machine of the cluster; the process is ours, unless the program may have other tasks there."""
    import ray

    if is_ours:
        resolve("tokenmill.pipeline.worker:preload")(b"")

    node = ray.get_runtime_context().get_node_id()
    put = mailbox.put.options(num_returns=0)
    machine = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    put.remote(name, node, Place(machine, os.getpid()))
    with _environment(ONE_THREAD):
        answer: bytes = resolve(target)(lambda data: put.remote(name, node, data), payload)
    return answer


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for a while; the process may be somebody else's."""
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
    """Ray itself tries for minutes to reach an address where nobody is."""
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
    """Ray puts its own handler for SIGTERM in place of the run's."""
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
    """What Ray says went wrong: the end of a traceback that it has put into words, or all that it says."""
    cause = error.__cause__ or error
    said = _lines(cause)[-1].split(". ")[0] if "Traceback" in str(cause) else " ".join(_lines(cause))
    return said[:MOST_WORDS]


def _lines(error: BaseException) -> list[str]:
    return [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
