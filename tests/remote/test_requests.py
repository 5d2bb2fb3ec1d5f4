"""Requests to an object store: complete answers or an error, one winner of a create, also in forked processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from tests.support.object_server import FAULTS, FaultyProxy, shorten_retries
from tests.support.program import Program
from tokenmill.arguments import is_remote
from tokenmill.errors import MissingDependencyError, StoreError, TokenmillError, UsageError
from tokenmill.remote import Bucket, _fork_proxy, split_url
from tokenmill.remote.bucket import PIECE_BYTES
from tokenmill.remote.cache import Cache, CacheEntry, NoRoom
from tokenmill.remote.client import OBSTORE_RETRIES, perform
from tokenmill.remote.object_request import SCHEMES, ObjectRequest
from tokenmill.remote.ranges import MAX_ANNOUNCEMENTS, MAX_REQUESTS, ByteRange, RangeReader
from tokenmill.remote.remote_errors import AlreadyThere, ChangedObject, NoSuchObject, RemoteError, explain
from tokenmill.remote.thread_pool import submit


@pytest.fixture
def bucket(s3: str) -> Bucket:
    return split_url(s3)[0]


def test_urls_are_distinguished_from_paths() -> None:
    assert all(is_remote(f"{scheme}://b/k") and is_remote(f"{scheme}://b") for scheme in SCHEMES)
    assert not any(is_remote(path) for path in ("hf://x", "s3:/b", "a/b", 3))
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
    bucket.download(info, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


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
def test_every_kind_of_fault_is_overcome(
    bucket: Bucket, faulty: FaultyProxy, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch)
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


def test_repeated_truncated_answers_are_an_error(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch)
    bucket.put("object", b"0123456789" * 1000)
    info = bucket.head("object")
    faulty.faults, faulty.rate = ("short",), 1.0
    faulty._choose = lambda line: "short"  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="bytes came instead of 9,000"):
        bucket.read_range(info, 0, 9_000)


@pytest.mark.parametrize("fault", ["503", "reset"])
def test_every_request_waits_for_the_end_of_an_outage(
    bucket: Bucket, faulty: FaultyProxy, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch)
    bucket.put("object", b"0123456789")
    info = bucket.head("object")
    (tmp_path / "file").write_bytes(b"abc")
    faulty.fail_for(1, fault)
    actions = [
        lambda: bytes(bucket.read_range(info, 2, 5)),
        lambda: bucket.read("object"),
        lambda: bucket.head("object") == info,
        lambda: len(bucket.list("")) > 0,
        lambda: bucket.put("put", b"x"),
        lambda: bucket.upload("uploaded", tmp_path / "file"),
        lambda: bucket.create("created", b"x"),
        lambda: bucket.delete(["nothing"]),
    ]
    with ThreadPoolExecutor(len(actions)) as pool:
        answers = list(pool.map(lambda action: action(), actions))  # type: ignore[no-untyped-call]
    assert answers == [b"234", b"0123456789", True, True, None, None, True, None]
    assert faulty.counts[fault] > 30, "obstore alone makes 16 requests"


def test_the_error_of_a_long_outage_has_the_status_and_the_seconds(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch, seconds=0.2)
    bucket.put("object", b"0123456789")
    for fault, message in (
        ("503", r"/object: the server answers 503 \(busy\); tried for \d+ s, try again later$"),
        ("500", r"/object: the server answers 500 \(Internal Server Error\); tried for \d+ s"),
        ("truncate", r"/object: the connection breaks off in the middle of every answer; tried for \d+ s"),
        ("reset", r"/object: http://127.0.0.1:\d+ cannot be reached or does not answer; check .*; tried for \d+ s"),
    ):
        faulty.fail_for(60, fault)
        with pytest.raises(RemoteError, match=message):
            bucket.read("object")
    faulty.fail_for(0, "none")
    assert bucket.read("object") == b"0123456789"


def test_a_range_whose_prefetch_failed_is_fetched_again(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch, seconds=0.1)
    bucket.put("object", bytes(range(200)))
    reader = RangeReader(bucket)
    first, second = ByteRange("object", 0, 10), ByteRange("object", 20, 30)
    faulty.fail_for(60, "503")
    reader.prefetch([first, second], {"object": 200})
    with pytest.raises(RemoteError, match="answers 503"):
        reader.read(first, 200)
    faulty.fail_for(0, "none")
    assert reader.read(second, 200) == bytes(range(20, 30))
    assert reader.read(first, 200) == bytes(range(10))
    assert reader._num_ahead == 0


def test_a_server_that_drops_the_very_first_connections_is_waited_for(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_retries(monkeypatch)
    monkeypatch.setattr("tokenmill.remote.client.reachable", set())
    faulty.fail_for(1, "reset")
    bucket.put("object", b"x")


def test_a_forked_process_waits_for_a_server_that_refuses_connections(
    bucket: Bucket, faulty: FaultyProxy, tmp_path: Path
) -> None:
    bucket.put("object", b"0123456789")
    faulty.refuse_for(4)
    pid = os.fork()
    if pid == 0:
        try:
            (tmp_path / "said").write_bytes(bucket.read("object"))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "said").read_bytes() == b"0123456789"


def test_an_object_that_was_replaced_is_refused(bucket: Bucket) -> None:
    bucket.put("object", b"0123456789")
    info = bucket.head("object")
    bucket.put("object", b"abcdefghij")
    with pytest.raises(ChangedObject, match="was replaced while it was being read"):
        bucket.read_range(info, 0, 5)
    with pytest.raises(ChangedObject, match="has 10 bytes and not 99"):
        bucket.read_range(info._replace(etag=None, num_bytes=99), 0, 5)


def test_errors_are_sentences(s3: str, bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_retries(monkeypatch)
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
        # A metadata service that answers with a refusal.
        without_keys.setenv("AWS_METADATA_ENDPOINT", faulty.endpoint)
        with pytest.raises(RemoteError, match="needs credentials, and there are none: set AWS_ACCESS_KEY_ID"):
            bucket.read("nothing")
    with pytest.raises(UsageError, match=r"^az://box needs the name of an account: set AZURE_STORAGE_ACCOUNT_NAME$"):
        Bucket("az", "box").read("x")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:9")
    for scheme, prefix in (("az", "AZURE"), ("gs", "GOOGLE")):
        monkeypatch.setenv(f"{prefix}_SKIP_SIGNATURE", "true")
        with pytest.raises(RemoteError, match=rf"^{scheme}://box/x: http://127.0.0.1:9 cannot be reached"):
            Bucket(scheme, "box").read("x")
    monkeypatch.setattr("tokenmill.remote.client.OBSTORE_RETRIES", OBSTORE_RETRIES)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"http://127.0.0.1:9 cannot be reached"):
        bucket.read("nothing")
    assert time.monotonic() - started < 10, "a wrong address is reported soon"
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"tokenmill\[s3\]"):
        perform(ObjectRequest(do="read", scheme="s3", bucket="another", key="x"))


def test_errors_of_other_stores_are_sentences() -> None:
    from obstore.exceptions import BaseError

    request = ObjectRequest(do="read", scheme="gs", bucket="box", key="x")
    for message, expected in (
        (
            "Generic GCS error: GET http://169.254.169.254/token - Server returned non-2xx status code: 403 Forbidden: no",
            "gs://box/x needs credentials, and there are none: set GOOGLE_SERVICE_ACCOUNT; for a public bucket set "
            "GOOGLE_SKIP_SIGNATURE=true",
        ),
        (
            "Generic GCS error: GET http://host/box/x - Server returned non-2xx status code: 403 Forbidden: no",
            "access to gs://box/x was denied; check GOOGLE_SERVICE_ACCOUNT, and what it allows",
        ),
        ("Generic GCS error: what is this", "gs://box/x: what is this"),
        ("Generic MicrosoftAzure error: what is this", "gs://box/x: what is this"),
    ):
        assert str(explain(request, BaseError(message))) == expected


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
            with ThreadPoolExecutor(16) as threads:
                digits = threads.map(lambda at: bytes(bucket.read_range(info, at, at + 1)), [*range(10)] * 20)
                said.append(str(b"".join(digits) == b"0123456789" * 20))
            _fork_proxy._proxy._process.kill()  # type: ignore[union-attr]
            try:
                bucket.read("object")
            except RemoteError as error:
                said.append(str(error))
            (tmp_path / "said").write_text("\n".join(said))
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.05)
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines[:3] == ["234", "True", f"{bucket.url('nothing')} does not exist"]
    assert lines[3:] == ["True", "the process that makes requests to the object store has ended"]


def test_ranges_that_are_announced_are_joined_and_fetched_once(bucket: Bucket, faulty: FaultyProxy) -> None:
    data = random.Random(2).randbytes(1_000_000)
    bucket.put("object", data)
    reader = RangeReader(bucket)
    near = [ByteRange("object", start, start + 1000) for start in range(0, 200_000, 2000)]
    far = [ByteRange("object", start, start + 1000) for start in (600_000, 900_000)]
    order = [*near, *far]
    random.Random(3).shuffle(order)
    faulty.counts.clear()
    reader.prefetch(order, {"object": len(data)})
    for one in order:
        assert reader.read(one, len(data)) == data[one.start : one.stop]
    assert faulty.counts["GET"] == 3
    assert reader._num_ahead == 0
    assert reader.read(ByteRange("object", 5, 9), len(data)) == data[5:9]


def test_announced_ranges_that_are_not_read_do_not_fill_memory(bucket: Bucket) -> None:
    bucket.put("object", bytes(1_000_000))
    reader = RangeReader(bucket)
    for number in range(30):
        reader.prefetch([ByteRange("object", number * 10_000, number * 10_000 + 9000)], {"object": 1_000_000})
    assert reader._num_ahead <= 8 * 9000
    assert reader.read(ByteRange("object", 0, 9000), 1_000_000) == bytes(9000)


def test_a_range_that_another_thread_pushes_out_while_it_is_awaited_is_fetched(bucket: Bucket) -> None:
    bucket.put("object", bytes(range(200)))
    reader, free = RangeReader(bucket), threading.Event()
    awaited, *others = (ByteRange("object", start, start + 10) for start in range(0, 200, 10))
    busy = [submit("ranges", MAX_REQUESTS, free.wait) for _ in range(MAX_REQUESTS)]
    reader.prefetch([awaited], {"object": 200})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(reader.read, awaited, 200)
        while reader.is_announced(awaited):
            time.sleep(0.001)
        for other in others[:MAX_ANNOUNCEMENTS]:
            reader.prefetch([other], {"object": 200})
        free.set()
        assert answer.result(30) == bytes(range(10))
    assert all(call.result(30) for call in busy)
    assert [reader.read(other, 200)[0] for other in others] == list(range(10, 200, 10))
    assert reader._num_ahead == 0


def put_entry(bucket: Bucket, name: str) -> CacheEntry:
    """Put an object of 1,000 bytes into the bucket, and describe it as a file of a cache."""
    data = name.encode() * 1000
    bucket.put(name, data)
    return CacheEntry(f"s/{name}", bucket.head(name), xxhash.xxh3_64_hexdigest(data))


def test_a_cache_evicts_the_least_recently_used_files(bucket: Bucket, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 2500)
    entries = {name: put_entry(bucket, name) for name in "abcd"}
    for number, (name, entry) in enumerate(entries.items()):
        if name == "c":
            os.utime(cache.folder / "s" / "a", (10**9 + 10, 10**9 + 10))
        assert cache.download(entry, bucket)
        os.utime(cache.folder / entry.name, (10**9 + number, 10**9 + number))
    assert sorted(path.name for path in (cache.folder / "s").iterdir()) == ["a", "d"]
    with pytest.raises(StoreError, match="is damaged: its checksum"):
        cache.download(entries["b"]._replace(xxh3="0" * 16), bucket)
    assert not cache.has(entries["b"])
    assert not list(cache.folder.rglob("*.tmp"))


def test_files_that_a_process_has_pinned_are_evicted_only_after_its_end(bucket: Bucket, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 2500)
    first, second, third = (put_entry(bucket, name) for name in "abc")
    assert cache.download(first, bucket)
    assert cache.download(second, bucket)
    program = (
        "import sys; from pathlib import Path; from tokenmill.remote.cache import Cache, CacheEntry, ObjectInfo\n"
        "cache = Cache(Path(sys.argv[1]), 2500)\n"
        "entries = [CacheEntry(name, ObjectInfo('', 1000, None), '') for name in sys.argv[2:]]\n"
        "print([cache.pin(entry) for entry in entries], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(cache.folder), first.name, second.name]
    process = Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "[True, True]\n"
    with pytest.raises(NoRoom, match="has no room for 1,000 more"):
        cache.download(third, bucket)
    process.kill()
    process.communicate()
    assert cache.download(third, bucket)
    assert cache.pin(third)
    assert sum(path.is_file() for path in (cache.folder / "s").iterdir()) == 2


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenmillError, match="cannot be used: .*; pass cache_dir"):
        Cache(tmp_path / "file" / "cache", 100)


def test_a_file_of_another_size_is_downloaded_again(bucket: Bucket, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 2500)
    entry = put_entry(bucket, "a")
    assert cache.download(entry, bucket)
    for size in (0, 900, 2000):
        os.truncate(cache.folder / "s" / "a", size)
        assert not cache.has(entry)
        assert not cache.pin(entry)
        assert cache.download(entry, bucket)
        assert (cache.folder / "s" / "a").read_bytes() == b"a" * 1000


def test_small_files_stay_within_the_bounds_of_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 100)
    assert cache.read_small("s/note") is None
    cache.write_small("s/note", b"x" * 60)
    cache.write_small("s/other", b"y" * 60)
    assert (cache.read_small("s/note"), cache.read_small("s/other")) == (None, b"y" * 60)
    cache.write_small("s/other", b"z" * 200)
    assert cache.read_small("s/other") in (None, b"y" * 60)
    assert not list(cache.folder.rglob("*.tmp"))
