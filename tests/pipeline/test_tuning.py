"""Pinning and profiling: run flags that change only the speed of a run, or what it reports."""

from __future__ import annotations

import os
import pstats
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import make_texts, write_jsonl
from tokenmill import machine
from tokenmill.display import Silence
from tokenmill.errors import UsageError
from tokenmill.executors.base import CallEvent, Started
from tokenmill.executors.local import LocalExecutor
from tokenmill.machine import physical_cpus
from tokenmill.pipeline.request import Request
from tokenmill.pipeline.run import run
from tokenmill.pipeline.tokenize_any import tokenize


class Looking(LocalExecutor):
    """Real processes; records on which CPUs each of them may run."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: dict[str, set[int]] = {}

    def wait(self, timeout: float) -> list[CallEvent]:
        events = super().wait(timeout)
        for event in events:
            if isinstance(event, Started):
                with suppress(ProcessLookupError):
                    self.allowed[event.place.name] = os.sched_getaffinity(event.place.pid)
        return events


@pytest.mark.parametrize("flag", ["affinity", "numa"])
def test_each_worker_stays_on_a_core_of_its_own(tmp_path: Path, tiny_tokenizer: Path, flag: str) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(800, seed=3))
    flags = {"inputs": [str(corpus)], "tokenizer": str(tiny_tokenizer), "workers": 2, "task_bytes": "20KB"}
    executor = Looking()
    pinned = run(Request.from_flags({**flags, "out": str(tmp_path / "pinned"), flag: True}), Silence(), executor)
    cpus = physical_cpus(across_nodes=flag == "numa")
    seen = [allowed for name, allowed in sorted(executor.allowed.items()) if name.startswith("worker")]
    assert len(seen) == 2
    assert seen == [{cpus[0]}, {cpus[1 % len(cpus)]}]
    free = run(Request.from_flags({**flags, "out": str(tmp_path / "free")}), Silence())
    assert pinned.manifest == free.manifest


def test_physical_cores_take_turns_between_memory_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7, 9})
    monkeypatch.setattr(machine, "_core_siblings", lambda cpu: str(cpu % 8))
    monkeypatch.setattr(
        machine, "_memory_nodes", lambda: [machine._parse_cpus("0-3,8-11"), machine._parse_cpus("4-7\n")]
    )
    assert physical_cpus() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert physical_cpus(across_nodes=True) == [0, 4, 1, 5, 2, 6, 3, 7]
    monkeypatch.setattr(machine, "_memory_nodes", list)
    assert physical_cpus(across_nodes=True) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_profile_that_could_not_be_written_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    flags = {"inputs": ["a.jsonl"], "out": str(tmp_path / "out"), "tokenizer": "bytes"}
    with pytest.raises(UsageError, match=f"--profile {tmp_path}/no/w.txt: there is no directory {tmp_path}/no"):
        Request.from_flags({**flags, "profile": str(tmp_path / "no" / "w.txt")})


def test_one_worker_is_profiled(tmp_path: Path, tiny_tokenizer: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(300, seed=3))
    for name in ("worker.txt", "worker.prof"):
        tokenize(corpus, tmp_path / name[-4:], tokenizer=str(tiny_tokenizer), profile=str(tmp_path / name), workers=2)
    assert "encode_batch" in (tmp_path / "worker.txt").read_text()
    functions = {function for _, _, function in pstats.Stats(str(tmp_path / "worker.prof")).stats}  # type: ignore[attr-defined]
    assert "_encode_texts" in functions
