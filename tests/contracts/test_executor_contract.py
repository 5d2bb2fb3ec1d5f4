"""What a run needs of every executor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from tokenmill.executors.base import Death, Executor, Message
from tokenmill.executors.local import LocalExecutor

ECHO = "tests.contracts.test_executor_contract:echo"
WARM = "tests.contracts.test_executor_contract:remember"
EXECUTORS = {"local": LocalExecutor}

remembered = b"nothing"


def remember(payload: bytes) -> None:
    global remembered
    remembered = payload


def echo(channel: object, payload: bytes) -> None:
    """Answer every message; obey a few."""
    channel.send_bytes(b"hello " + payload)
    while True:
        message = channel.recv_bytes()
        if message == b"remembered":
            channel.send_bytes(remembered)
        elif message == b"die":
            os.kill(os.getpid(), 9)
        elif message == b"fail":
            os._exit(3)
        elif message == b"busy":
            while True:
                pass
        else:
            channel.send_bytes(message.upper())


@pytest.fixture(params=sorted(EXECUTORS))
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made = EXECUTORS[request.param]()
    yield made
    made.close()


def wait_for(executor: Executor, count: int, seconds: float = 20.0) -> list[Message | Death]:
    events: list[Message | Death] = []
    deadline = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < deadline:
        events += executor.wait(0.2)
    return events


def test_messages_go_both_ways_in_order(executor: Executor) -> None:
    worker = executor.launch("one", ECHO, b"payload")
    for word in (b"a", b"b", b"c"):
        worker.send(word)
    events = wait_for(executor, 4)
    assert [event.data for event in events] == [b"hello payload", b"A", b"B", b"C"]
    assert all(event.worker is worker for event in events)


def test_a_payload_of_megabytes_arrives_whole(executor: Executor) -> None:
    payload = os.urandom(3_000_000)
    executor.launch("one", ECHO, payload)
    assert wait_for(executor, 1)[0].data == b"hello " + payload


def test_what_was_warmed_is_there_in_every_worker(executor: Executor) -> None:
    executor.warm(WARM, b"warmth")
    workers = [executor.launch(f"worker {i}", ECHO, b"") for i in range(2)]
    for worker in workers:
        worker.send(b"remembered")
    assert sorted(event.data for event in wait_for(executor, 4)) == [b"hello ", b"hello ", b"warmth", b"warmth"]


def test_a_death_is_told_with_its_cause_within_seconds(executor: Executor) -> None:
    killed, failed = executor.launch("killed", ECHO, b""), executor.launch("failed", ECHO, b"")
    wait_for(executor, 2)
    started = time.monotonic()
    killed.send(b"die")
    failed.send(b"fail")
    deaths = {event.worker.name: event.how for event in wait_for(executor, 2)}
    assert deaths == {"killed": "was killed by SIGKILL", "failed": "ended with exit code 3"}
    assert time.monotonic() - started < 5


def test_sending_to_a_dead_worker_does_not_raise(executor: Executor) -> None:
    worker = executor.launch("one", ECHO, b"")
    wait_for(executor, 1)
    worker.kill()
    time.sleep(0.2)
    worker.send(b"anybody")
    assert isinstance(wait_for(executor, 1)[0], Death)


def test_close_ends_busy_workers(executor: Executor) -> None:
    worker = executor.launch("one", ECHO, b"")
    wait_for(executor, 1)
    worker.send(b"busy")
    executor.close()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(worker.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(worker.pid)


def test_a_killed_nursery_is_replaced() -> None:
    executor = LocalExecutor()
    try:
        executor.warm(WARM, b"warmth")
        first = executor.launch("first", ECHO, b"")
        wait_for(executor, 1)
        psutil.Process(first.pid).parent().kill()
        time.sleep(0.2)
        second = executor.launch("second", ECHO, b"")
        second.send(b"remembered")
        assert [event.data for event in wait_for(executor, 2)] == [b"hello ", b"warmth"]
        first.send(b"still there")
        assert wait_for(executor, 1)[0].data == b"STILL THERE"
    finally:
        executor.close()
