"""Stores that are written to a bucket: the same bytes as on a disk, after any kill, from any number of runs at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tokenmill as tm
from tests.cluster.inline import InlineCluster, local_store, request_of, run_inline
from tests.conftest import make_texts, write_jsonl
from tests.executors.test_ray_executor import make_corpus
from tests.support.object_server import FaultyProxy
from tests.support.program import Program
from tests.support.running import command, sentence, snapshot, tokenmill
from tokenmill.errors import StoreError, UsageError
from tokenmill.pipeline.journal.attempts import AttemptInfo
from tokenmill.pipeline.journal.mirror import scratch_directory
from tokenmill.pipeline.workers import attempt, worker
from tokenmill.remote import split_url
from tokenmill.tools.status import read_status
from tokenmill.tools.verify import verify

TASK_BYTES = 20_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects") / "corpus"
    texts = make_texts(600, seed=9)
    write_jsonl(folder / "a.jsonl", texts[:400])
    path = write_jsonl(folder / "b.jsonl", texts[400:])
    path.write_text(path.read_text() + '{"no": "text"}\n')
    (folder / "c.txt").write_text("plain words\n" * 3000)
    return folder


def flags(**more: Any) -> dict[str, Any]:
    return {
        "tokenizer": "bytes",
        "task_bytes": TASK_BYTES,
        "workers": 2,
        "val_fraction": 0.1,
        "on_error": "skip",
        **more,
    }


def objects(url: str) -> dict[str, bytes]:
    bucket, prefix = split_url(url)
    infos = bucket.list(prefix)
    return {info.key[len(prefix) + 1 :]: bucket.read(info.key) for info in infos if not info.key.endswith("run.json")}


@pytest.fixture(scope="module")
def local(corpus: Path) -> Path:
    """The same store on a disk."""
    tm.tokenize(f"{corpus}/**", corpus.parent / "local", **flags())
    return corpus.parent / "local"


@pytest.fixture(scope="module")
def expected(local: Path) -> dict[str, bytes]:
    return snapshot(local)


def arguments(corpus: Path, url: str) -> list[str]:
    return [
        *("tokenize", f"{corpus}/**", "-o", url, "--tokenizer", "bytes", "--task-bytes", str(TASK_BYTES)),
        *("--workers", "2", "--val-fraction", "0.1", "--on-error", "skip"),
    ]


def test_a_store_in_a_bucket_has_the_bytes_of_one_on_a_disk(
    tmp_path: Path, corpus: Path, s3: str, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/stores/tok"
    (tmp_path / "scratch").mkdir()
    store = tm.tokenize(f"{corpus}/**", url, **flags(scratch=str(tmp_path / "scratch")))
    assert objects(url) == expected
    assert not list((tmp_path / "scratch").iterdir()), "nothing is left in the scratch directory"
    assert store.num_documents > 500
    again = tokenmill(*arguments(corpus, url))
    assert again.returncode == 0, again.stderr
    assert f"{url} is already finished" in again.stdout
    with pytest.raises(StoreError, match=f"^{url} was made with --eos"):
        tm.tokenize(f"{corpus}/**", url, **flags(eos=False))
    assert objects(url) == expected


def test_a_killed_run_is_continued_from_the_bucket(
    tmp_path: Path,
    corpus: Path,
    s3: str,
    faulty: FaultyProxy,
    expected: dict[str, bytes],
) -> None:
    url = f"{s3}/tok"
    faulty.delay = 0.05
    bucket, prefix = split_url(url)
    process = Program(
        command(*arguments(corpus, url)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if len([info for info in bucket.list(f"{prefix}/.tasks") if info.key[-6].isdigit()]) > 2:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    entries = [info.key for info in bucket.list(f"{prefix}/.tasks") if info.key[-6].isdigit()]
    assert entries, "some tasks were done before the kill"
    assert not bucket.exists(f"{prefix}/manifest.json")
    bucket.put(f"{prefix}/train/shard-99999-0000.bin", b"an orphan")
    faulty.delay = 0
    assert list(tmp_path.glob("tokenmill-scratch-*")), "a kill leaves its scratch directory"
    done = tokenmill(*arguments(corpus, url), env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("tokenmill-scratch-*"))
    assert "tasks are already done" in done.stderr
    assert objects(url) == expected


def test_faults_change_no_byte(corpus: Path, s3: str, faulty: FaultyProxy, expected: dict[str, bytes]) -> None:
    faulty.rate = 0.4
    tm.tokenize(f"{corpus}/**", f"{s3}/tok", **flags())
    faulty.rate = 0
    assert sum(faulty.counts[fault] for fault in faulty.faults) > 15
    assert objects(f"{s3}/tok") == expected


@pytest.mark.slow
def test_two_runs_at_once_make_one_store(corpus: Path, s3: str, expected: dict[str, bytes]) -> None:
    url = f"{s3}/tok"
    runs = [
        Program(command(*arguments(corpus, url)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for run in runs:
        _, said = run.communicate(timeout=100)
        assert run.returncode == 0, said
    assert objects(url) == expected


def test_ranks_without_a_common_disk_make_one_store(corpus: Path, s3: str, expected: dict[str, bytes]) -> None:
    url = f"{s3}/tok"
    stores = [tm.tokenize(f"{corpus}/**", url, rank=rank, world_size=3, **flags()) for rank in (1, 0, 2)]
    assert [store is None for store in stores] == [True, True, False]
    assert objects(url) == expected


@pytest.mark.parametrize("losses", [{}, {"00001 part 0": 2}], ids=["undisturbed", "lost"])
def test_a_cluster_without_a_common_disk_makes_the_same_store(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, losses: dict[str, int]
) -> None:
    """A lost stream is resumed after its published tasks, which are listed in the bucket only."""
    monkeypatch.setattr(attempt, "FAR_NOTE_SECONDS", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    corpus = make_corpus(tmp_path / "corpus")
    several = {"task_bytes": "12kB", "on_error": "skip", "keep_keys": ["id"], "workers": 8, "val_fraction": 0.1}
    request = request_of(corpus, tmp_path / "out", **several)
    outcome = run_inline(msgspec.structs.replace(request, out=f"{s3}/tok"), InlineCluster(losses=losses))
    assert outcome.manifest is not None
    assert outcome.manifest.num_rejects == 2
    assert objects(f"{s3}/tok") == local_store(request, tmp_path / "local")
    worker._here.worker.close()
    assert not list(tmp_path.glob("tokenmill-scratch-*"))


def test_status_and_finish_of_ranks_that_have_no_disk_in_common(
    corpus: Path, s3: str, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/tok"
    assert tm.tokenize(f"{corpus}/**", url, rank=0, world_size=2, **flags()) is None
    status = read_status(url)
    assert (status.folder, status.state) == (url, "stopped")
    assert [rank.state for rank in status.ranks] == ["done", "not begun"]
    assert status.last is not None
    assert 0 < status.last.fraction < 1
    bucket, prefix = split_url(url)
    bucket.put(f"{prefix}/train/shard-00000-0777.bin", b"an orphan")
    assert read_status(url).notes == [
        "orphans of unfinished tasks: 1 file, 9 B; the next run writes them again or removes them"
    ]
    done = tokenmill("finish", url)
    assert sentence(done).startswith(f"{url} is not complete: ")
    assert "with --world-size 2 and --rank 1" in done.stderr
    with monkeypatch.context() as patch:
        # Killed after the last task of its share and before the manifest.
        patch.setattr("tokenmill.pipeline.run.finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tm.tokenize(f"{corpus}/**", url, rank=1, world_size=2, **flags())
    assert [rank.state for rank in read_status(url).ranks] == ["done", "done"]
    shown = tokenmill("status", url)
    assert f"All ranks have ended. Next: tokenmill finish {url}" in " ".join(shown.stdout.split())
    done = tokenmill("finish", url)
    assert done.returncode == 0, done.stderr
    assert f"{url} is finished: " in done.stdout
    assert objects(url) == expected
    assert read_status(url).state == "finished"
    assert len(read_status(url).attempts) == 2


def test_a_run_into_a_bucket_can_be_watched(corpus: Path, s3: str) -> None:
    """The status uses the reports of the run, because a bucket has no locks."""
    url = f"{s3}/tok"
    assert tm.tokenize(f"{corpus}/**", url, rank=0, world_size=2, **flags()) is None
    bucket, prefix = split_url(url)
    key = f"{prefix}/.tasks/progress-rank-0-of-2.json"
    (told,) = msgspec.json.decode(bucket.read(key), type=list[AttemptInfo])
    for silent, state in ((20, "running"), (200, "stopped")):
        now = msgspec.structs.replace(told, completed=None, heard=time.time() - silent)
        bucket.put(key, msgspec.json.encode([now]))
        status = read_status(url)
        assert (status.state, status.ranks[0].state) == (state, state)


def test_files_of_other_programs_in_the_folder_stay(corpus: Path, s3: str, expected: dict[str, bytes]) -> None:
    """Notes, checkpoints, and a store inside the store's place."""
    url = f"{s3}/tok"
    tm.tokenize(f"{corpus}/**", url, **flags())
    tm.tokenize(str(corpus / "c.txt"), f"{url}/inner", **flags())
    bucket, prefix = split_url(url)
    for name in ("README.md", "checkpoints/step1.pt", "train/notes.txt"):
        bucket.put(f"{prefix}/{name}", b"mine")
    before = objects(url)
    tm.tokenize(f"{corpus}/**", url, **flags())
    assert objects(url) == before
    assert verify(url).is_sound
    tm.tokenize(f"{corpus}/**", url, **flags(overwrite=True))
    assert objects(url) == before
    assert expected.items() <= before.items()


