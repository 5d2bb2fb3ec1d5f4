"""What a run needs of every executor: calls are answered, notes come in order, losses are reported and retried."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.inline import InlineCluster
from tests.support.running import ThreadExecutor
from tokenmill.engines import load_tokenizer
from tokenmill.executors.base import Answer, Call, CallEvent, Executor, Lost, Note, Post, Started
from tokenmill.executors.local import LocalExecutor
from tokenmill.pipeline import PRELOAD
from tokenmill.pipeline.workers.engine_cache import EngineKey, warm_engine

ACT = f"{__name__}:act"
REMEMBER = f"{__name__}:remember"
EXECUTORS: dict[str, Any] = {"local": LocalExecutor, "threads": ThreadExecutor, "inline": InlineCluster}

remembered = b"nothing"


def remember(payload: bytes) -> None:
    global remembered
    remembered = payload


def act(post: Post, context: bytes, payload: bytes) -> bytes:
    """Do what the payload says."""
    word, _, rest = payload.partition(b" ")
    if word == b"remembered":
        return remembered
    if word == b"pid":
        return str(os.getpid()).encode()
    if word == b"threads":
        # Those of the fork server, which has forked this process.
        return str(len(os.listdir(f"/proc/{os.getppid()}/task"))).encode()
    if word == b"notes":
        for number in range(int(rest)):
            post(str(number).encode())
    elif word == b"die":
        os.kill(os.getpid(), 9)
    elif word == b"exit":
        os._exit(3)
    elif word == b"once":
        # Die the first time, and leave a file as a sign of it.
        path = Path(rest.decode())
        if not path.exists():
            path.touch()
            os._exit(3)
    elif word == b"busy":
        while True:
            pass
    return context + b" " + payload


@pytest.fixture(params=sorted(EXECUTORS))
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = EXECUTORS[request.param]()
    made.join(None)
    yield made
    made.close()


@pytest.fixture
def local() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    yield made
    made.close()


def call(payload: bytes, name: str = "", **more: Any) -> Call:
    return Call(name or payload.decode(), ACT, b"context", payload, **more)


def collect(executor: Executor, until: type = Answer, count: int = 1, seconds: float = 20.0) -> list[CallEvent]:
    """Events up to a number of one kind."""
    events: list[CallEvent] = []
    deadline = time.monotonic() + seconds
    while sum(isinstance(event, until) for event in events) < count and time.monotonic() < deadline:
        events += executor.wait(0.2)
    return events


def answers(events: list[CallEvent]) -> dict[str, bytes]:
    return {event.call.name: event.data for event in events if isinstance(event, Answer)}


def test_a_call_starts_posts_its_notes_in_order_and_answers(executor: Executor) -> None:
    executor.submit(call(b"notes 3"))
    events = collect(executor)
    assert [type(event) for event in events] == [Started, Note, Note, Note, Answer]
    assert [event.data for event in events if isinstance(event, Note)] == [b"0", b"1", b"2"]
    assert answers(events) == {"notes 3": b"context notes 3"}


def test_every_call_is_answered_once_also_those_that_want_a_process_of_their_own(executor: Executor) -> None:
    for number in range(6):
        executor.submit(call(b"work", f"call {number}", is_last=number % 2 == 0))
    events = collect(executor, count=6)
    assert answers(events) == {f"call {number}": b"context work" for number in range(6)}
    assert sum(isinstance(event, Started) for event in events) == 6


def test_contexts_and_payloads_of_megabytes_arrive_whole(executor: Executor) -> None:
    context, payload = os.urandom(3_000_000), b"x " + os.urandom(2_000_000)
    executor.submit(Call("large", ACT, context, payload))
    executor.submit(Call("other", ACT, b"another context", b"small"))
    found = answers(collect(executor, count=2))
    assert found["large"] == context + b" " + payload
    assert found["other"] == b"another context small"


def test_waiting_returns_when_nothing_happens(executor: Executor) -> None:
    started = time.monotonic()
    assert executor.wait(0.05) == []
    assert time.monotonic() - started < 5


def test_what_was_warmed_is_there_in_every_process(local: LocalExecutor) -> None:
    local.warm(REMEMBER, b"warmth")
    for name in ("one", "two"):
        local.submit(call(b"remembered", name))
    assert answers(collect(local, count=2)) == {"one": b"warmth", "two": b"warmth"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the threads of a process are listed by Linux only")
def test_the_fork_server_has_a_single_thread_when_it_forks(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Path
) -> None:
    monkeypatch.setattr("tokenmill.executors.local.PYTHON", sys.executable)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    tokenizer = load_tokenizer(str(tiny_tokenizer))
    with closing(LocalExecutor()) as fresh:
        fresh.warm(PRELOAD, b"")
        warm_engine(fresh, tiny_tokenizer, EngineKey("gigatoken", "as-text", tokenizer.sha256))
        for name in ("first", "second"):
            fresh.submit(call(b"threads", name, is_last=True))
        assert answers(collect(fresh, count=2)) == {"first": b"1", "second": b"1"}


def test_an_idle_process_is_given_the_next_call_and_a_last_one_ends_with_its_call(local: LocalExecutor) -> None:
    def pid_of(**more: Any) -> int:
        local.submit(call(b"pid", **more))
        return int(answers(collect(local))["pid"])

    first = pid_of()
    last = pid_of(is_last=True)
    assert last != first
    assert pid_of() == first
    deadline = time.monotonic() + 5
    while psutil.pid_exists(last) and time.monotonic() < deadline:
        local.wait(0.05)
    assert not psutil.pid_exists(last)


def test_a_lost_call_is_run_once_more(local: LocalExecutor, tmp_path: Path) -> None:
    local.submit(call(b"once " + str(tmp_path / "trace").encode(), "once"))
    events = collect(local)
    started = [event for event in events if isinstance(event, Started)]
    assert [event.lost is None for event in started] == [True, False]
    assert f"was lost with {started[0].place}, which ended with exit code 3" == started[1].lost
    assert "once" in answers(events)


def test_a_call_that_is_lost_twice_is_reported_with_its_cause_within_seconds(local: LocalExecutor) -> None:
    began = time.monotonic()
    local.submit(call(b"die"))
    local.submit(call(b"exit"))
    lost = {event.call.name: event.how for event in collect(local, Lost, 2) if isinstance(event, Lost)}
    assert "which was killed by SIGKILL, the last of 2 attempts" in lost["die"]
    assert "which ended with exit code 3, the last of 2 attempts" in lost["exit"]
    assert time.monotonic() - began < 10


def test_a_process_that_dies_while_idle_costs_nothing(local: LocalExecutor) -> None:
    local.submit(call(b"pid"))
    pid = int(answers(collect(local))["pid"])
    os.kill(pid, 9)
    time.sleep(0.2)
    assert local.wait(0.1) == []
    local.submit(call(b"pid"))
    assert int(answers(collect(local))["pid"]) != pid


def test_close_ends_busy_processes_and_the_executor_can_be_used_again(local: LocalExecutor) -> None:
    local.submit(call(b"busy"))
    place = next(event.place for event in collect(local, Started) if isinstance(event, Started))
    local.close()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(place.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(place.pid)
    local.join(None)
    local.submit(call(b"again"))
    assert answers(collect(local)) == {"again": b"context again"}


def test_a_killed_fork_server_is_replaced(local: LocalExecutor) -> None:
    local.warm(REMEMBER, b"warmth")
    local.submit(call(b"pid", "first"))
    first = int(answers(collect(local))["first"])
    psutil.Process(first).parent().kill()
    time.sleep(0.2)
    local.submit(call(b"pid", "still there"))
    local.submit(call(b"remembered", "second"))
    found = answers(collect(local, count=2))
    assert found == {"still there": str(first).encode(), "second": b"warmth"}
