"""Failures around a run: kills, a full disk, files that cannot be read or written."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tokenmill as tm
from tests.conftest import make_texts
from tests.faults.kills import torment
from tests.support.running import jsonl, sentence, snapshot, start, tokenmill, wait_for

IS_ROOT = os.geteuid() == 0


def test_ten_kills_at_random_instants_change_nothing(tmp_path: Path) -> None:
    tally = torment(tmp_path, 10, tokenizer="bytes")
    assert tally["group"] + tally["parent"] + tally["one"] >= 10
    assert tally["stores compared"] >= 1


# Processes that die while the rest of the run lives.


class SlowRun:
    """A run whose tasks have several blocks of a quarter of a second, so that a worker can be killed in one."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.path = folder / "a.jsonl"
        self.path.write_bytes(jsonl(make_texts(6000, seed=2, longest=400) * 4))
        self.flags = ["--tokenizer", str(tokenizer), "--engine", "huggingface", "--task-bytes", "2MB"]
        done = tokenmill("tokenize", self.path, "-o", folder / "undisturbed", *self.flags)
        assert done.returncode == 0, done.stderr
        self.expected = snapshot(folder / "undisturbed")

    def start(self, out: Path, *flags: str) -> subprocess.Popen[str]:
        return start("tokenize", self.path, "-o", out, *self.flags, "--workers", "2", *flags)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> SlowRun:
    return SlowRun(tmp_path_factory.mktemp("slow"), tiny_tokenizer)


