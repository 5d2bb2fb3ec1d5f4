"""A cluster inside this process, for tests of what a run submits to one: the same orders and answers, without Ray."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.running import snapshot, tokenize_here
from tokenmill.display import Display, Silence
from tokenmill.executors.base import Answer, Call, CallEvent, Capacity, Lost, Note, Place, Started, resolve
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import Outcome, run
from tokenmill.pipeline.workers.messages import decode_note

HERE = Place("here", os.getpid())


class Died(BaseException):
    """Ends a call here, as a lost process does on a machine of a cluster."""


class InlineCluster:
    """Runs one call per `wait`, in order of submission; `losses`: how often a call is lost, each time after a task."""

    shares_disk = False

    def __init__(self, num_calls: int = 2, *, losses: dict[str, int] | None = None) -> None:
        self.memory_per_call: int | None = None
        self.may_grow = True
        self.num_calls = num_calls
        self.losses = Counter(losses or {})
        self.calls: list[Call] = []
        self.most_in_flight = 0
        self._queue: deque[Call] = deque()

    def join(self, num_calls: int | None) -> None:
        self.num_calls = self.num_calls if num_calls is None else num_calls

    def pin(self, cpus: Sequence[int]) -> None:
        pass

    def warm(self, target: str, payload: bytes) -> None:
        pass

    def capacity(self, memory_bytes: int = 0) -> Capacity:
        return Capacity(self.num_calls, 4 << 30)

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self._queue.append(call)
        self.most_in_flight = max(self.most_in_flight, len(self._queue))

    def wait(self, timeout: float) -> list[CallEvent]:
        if self.num_calls == 0 or not self._queue:
            time.sleep(0.01)
            return []
        call = self._queue.popleft()
        events: list[CallEvent] = [Started(call, HERE)]

        def post(data: bytes) -> None:
            events.append(Note(call, data))
            if self.losses[call.name] > 0 and decode_note(data).num_tasks:
                self.losses[call.name] -= 1
                raise Died

        try:
            if self.losses[call.name] > 0 and " part " not in call.name:
                raise Died
            events.append(Answer(call, resolve(call.target)(post, call.context, call.payload)))
        except Died:
            events.append(Lost(call, f"was lost with {HERE}, the last of 1 attempt", "give it more"))
        return events

    def close(self) -> None:
        self._queue.clear()


def request_of(inputs: Path | list[str], out: Path, **flags: Any) -> Request:
    names = [f"{inputs}/**" if inputs.is_dir() else str(inputs)] if isinstance(inputs, Path) else inputs
    return Request.from_flags({"inputs": names, "out": str(out), "tokenizer": "bytes", **flags})


def run_inline(request: Request, cluster: InlineCluster, display: Display | None = None) -> Outcome:
    return run(request, display or Silence(), cluster)


def local_store(request: Request, out: Path) -> dict[str, bytes]:
    """The files that the local executor makes for the same request."""
    flags = {name: getattr(request, name) for name in request.__struct_fields__ if name not in ("inputs", "out")}
    tokenize_here(request.inputs, out, **flags)
    return snapshot(out)