def test_a_run_that_was_replaced_by_another_leaves_the_store_alone(
    tmp_path: Path, corpus: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is delayed in a task while another run, with other flags, replaces the store."""
    url = f"{s3}/tok"
    made: list[dict[str, bytes]] = []
    publish = worker.publish_task

    def publish_late(*task: Any) -> None:
        monkeypatch.setattr(worker, "publish_task", publish)
        tm.tokenize(f"{corpus}/**", url, **flags(seed=7, overwrite=True))
        made.append(objects(url))
        publish(*task)

    monkeypatch.setattr(worker, "publish_task", publish_late)
    monkeypatch.setattr(worker, "check_claim", lambda *_: None)
    request = msgspec.structs.replace(request_of(corpus, tmp_path, **flags()), out=url)
    with pytest.raises(StoreError, match=f"^{url} was started over by another run"):
        run_inline(request, InlineCluster())
    assert made == [objects(url)]
    assert verify(url).is_sound


def test_a_finished_store_with_a_file_missing_is_not_called_finished(corpus: Path, s3: str) -> None:
    url = f"{s3}/tok"
    tm.tokenize(f"{corpus}/**", url, **flags())
    bucket, prefix = split_url(url)
    bucket.delete([f"{prefix}/train/shard-00000-0000.bin"])
    with pytest.raises(StoreError, match=r"shard-00000-0000.bin is missing, and the manifest says .*--overwrite"):
        tm.tokenize(f"{corpus}/**", url, **flags())


def test_orphans_are_listed_by_verify_and_removed_by_the_next_run(
    corpus: Path, s3: str, expected: dict[str, bytes]
) -> None:
    url = f"{s3}/tok"
    tm.tokenize(f"{corpus}/**", url, **flags())
    assert verify(url, against=[f"{corpus}/**"]).is_sound
    bucket, prefix = split_url(url)
    bucket.put(f"{prefix}/train/shard-00000-0777.bin", b"an orphan")
    bucket.put(f"{prefix}/.tasks/00000-0777.json", b"{}")
    done = tokenmill("verify", url)
    assert "shard-00000-0777.bin" in done.stderr
    assert ".tasks/00000-0777.json" in done.stderr
    assert "2 problems" in sentence(done)
    tm.tokenize(f"{corpus}/**", url, **flags())
    assert objects(url) == expected


def test_damage_is_found_by_verify(corpus: Path, s3: str) -> None:
    url = f"{s3}/tok"
    tm.tokenize(f"{corpus}/**", url, **flags())
    bucket, prefix = split_url(url)
    key = next(info.key for info in bucket.list(f"{prefix}/train") if info.key.endswith(".bin"))
    data = bytearray(bucket.read(key))
    data[1] ^= 1
    bucket.put(key, bytes(data))
    (problem,) = verify(url).problems
    assert problem.startswith(f"{bucket.url(key)} is damaged: its checksum")


def test_overwrite_and_what_is_not_ours(corpus: Path, s3: str) -> None:
    bucket, _ = split_url(s3)
    bucket.put("mine/notes.txt", b"not a store")
    with pytest.raises(StoreError, match=r"is not empty and not a token store: it has notes.txt"):
        tm.tokenize(f"{corpus}/**", f"{s3}/mine", **flags())
    with pytest.raises(StoreError, match=r"is not a token store: it has notes.txt"):
        tm.tokenize(f"{corpus}/**", f"{s3}/mine", **flags(overwrite=True))
    assert bucket.read("mine/notes.txt") == b"not a store"
    tm.tokenize(f"{corpus}/**", f"{s3}/tok", **flags())
    with pytest.raises(StoreError, match=rf"{s3}/tok was made with --eos"):
        tm.tokenize(f"{corpus}/**", f"{s3}/tok", **flags(eos=False))
    store = tm.tokenize(f"{corpus}/**", f"{s3}/tok", **flags(eos=False, overwrite=True))
    assert store.manifest.special_tokens.eos_id is None


def test_wrong_arguments_are_one_sentence(tmp_path: Path, corpus: Path, s3: str) -> None:
    with pytest.raises(UsageError, match="is a whole bucket; name a folder in it"):
        tm.tokenize(f"{corpus}/**", s3, **flags())
    with pytest.raises(UsageError, match="--scratch x is for a store in a bucket"):
        tm.tokenize(f"{corpus}/**", tmp_path / "out", **flags(scratch="x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--scratch .* cannot be used"):
        tm.tokenize(f"{corpus}/**", f"{s3}/tok", **flags(scratch=str(tmp_path / "file")))
    for command_name in ("status", "finish"):
        assert f"{s3}/nothing" in sentence(tokenmill(command_name, f"{s3}/nothing"))


@pytest.mark.slow
def test_commands_look_at_a_store_in_a_bucket(tmp_path: Path, corpus: Path, s3: str, local: Path) -> None:
    url = f"{s3}/tok"
    tm.tokenize(f"{corpus}/**", url, **flags())
    for more in (("inspect", "--json"), ("trace", "--step", "1", "--seq-len", "16", "--json")):
        remote, here = (tokenmill(more[0], store, *more[1:]) for store in (url, local))
        assert remote.returncode == 0, remote.stderr
        said = here.stdout.replace(str(local), url).replace('"local/train"', '"tok/train"')
        assert json.loads(remote.stdout) == json.loads(said)
    done = tokenmill("export", url, str(tmp_path / "export"), "--to", "nanogpt")
    assert done.returncode == 0, done.stderr
    figures = {}
    for name, store in (("remote", url), ("local", str(local))):
        page = tmp_path / f"{name}.json"
        done = tokenmill("report", store, "-o", str(tmp_path / f"{name}.html"), "--json", str(page))
        assert done.returncode == 0, done.stderr
        figures[name] = json.loads(page.read_text())
    assert figures["remote"]["num_tokens"] == figures["local"]["num_tokens"]
    assert figures["remote"]["checks"]["problems"] == []


def test_what_needs_a_directory_says_so(tmp_path: Path, corpus: Path, s3: str) -> None:
    with pytest.raises(UsageError, match="must be a directory of this machine"):
        tm.load(f"{corpus}/**", 16, 4, tokenizer="bytes", cache=f"{s3}/cache")
    with pytest.raises(UsageError, match="fetch='range' is for stores, and this is raw text"):
        tm.load(f"{corpus}/**", 16, 4, tokenizer="bytes", cache=str(tmp_path / "c"), fetch="range")
    done = tokenmill("tokenize", f"{corpus}/**", "-o", f"{s3}/tok", "--tokenizer", "bytes", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not Path("s3:").exists()


def test_runs_remove_only_the_scratch_directories_of_killed_runs(tmp_path: Path) -> None:
    """Runs that start at the same time remove the leftovers of killed runs, but not the files of each other."""

    def enter(_: int) -> bool:
        with scratch_directory(str(tmp_path)) as folder:
            return folder.exists()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(enter, range(400)))
