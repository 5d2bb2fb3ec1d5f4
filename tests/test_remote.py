"""Requests to an object store: whole answers or a sentence, one winner of a create, also from forked processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.object_server import FAULTS, FaultyProxy
from tokenmill.errors import MissingDependencyError, StoreError, TokenmillError, UsageError
from tokenmill.remote import Bucket, is_remote, split_url
from tokenmill.remote.bucket import PIECE_BYTES
from tokenmill.remote.cache import Cache, NoRoom
from tokenmill.remote.client import AlreadyThere, ChangedObject, NoSuchObject, RemoteError, Request, perform
from tokenmill.remote.ranges import RangeReader, Stretch


@pytest.fixture
def bucket(s3: str) -> Bucket:
    return split_url(s3)[0]


def test_urls_are_told_from_paths() -> None:
    assert [is_remote(path) for path in ("s3://b/k", "gs://b", "az://b/k", "hf://x", "s3:/b", "a/b", 3)] == [
        True,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert split_url("gs://bucket/a/b/") == (Bucket("gs", "bucket"), "a/b")
    for wrong in ("s3://", "s3:///x", "s3://b/a//c", "s3://b/../c", "ftp://b/c"):
        with pytest.raises(UsageError, match="is not the URL of an object"):
            split_url(wrong)


def test_an_object_is_written_read_listed_and_removed(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("plain", "sp ace", "per%20cent", "größe", "a+b&c=d", "x#y?z"):
        bucket.put(f"folder/{name}", name.encode())
        assert bucket.read(f"folder/{name}") == name.encode()
    bucket.put("folder2/other", b"")
    assert len(bucket.list("folder")) == 6
    assert [info.num_bytes for info in bucket.list("folder2")] == [0]
    assert bucket.read("folder2/other") == b""
    bucket.delete(["folder/plain", "folder/never-there"])
    assert not bucket.exists("folder/plain")
    data = random.Random(0).randbytes(2 * PIECE_BYTES + 5)
    (tmp_path / "big").write_bytes(data)
    bucket.upload("big", tmp_path / "big")
    info = bucket.head("big")
    assert info.num_bytes == len(data)
    sizes: list[int] = []
    bucket.download(info, tmp_path / "back", sizes.append)
    assert (tmp_path / "back").read_bytes() == data
    assert sorted(sizes) == [5, PIECE_BYTES, PIECE_BYTES]


def test_one_of_many_creates_wins(bucket: Bucket) -> None:
    def create(number: int) -> str:
        try:
            return "created" if bucket.create("commit", b"%d" % number) else "same"
        except AlreadyThere:
            return "refused"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, range(8)))
    assert sorted(outcomes) == ["created"] + ["refused"] * 7
    assert bucket.read("commit") == b"%d" % outcomes.index("created")
    assert not bucket.create("commit", bucket.read("commit"))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_kind_of_fault_is_overcome(bucket: Bucket, faulty: FaultyProxy, fault: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(100_000)
    faulty.faults, faulty.rate = (fault,), 0.5
    for number in range(4):
        bucket.put(f"objects/{number}", data)
        bucket.create(f"created/{number}", data)
    assert bucket.read("created/3") == data
    assert len(bucket.list("objects")) == 4
    info = bucket.head("objects/3")
    for start in range(0, 90_000, 18_000):
        assert bucket.read_range(info, start, start + 9_500) == data[start : start + 9_500]
    bucket.download(info, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == data
    assert faulty.counts[fault] >= 3


def test_what_never_gets_better_is_an_error_and_no_short_answer(bucket: Bucket, faulty: FaultyProxy) -> None:
    bucket.put("object", b"0123456789" * 1000)
    info = bucket.head("object")
    faulty.faults, faulty.rate = ("short",), 1.0
    faulty._choose = lambda line: "short"  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="bytes came instead of 9,000"):
        bucket.read_range(info, 0, 9_000)


def test_an_object_of_another_content_or_size_is_refused(bucket: Bucket) -> None:
    bucket.put("object", b"0123456789")
    info = bucket.head("object")
    bucket.put("object", b"abcdefghij")
    with pytest.raises(ChangedObject, match="was replaced while it was being read"):
        bucket.read_range(info, 0, 5)
    with pytest.raises(ChangedObject, match="has 10 bytes and not 99"):
        bucket.read_range(info._replace(etag=None, num_bytes=99), 0, 5)


def test_errors_are_sentences(s3: str, bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoSuchObject, match=rf"^{s3}/nothing does not exist$"):
        bucket.read("nothing")
    with pytest.raises(NoSuchObject, match=r"^s3://no-such-bucket-at-all does not exist at http"):
        Bucket("s3", "no-such-bucket-at-all").list("")
    forbidden = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(forbidden), forbidden
    faulty._forward = lambda head, body: answer  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="was denied; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        bucket.read("nothing")
    with monkeypatch.context() as without_keys:
        without_keys.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
        without_keys.delenv("AWS_ACCESS_KEY_ID")
        without_keys.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(RemoteError, match="needs credentials, and there are none: set AWS_ACCESS_KEY_ID"):
            bucket.read("nothing")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:9")
    for scheme, prefix in (("az", "AZURE"), ("gs", "GOOGLE")):
        monkeypatch.setenv(f"{prefix}_SKIP_SIGNATURE", "true")
        with pytest.raises(RemoteError, match=rf"^{scheme}://box/x: http://127.0.0.1:9 cannot be reached"):
            Bucket(scheme, "box").read("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match=r"http://127.0.0.1:9 cannot be reached"):
        bucket.read("nothing")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingDependencyError, match=r"tokenmill\[s3\]"):
        perform(Request(do="read", scheme="s3", bucket="another", key="x"))


def test_a_forked_process_makes_requests(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("object", b"0123456789")
    info = bucket.head("object")
    pid = os.fork()
    if pid == 0:
        try:
            said = [bytes(bucket.read_range(info, 2, 5)).decode(), str(bucket.create("child", b"x"))]
            try:
                bucket.read("nothing")
            except NoSuchObject as error:
                said.append(str(error))
            (tmp_path / "said").write_text("\n".join(said))
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline, "the child waits for ever"
        time.sleep(0.05)
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines == ["234", "True", f"{bucket.url('nothing')} does not exist"]


def test_stretches_that_are_announced_are_joined_and_fetched_once(bucket: Bucket, faulty: FaultyProxy) -> None:
    data = random.Random(2).randbytes(1_000_000)
    bucket.put("object", data)
    reader = RangeReader(bucket)
    near = [Stretch("object", start, start + 1000) for start in range(0, 200_000, 2000)]
    far = [Stretch("object", start, start + 1000) for start in (600_000, 900_000)]
    order = [*near, *far]
    random.Random(3).shuffle(order)
    faulty.counts.clear()
    reader.expect(order, {"object": len(data)})
    for stretch in order:
        assert reader.read(stretch, len(data)) == data[stretch.start : stretch.stop]
    assert faulty.counts["GET"] == 3
    assert reader._num_ahead == 0
    assert reader.read(Stretch("object", 5, 9), len(data)) == data[5:9]


def test_announcements_that_nobody_reads_do_not_fill_memory(bucket: Bucket) -> None:
    bucket.put("object", bytes(1_000_000))
    reader = RangeReader(bucket)
    for number in range(30):
        reader.expect([Stretch("object", number * 10_000, number * 10_000 + 9000)], {"object": 1_000_000})
    assert reader._num_ahead <= 8 * 9000
    assert reader.read(Stretch("object", 0, 9000), 1_000_000) == bytes(9000)


def test_a_cache_removes_what_was_used_longest_ago(bucket: Bucket, tmp_path: Path) -> None:
    import xxhash

    cache = Cache(tmp_path / "cache", 2500)
    data = {name: name.encode() * 1000 for name in "abcd"}
    for number, (name, content) in enumerate(data.items()):
        bucket.put(name, content)
        if name == "c":
            os.utime(cache.folder / "s" / "a", (10**9 + 10, 10**9 + 10))
        info, xxh3 = bucket.head(name), xxhash.xxh3_64_hexdigest(content)
        assert cache.fetch(f"s/{name}", bucket, info, xxh3)
        os.utime(cache.folder / "s" / name, (10**9 + number, 10**9 + number))
    assert sorted(path.name for path in (cache.folder / "s").iterdir()) == ["a", "d"]
    with pytest.raises(StoreError, match="is damaged: its checksum"):
        cache.fetch("s/b", bucket, bucket.head("b"), "0" * 16)
    assert not cache.has("s/b")
    assert not list(cache.folder.rglob("*.tmp"))


def test_what_a_process_has_mapped_stays_and_what_a_dead_one_had_goes(bucket: Bucket, tmp_path: Path) -> None:
    import xxhash

    cache = Cache(tmp_path / "cache", 2500)
    for name in "abc":
        bucket.put(name, name.encode() * 1000)
    marks = {name: xxhash.xxh3_64_hexdigest(name.encode() * 1000) for name in "abc"}
    assert cache.fetch("s/a", bucket, bucket.head("a"), marks["a"])
    assert cache.fetch("s/b", bucket, bucket.head("b"), marks["b"])
    program = (
        "import sys; from pathlib import Path; from tokenmill.remote.cache import Cache\n"
        "cache = Cache(Path(sys.argv[1]), 2500); print([cache.use('s/a'), cache.use('s/b')], flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(cache.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "[True, True]\n"
    with pytest.raises(NoRoom, match="has no room for 1,000 more"):
        cache.fetch("s/c", bucket, bucket.head("c"), marks["c"])
    process.kill()
    process.communicate()
    assert cache.fetch("s/c", bucket, bucket.head("c"), marks["c"])
    assert cache.use("s/c")
    assert sum(path.is_file() for path in (cache.folder / "s").iterdir()) == 2


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenmillError, match="cannot be used: .*; pass cache_dir"):
        Cache(tmp_path / "file" / "cache", 100)
