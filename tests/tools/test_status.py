"""`status` distinguishes finished, running and dead runs, and says what to do next."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.conftest import write_jsonl
from tests.support.running import jsonl, start, tokenmill
from tokenmill.display import Machine, Snapshot, WorkerMoment
from tokenmill.display.monitor import render_machine
from tokenmill.errors import DataError, StoreError
from tokenmill.pipeline.journal.attempts import AttemptInfo
from tokenmill.pipeline.tokenize_any import tokenize
from tokenmill.tools.status import find_status, read_status
from tokenmill.tools.status_view import render_status


def draw(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None, highlight=False)
    console.print(render_status(read_status(folder)))
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(cell_len(line) for line in shown.replace(str(folder), "data/tok").split("\n")) <= 80
    return shown


def make_attempt(
    *, pid: int = 4242, completed: bool | None = None, done: int = 430, seconds_ago: float = 1.0
) -> AttemptInfo:
    moment = Snapshot(
        seconds=10.0,
        total_bytes=1_000_000_000,
        done_bytes=done * 1_000_000,
        resumed_bytes=0,
        num_text_bytes=done * 1_000_000,
        num_documents=12_345,
        num_tokens=98_765_432,
        num_rejects=7,
        num_workers=2,
        num_tasks_done=19,
        memory_bytes=612_000_000,
        memory_limit=4_000_000_000,
        bottleneck="encode",
        input_rate=40e6,
        text_rate=40e6,
        token_rate=9.9e6,
    )
    started = time.time() - 10.0 - seconds_ago
    return AttemptInfo(
        pid=pid,
        started=started,
        completed=completed,
        peak_memory_bytes=700_000_000,
        num_recycled=3,
        num_retried=1,
        last=moment,
    )


def begin(folder: Path, *attempts: AttemptInfo) -> None:
    (folder / ".tasks").mkdir(exist_ok=True)
    if attempts:
        (folder / ".tasks" / "progress.json").write_bytes(msgspec.json.encode(attempts))


@contextmanager
def held(folder: Path, pid: int) -> Iterator[None]:
    """As a run holds its directory."""
    with (folder / ".lock").open("w+b", buffering=0) as lock:
        lock.write(str(pid).encode())
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_finished_store_shows_how_its_run_went(tiny_store: Path) -> None:
    status = read_status(tiny_store)
    assert status.state == "finished"
    assert (status.num_documents, status.num_rejects) == (300, 2)
    shown = draw(tiny_store)
    assert "finished" in shown
    assert "300 documents" in shown
    assert re.search(r"\d [kM]?B/s of text, .*; start-up \d+\.\d s", shown)
    assert f"tokenmill inspect {tiny_store}" in shown.replace("\n", "")


def test_a_finished_store_without_or_with_a_damaged_run_json_still_has_a_status(tiny_store: Path) -> None:
    (tiny_store / "run.json").write_bytes(b"\xff{}")
    assert "run.json is damaged" in draw(tiny_store)
    (tiny_store / "run.json").unlink()
    assert "no run.json" in draw(tiny_store)


def test_a_running_store_shows_how_far_it_is(tmp_path: Path) -> None:
    begin(tmp_path, make_attempt(done=430))
    with held(tmp_path, 4242):
        shown = draw(tmp_path)
    assert "running" in shown
    assert "4242" in shown
    assert "43.0% of 1.00 GB, 00:14 left" in shown
    assert "40 MB/s of text" in shown
    assert "9.9M tokens/s, mostly encode" in shown
    assert "12,345 documents, 98,765,432 tokens, 7 rejects" in shown
    assert "612 MB now, 700 MB at most, of 4.00 GB" in shown
    assert "2 workers busy" in shown
    assert "the same command resumes it" in shown


def test_a_run_that_died_says_where_it_stopped_and_how_to_resume(tmp_path: Path) -> None:
    begin(tmp_path, make_attempt(completed=False, done=200), make_attempt(done=430))
    (tmp_path / ".lock").write_bytes(b"1")
    status = read_status(tmp_path)
    assert status.state == "stopped"
    assert len(status.attempts) == 2
    shown = draw(tmp_path)
    said = " ".join(shown.split())
    assert "Stopped at 43%. It was killed, or the machine went down, at about" in said
    assert "To resume, run the same tokenize command again." in said
    assert "2, 00:20 in all, 2 dead workers replaced, 6 caches recycled" in shown
    assert "left" not in shown


def test_a_lock_left_by_a_dead_process_does_not_count_even_if_its_process_id_is_in_use(tmp_path: Path) -> None:
    begin(tmp_path, make_attempt(pid=os.getpid()))
    (tmp_path / ".lock").write_bytes(str(os.getpid()).encode())
    assert read_status(tmp_path).state == "stopped"


def test_a_run_that_has_not_begun_to_work_is_starting(tmp_path: Path) -> None:
    begin(tmp_path)
    with held(tmp_path, 77):
        assert read_status(tmp_path).is_starting
        assert "77, starting" in draw(tmp_path)
    assert "Stopped before its first task was done" in draw(tmp_path)


def test_a_run_that_continues_another_one_is_starting_until_it_reports(tmp_path: Path) -> None:
    begin(tmp_path, make_attempt(pid=1, completed=False))
    with held(tmp_path, 77):
        status = read_status(tmp_path)
        assert (status.state, status.is_starting, status.pid) == ("running", True, 77)


def test_a_run_that_is_silent_or_ending_says_so(tmp_path: Path) -> None:
    with held(tmp_path, 4242):
        begin(tmp_path, make_attempt(seconds_ago=100))
        assert "silent for 01:40" in draw(tmp_path)
        begin(tmp_path, make_attempt(completed=True, done=1000))
        assert "writes the manifest" in draw(tmp_path)


def test_looking_does_not_take_the_lock(tmp_path: Path) -> None:
    begin(tmp_path, make_attempt())
    (tmp_path / ".lock").write_bytes(b"1")
    read_status(tmp_path)
    with (tmp_path / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_progress_file_that_is_half_written_is_no_error(tmp_path: Path) -> None:
    begin(tmp_path, make_attempt())
    path = tmp_path / ".tasks" / "progress.json"
    path.write_bytes(path.read_bytes()[:50])
    assert read_status(tmp_path).attempts == []


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a token store"):
        read_status(tmp_path)
    with pytest.raises(StoreError, match="does not exist; make a store with: tokenmill tokenize"):
        read_status(tmp_path / "nowhere")


def test_a_real_run_is_seen_running_then_stopped_then_finished(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["a line of some text " * 50] * 24_000)
    out = tmp_path / "store"
    script = (
        "import sys; from tokenmill.pipeline.tokenize_any import tokenize; "
        "tokenize(sys.argv[1], sys.argv[2], tokenizer='bytes', task_bytes=500_000, workers=1)"
    )
    command = [sys.executable, "-c", script, str(path), str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (out / ".tasks" / "progress.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        status = read_status(out)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (status.state, status.pid) == ("running", process.pid)
    assert read_status(out).state == "stopped"
    subprocess.run(command, check=True, timeout=60)
    status = read_status(out)
    assert (status.state, status.num_documents) == ("finished", 24_000)
    assert len(status.attempts) == 2


def test_a_run_that_ended_early_says_why(tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "bad.jsonl"
    corpus.write_text('{"text": "good"}\n' * 4000 + "{bad\n")
    with pytest.raises(DataError):
        tokenize(corpus, tmp_path / "store", tokenizer=str(tiny_tokenizer), task_bytes="20KB", workers=1)
    assert "It said: bad.jsonl line 4001: not JSON" in " ".join(draw(tmp_path / "store").split())


def test_a_run_that_ended_before_its_first_task_was_done_says_why_too(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "bad.jsonl", ["good"])
    with (tmp_path / "bad.jsonl").open("a") as file:
        file.write('{"body": "a text"}\n')
    with pytest.raises(DataError):
        tokenize("bad.jsonl", tmp_path / "store", tokenizer=str(tiny_tokenizer), workers=1)
    said = " ".join(draw(tmp_path / "store").split())
    assert "Stopped before its first task was done. It said: bad.jsonl line 2: no field 'text'" in said


def test_a_run_that_was_interrupted_does_not_give_its_advice_twice(tmp_path: Path) -> None:
    attempt = make_attempt(completed=False)
    reason = f"stopped by SIGINT; run the same command again to continue {tmp_path}"
    begin(tmp_path, msgspec.structs.replace(attempt, reason=reason))
    said = " ".join(draw(tmp_path).split())
    assert "Stopped at 43%. It said: stopped by SIGINT. To resume, run the same tokenize command again." in said


def test_a_running_status_shows_the_machine(tmp_path: Path) -> None:
    machine = Machine(
        cores=[0.99, 0.2],
        disk_free=10**10,
        stages={"read": 0.1, "encode": 0.9},
        workers=[
            WorkerMoment(
                name="worker 1", pid=7, task="00000-0001", input="a.jsonl", task_seconds=3.0, bytes_per_second=9e7
            ),
            WorkerMoment(name="worker 2", pid=8, task="", input="", task_seconds=0.0, bytes_per_second=8e7),
        ],
        slowest_task="00000-0000",
        slowest_input="b" * 60,
        slowest_seconds=4.0,
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_machine(msgspec.structs.replace(make_attempt().last, machine=machine)))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("99%", "20%", "encode 90%", "worker 1", "90", "idle", "00:04", "10.00 GB free"):
        assert part in shown
    many = Machine(
        cores=[0.5] * 64,
        disk_free=1,
        stages={},
        workers=[machine.workers[0]] * 64,
        slowest_task="",
        slowest_input="",
        slowest_seconds=0.0,
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_machine(msgspec.structs.replace(make_attempt().last, machine=many)))
    shown = console.export_text()
    assert "50% of 64 cores, 0 idle" in shown and "and 52 faster workers" in shown


def test_watching_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    out = tmp_path / "out"
    assert find_status(out) is None
    watching = start("status", out, "--watch")
    time.sleep(1.0)
    assert watching.poll() is None
    tokenize(tmp_path / "a.jsonl", out, tokenizer="bytes")
    shown, errors = watching.communicate(timeout=30)
    assert (watching.returncode, errors) == (0, "")
    assert shown.startswith(("waiting for a run in", "finished"))
    assert "1 tokens" in shown or "2 tokens" in shown


def test_a_directory_that_is_no_store_is_not_waited_for(tmp_path: Path) -> None:
    assert find_status(tmp_path) is None
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(StoreError, match="is not a token store"):
        find_status(tmp_path)


def test_a_stopped_run_shows_its_command(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_bytes(jsonl(["x"]) + b"{broken\n")
    done = tokenmill("tokenize", "a b.jsonl", "-o", "out", "--tokenizer", "bytes", cwd=tmp_path)
    assert done.returncode == 1
    assert "To resume, run: tokenmill tokenize 'a b.jsonl' -o out --tokenizer bytes" in draw(tmp_path / "out").replace(
        "\n", " "
    ).replace("  ", " ")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("this user may mount no disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_foreseen_and_named(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * 1000] * 5000))
    done = tokenmill("tokenize", tmp_path / "a.jsonl", "-o", small_disk / "out", "--tokenizer", "bytes")
    assert re.search(r"the store may take \d+ MB more, and 2 MB are free", done.stderr)
    assert "No space left on device" in done.stderr
    assert "It said: No space left on device" in draw(small_disk / "out").replace("\n", " ")


def test_a_disk_without_room_for_one_byte_is_named(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]))
    (small_disk / "out").mkdir()
    with suppress(OSError), (small_disk / "others").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    done = tokenmill("tokenize", tmp_path / "a.jsonl", "-o", small_disk / "out", "--tokenizer", "bytes")
    assert "No space left on device" in done.stderr
    with pytest.raises(StoreError, match="its disk is full"):
        read_status(small_disk / "out")
