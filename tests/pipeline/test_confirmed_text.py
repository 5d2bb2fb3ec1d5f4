"""Text of a compressed frame does not become documents unless the checksum of the frame is right."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import tokenmill as tm
from tests.cluster.inline import InlineCluster, request_of, run_inline
from tests.support.running import jsonl, rejects_of, snapshot, texts_of, tokenize_here, tokenmill
from tokenmill.pipeline.journal.journal import Journal
from tokenmill.tools.verify import verify

WORDS = random.Random(0)
TEXTS = [f"document {number} {WORDS.getrandbits(8 * (number % 60)):x}" for number in range(1500)]
FRAMES = [TEXTS[:500], TEXTS[500:900], TEXTS[900:]]


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"zst": _zstd, "gz": gzip.compress}
TASK_BYTES = pytest.mark.parametrize("task_bytes", [1 << 22, 5000], ids=["one-task", "stream"])


def _flip(data: bytes, rng: random.Random, start: int, stop: int) -> bytes:
    damaged = bytearray(data)
    damaged[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _write(path: Path, kind: str, damaged: int | None, seed: int = 0) -> Path:
    """Write three frames, one of them with a flipped bit after its header."""
    frames = [COMPRESS[kind](jsonl(texts)) for texts in FRAMES]
    if damaged is not None:
        frames[damaged] = _flip(frames[damaged], random.Random(seed), 20, len(frames[damaged]))
    path.write_bytes(b"".join(frames))
    return path


@TASK_BYTES
@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_no_altered_document_enters_a_store(kind: str, task_bytes: int, tmp_path: Path) -> None:
    for seed in range(6):
        path = tmp_path / f"{seed}.jsonl.{kind}"
        path.write_bytes(_flip(COMPRESS[kind](jsonl(TEXTS)), random.Random(seed), 30, 4000))
        (tmp_path / "sound.jsonl").write_bytes(jsonl(["sound"]))
        out = tmp_path / f"out-{seed}"
        store = tokenize_here(
            [str(path), str(tmp_path / "sound.jsonl")],
            out,
            tokenizer="bytes",
            on_error="skip",
            task_bytes=task_bytes,
            workers=2,
        )
        assert texts_of(store) == ["sound"]
        (reject,) = rejects_of(out)
        assert reject["reason"] == "damaged"
        assert store.manifest.rejects == {"damaged": reject.get("documents", 1)}
        assert store.manifest.num_documents_in == 1 + reject.get("documents", 1)
        assert "bytes 0 to " in reject["detail"]


@TASK_BYTES
@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_documents_of_earlier_frames_stay(kind: str, task_bytes: int, tmp_path: Path) -> None:
    sizes = [len(COMPRESS[kind](jsonl(texts))) for texts in FRAMES]
    for damaged in range(3):
        path = _write(tmp_path / f"{damaged}.jsonl.{kind}", kind, damaged)
        (tmp_path / "sound.jsonl").write_bytes(jsonl(["sound"]))
        store = tokenize_here(
            [str(path), str(tmp_path / "sound.jsonl")],
            tmp_path / f"out-{damaged}",
            tokenizer="bytes",
            on_error="skip",
            task_bytes=task_bytes,
            workers=2,
        )
        kept = [text for texts in FRAMES[:damaged] for text in texts]
        assert texts_of(store) == [*kept, "sound"]
        (reject,) = rejects_of(store.path)
        assert reject["line"] == len(kept) + 1
        assert f"bytes {sum(sizes[:damaged]):,} to " in reject["detail"]
        assert not verify(store.path, against=[str(path), str(tmp_path / "sound.jsonl")], every=True).problems


@TASK_BYTES
def test_keep_damaged_keeps_what_can_be_read(task_bytes: int, tmp_path: Path) -> None:
    data = _zstd(jsonl(TEXTS))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    store = tokenize_here(
        path, tmp_path / "out", tokenizer="bytes", on_error="keep-damaged", task_bytes=task_bytes, workers=2
    )
    assert texts_of(store) == TEXTS
    assert store.manifest.rejects == {"damaged": 1}


@TASK_BYTES
def test_fail_writes_no_manifest_and_skip_resumes_without_the_damaged_frame(task_bytes: int, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl.zst", "zst", 1)
    with pytest.raises(tm.DataError, match=r"a\.jsonl\.zst: the zstd data cannot be read: .* \(bytes [\d,]+ to "):
        tokenize_here(path, tmp_path / "out", tokenizer="bytes", task_bytes=task_bytes, workers=2)
    assert not (tmp_path / "out" / "manifest.json").exists()
    store = tokenize_here(path, tmp_path / "out", tokenizer="bytes", on_error="skip", task_bytes=task_bytes, workers=2)
    assert texts_of(store) == FRAMES[0]
    new = tokenize_here(path, tmp_path / "new", tokenizer="bytes", on_error="skip", task_bytes=task_bytes, workers=1)
    for file in sorted(new.path.rglob("*")):
        if file.is_file() and file.name != "run.json":
            assert (store.path / file.relative_to(new.path)).read_bytes() == file.read_bytes(), file
    assert {file.name for file in store.path.rglob("*")} == {file.name for file in new.path.rglob("*")}


@TASK_BYTES
def test_what_keep_damaged_kept_stays_out_of_a_run_without_it(task_bytes: int, tmp_path: Path) -> None:
    data = _zstd(jsonl(TEXTS))
    (tmp_path / "a.jsonl.zst").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (tmp_path / "b.jsonl").write_bytes(b"not JSON")
    flags = {"tokenizer": "bytes", "task_bytes": task_bytes, "workers": 1}
    inputs = [str(tmp_path / "a.jsonl.zst"), str(tmp_path / "b.jsonl")]
    unfinished, finished, message = tmp_path / "unfinished", tmp_path / "finished", "made with --on-error keep-damaged"
    with pytest.raises(tm.TokenmillError, match="--max-errors 1"):
        tokenize_here(inputs, unfinished, on_error="keep-damaged", max_errors=1, **flags)
    if Journal(unfinished).names():
        with pytest.raises(tm.StoreError, match=message):
            tokenize_here(inputs, unfinished, on_error="skip", **flags)
    store = tokenize_here(inputs, finished, on_error="keep-damaged", **flags)
    assert store.manifest.settings["on-error"] == "keep-damaged"
    for mode in ("skip", "fail"):
        with pytest.raises(tm.StoreError, match=message):
            tokenize_here(inputs, finished, on_error=mode, **flags)
    assert tokenize_here(inputs, unfinished, on_error="keep-damaged", **flags).manifest.splits == store.manifest.splits


@TASK_BYTES
def test_keep_damaged_continues_a_run_that_rejected_nothing_for_damage(task_bytes: int, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl.zst", "zst", 1)
    flags = {"tokenizer": "bytes", "task_bytes": task_bytes, "workers": 2}
    new = tokenize_here(path, tmp_path / "new", on_error="keep-damaged", **flags)
    with pytest.raises(tm.DataError):
        tokenize_here(path, tmp_path / "out", **flags)
    tokenize_here(path, tmp_path / "out", on_error="keep-damaged", **flags)
    assert snapshot(tmp_path / "out") == snapshot(new.path)
    tokenize_here(path, tmp_path / "skipped", on_error="skip", **flags)
    with pytest.raises(tm.StoreError, match="without --on-error keep-damaged, and left damaged text out"):
        tokenize_here(path, tmp_path / "skipped", on_error="keep-damaged", **flags)


def test_many_damaged_files_of_one_task_are_left_out_at_once(tmp_path: Path) -> None:
    for number in range(20):
        _write(tmp_path / f"{number:02d}.jsonl.gz", "gz", 2 if number % 3 == 0 else None, seed=number)
    store = tokenize_here(tmp_path, tmp_path / "out", tokenizer="bytes", on_error="skip", max_errors=20_000, workers=1)
    expected = [text for number in range(20) for text in (TEXTS[:900] if number % 3 == 0 else TEXTS)]
    assert texts_of(store) == expected
    assert len(rejects_of(store.path)) == 7


@TASK_BYTES
def test_a_damaged_frame_of_a_json_array_is_left_out(task_bytes: int, tmp_path: Path) -> None:
    data = b"[" + b",".join(jsonl(TEXTS).split(b"\n")[:-1]) + b"]"
    (tmp_path / "a.json.zst").write_bytes(_flip(_zstd(data), random.Random(1), 100, 4000))
    (tmp_path / "sound.jsonl").write_bytes(jsonl(["sound"]))
    store = tokenize_here(
        [str(tmp_path / "a.json.zst"), str(tmp_path / "sound.jsonl")],
        tmp_path / "out",
        tokenizer="bytes",
        on_error="skip",
        task_bytes=task_bytes,
        workers=2,
    )
    assert texts_of(store) == ["sound"]


def test_wrong_json_in_a_sound_frame_costs_only_what_follows(tmp_path: Path) -> None:
    data = b"[" + b",".join(jsonl(TEXTS).split(b"\n")[:-1]) + b'{"text": "no comma"}]'
    (tmp_path / "a.json.zst").write_bytes(_zstd(data))
    for task_bytes in (1 << 22, 5000):
        store = tokenize_here(
            tmp_path / "a.json.zst",
            tmp_path / f"out-{task_bytes}",
            tokenizer="bytes",
            on_error="skip",
            task_bytes=task_bytes,
            workers=2,
        )
        assert texts_of(store) == TEXTS


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_cluster_leaves_out_the_same_documents(damaged: int, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl.zst", "zst", damaged)
    (tmp_path / "sound.jsonl").write_bytes(jsonl(["sound"]))
    flags = {"tokenizer": "bytes", "on_error": "skip", "task_bytes": 5000}
    inputs = [str(path), str(tmp_path / "sound.jsonl")]
    here = tokenize_here(inputs, tmp_path / "here", **flags)
    run_inline(request_of(inputs, tmp_path / "cluster", **flags), InlineCluster(4))
    assert snapshot(tmp_path / "cluster") == snapshot(here.path)


def test_input_without_a_checksum_is_named_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl(["text"])))
    done = tokenmill("tokenize", tmp_path, "-o", tmp_path / "out", "--tokenizer", "bytes")
    assert done.stderr.count("zstd without a checksum") == 1
    assert "0.jsonl.zst and 2 more" in done.stderr
    assert "unchecked    3 compressed inputs without a checksum\n" in done.stdout
    sound = tmp_path / "sound"
    sound.mkdir()
    (sound / "a.jsonl.zst").write_bytes(_zstd(jsonl(["text"])))
    assert "checksum," not in tokenmill("tokenize", sound, "-o", sound / "out", "--tokenizer", "bytes").stderr


def test_a_stream_that_is_read_again_after_a_kill_is_not_finished_by_its_unconfirmed_tasks(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl.zst", "zst", 1)
    flags = {"tokenizer": "bytes", "task_bytes": 5000, "workers": 2}
    new = tokenize_here(path, tmp_path / "new", on_error="skip", **flags)
    numbers = [int(shard.name.rpartition("-")[2]) for shard in new.manifest.splits["train"].shards]
    out = tmp_path / "out"
    with pytest.raises(tm.DataError):
        tokenize_here(path, out, **flags)
    # A kill after the stream was read up to the damage, and before the last task was published.
    Journal(out).end_stream(0, numbers, path.stat().st_mtime_ns)
    (out / ".tasks" / f"00000-{numbers[-1]:04d}.json").unlink(missing_ok=True)
    # The next attempt may publish that task with text of the damaged frame, and does not come to its end either.
    with pytest.raises(tm.DataError):
        tokenize_here(path, out, **flags)
    assert Journal(out).ended_stream(0) is None
    tokenize_here(path, out, on_error="skip", **flags)
    assert snapshot(out) == snapshot(new.path)