def workers_at_work(out: Path) -> dict[int, str]:
    """The processes that are writing shards, and their tasks: both are in the temporary names."""
    names = [
        re.fullmatch(r"shard-(\d+-\d+)\.bin\.[0-9a-f]+\.([0-9a-f]+)\.tmp", path.name)
        for path in (out / "train").glob("*.tmp")
    ]
    return {int(name[2], 16): name[1] for name in names if name}


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def test_a_worker_that_is_killed_is_named_and_its_task_is_done_by_another(slow_run: SlowRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = slow_run.start(out)
    pid, task = next(iter(wait_for(lambda: workers_at_work(out)).items()))
    kill(pid)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert re.search(
        rf"task {task} of a\.jsonl was lost with worker \d+ \(process {pid}\), which was killed by SIGKILL; trying it again",
        errors,
    )
    assert "Traceback" not in errors
    assert snapshot(out) == slow_run.expected
    assert json.loads((out / "run.json").read_bytes())["attempts"][0]["num_retried"] == 1


def test_a_task_that_kills_two_workers_ends_the_run_and_is_named(slow_run: SlowRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = slow_run.start(out)
    task = next(iter(wait_for(lambda: workers_at_work(out)).values()))
    while process.poll() is None:
        for pid, at in workers_at_work(out).items():
            if at == task:
                kill(pid)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert re.search(
        rf"task {task} of a\.jsonl was lost with .* killed by SIGKILL, the last of 2 attempts; give ", last
    )
    assert "Traceback" not in errors
    assert not list(out.rglob("*.tmp"))
    assert tokenmill("tokenize", slow_run.path, "-o", out, *slow_run.flags).returncode == 0
    assert snapshot(out) == slow_run.expected


def test_orphans_end_by_themselves_when_the_parent_is_killed(slow_run: SlowRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = slow_run.start(out)
    wait_for(lambda: workers_at_work(out))
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    _, errors = process.communicate(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert "Traceback" not in errors


def test_a_new_run_waits_until_the_workers_of_a_killed_one_are_gone(slow_run: SlowRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = slow_run.start(out)
    pid = next(iter(wait_for(lambda: workers_at_work(out))))
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        left = {path.name for path in (out / "train").glob(f"*.{pid:x}.tmp")}
        assert left
        first.kill()
        first.wait(10)
        second = slow_run.start(out)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(2.5)
        assert {path.name for path in (out / "train").glob("*.tmp")} >= left, "it did not wait"
    finally:
        os.kill(pid, signal.SIGCONT)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert snapshot(out) == slow_run.expected


def test_the_process_that_workers_come_from_is_started_again(slow_run: SlowRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = slow_run.start(out)
    pid = next(iter(wait_for(lambda: workers_at_work(out))))
    server = psutil.Process(pid).parent()
    assert server is not None
    assert server.ppid() == process.pid
    server.kill()
    kill(pid)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert snapshot(out) == slow_run.expected


# Directories that cannot be written.


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with the given options, or changes its options."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounted: list[str] = []

    def change(options: str) -> Path:
        options = f"remount,{options}" if mounted else options
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip(f"mount is not possible here: {done.stderr.decode().strip()}")
        mounted.append(options)
        return folder

    if not IS_ROOT or sys.platform != "linux":
        pytest.skip("mount needs root on Linux")
    yield change
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """JSON lines of 600 kB with a bad one at each end, and the store of a run over them."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_bytes(b"broken\n" + jsonl(["x" * 5_990] * 100) + b"broken\n")
    store = tm.tokenize(folder / "a.jsonl", folder / "out", tokenizer="bytes", task_bytes=60_000, on_error="skip")
    return folder / "a.jsonl", snapshot(store.path)


def arguments(path: Path, out: Path) -> list[str]:
    flags = ["--tokenizer", "bytes", "--task-bytes", "60kB", "--on-error", "skip", "--workers", "2"]
    return ["tokenize", str(path), "-o", str(out), *flags]


@pytest.mark.parametrize("options", ["nr_inodes=2", "nr_inodes=9", "size=12k", "size=700k"])
def test_a_full_disk_is_one_sentence_and_more_room_lets_the_run_finish(
    options: str, mount: Callable[[str], Path], corpus: tuple[Path, dict[str, bytes]]
) -> None:
    path, expected = corpus
    out = mount(options) / "out"
    for _ in range(2):
        done = tokenmill(*arguments(path, out))
        assert done.returncode == 1
        assert f"No space left on device ({out}" in sentence(done)
        assert "; free some space, then run the same command again" in sentence(done)
        assert not list(out.rglob("*.tmp"))
    mount("size=50m,nr_inodes=10000")
    done = tokenmill(*arguments(path, out))
    assert done.returncode == 0, done.stderr
    assert snapshot(out) == expected


def test_a_limit_on_file_sizes_is_one_sentence_and_can_be_lifted(
    tmp_path: Path, corpus: tuple[Path, dict[str, bytes]]
) -> None:
    path, expected = corpus
    done = tokenmill(
        *arguments(path, tmp_path / "out"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 1
    assert f"File too large ({tmp_path / 'out'}" in sentence(done)
    assert "(ulimit -f), then run the same command again" in sentence(done)
    assert not list(tmp_path.rglob("*.tmp"))
    assert tokenmill(*arguments(path, tmp_path / "out")).returncode == 0
    assert snapshot(tmp_path / "out") == expected


def test_a_read_only_directory_is_one_sentence(
    mount: Callable[[str], Path], corpus: tuple[Path, dict[str, bytes]]
) -> None:
    path, expected = corpus
    out = mount("size=50m") / "out"
    done = tokenmill(*arguments(path, out), "--max-errors", "0")
    assert done.returncode == 1
    mount("ro")
    for target in (out, out.parent / "new"):
        done = tokenmill(*arguments(path, target))
        assert done.returncode == 1
        assert f"{target} cannot be written" in sentence(done)
    mount("rw")
    assert tokenmill(*arguments(path, out)).returncode == 0
    assert snapshot(out) == expected
    mount("ro")
    done = tokenmill(*arguments(path, out))
    assert (done.returncode, f"{out} is already finished" in done.stdout) == (0, True), done.stderr
    assert "made with --seed 0; this run has 1" in sentence(tokenmill(*arguments(path, out), "--seed", "1"))
    assert "cannot be written" in sentence(tokenmill(*arguments(path, out), "--overwrite"))


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_directory_without_permission_is_one_sentence(tmp_path: Path, corpus: tuple[Path, dict[str, bytes]]) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    for target in (folder, folder / "new"):
        done = tokenmill(*arguments(corpus[0], target))
        assert done.returncode == 1
        assert f"{target} cannot be written" in sentence(done)


# Files that cannot be read, and budgets that cannot work.


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))
    unreadable = {
        "none/such.jsonl": "does not exist",
        "fifo.jsonl": "not a regular file",
        "link.jsonl": "does not exist",
    }
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone")
    if sys.platform == "linux":
        # By its status this is a regular file, and every read of its start fails.
        (tmp_path / "memory.jsonl").symlink_to("/proc/self/mem")
        unreadable["memory.jsonl"] = "cannot be read: Input/output error"
    if not IS_ROOT:
        (tmp_path / "secret.jsonl").touch(0o000)
        unreadable["secret.jsonl"] = "cannot be read: Permission denied"
    for name, reason in unreadable.items():
        for mode in ("fail", "skip"):
            with pytest.raises(tm.TokenmillError, match=rf"{name}:? .*{reason}"):
                tm.tokenize([str(path), str(tmp_path / name)], tmp_path / "out", tokenizer="bytes", on_error=mode)
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in capfd.readouterr().err


GARBAGE: dict[str, bytes] = {
    "tokenizer.json": b"\xff\xfe\x00 garbage",
    "array/tokenizer.json": b"[1, 2]",
    "empty/tokenizer.json": b"",
    "odd/tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
    "type/tokenizer.json": b'{"model": {"type": "Nope", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}',
    "ids/tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}}',
    "list/tokenizer.json": b'{"model": {"type": "BPE", "vocab": [1, 2], "merges": []}}',
    "added/tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [1]}',
    "garbage.model": b"\x00\x01\x02 not a model",
    "cl100k_base.tiktoken": b"not base64 !!\n",
    "other.bin": b"123",
    "folder/readme.md": b"no tokenizer here",
}


def test_a_tokenizer_that_is_garbage_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))
    for name, data in GARBAGE.items():
        file = tmp_path / "tokenizers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        spec = file.parent if name.startswith("folder/") else file
        with pytest.raises(tm.TokenmillError) as caught:
            tm.tokenize(path, tmp_path / name.replace("/", "-"), tokenizer=str(spec), eos=False)
        message = str(caught.value)
        assert any(part in message for part in (file.name, str(spec), f"tokenizer{file.suffix}")), (name, message)
        assert "\n" not in message
        errors = capfd.readouterr().err
        assert "Traceback" not in errors, (name, errors)


def test_a_memory_budget_that_is_too_small_says_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))
    flags: dict[str, Any] = {"tokenizer": "bytes"}
    with pytest.raises(tm.UsageError, match=r"--memory 50MB is too small for 1 worker .* needs \d+ MB"):
        tm.tokenize(path, tmp_path / "out", memory="50MB", **flags)
    with pytest.raises(tm.UsageError, match=r"--memory 600MB is too small for 9 workers .* needs [\d.]+ GB"):
        tm.tokenize(path, tmp_path / "out", memory="600MB", workers=9, **flags)
    assert tm.tokenize(path, tmp_path / "out", memory="600MB", **flags).num_documents == 1
