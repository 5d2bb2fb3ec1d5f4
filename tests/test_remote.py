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
from tokenmill.remote.client import AlreadyThere, ChangedObject, NoSuchObject, RemoteError, Request, _explain, perform
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


@pytest.mark.parametrize("fault", ["503", "reset"])
def test_an_outage_is_waited_out(bucket: Bucket, faulty: FaultyProxy, fault: str, tmp_path: Path) -> None:
    bucket.put("object", b"0123456789")
    info = bucket.head("object")
    (tmp_path / "file").write_bytes(b"abc")
    faulty.fail_for(4, fault)
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
    assert faulty.counts[fault] > 30


def test_an_outage_that_lasts_is_told_with_its_status_and_how_long_it_was_tried(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("object", b"0123456789")
    monkeypatch.setattr("tokenmill.remote.client.PATIENCE_SECONDS", 0.5)
    for fault, message in (
        ("503", r"/object: the server answers 503 \(busy\); tried for \d+ s, try again later$"),
        ("500", r"/object: the server answers 500 \(Internal Server Error\); tried for \d+ s"),
        ("truncate", r"/object: the answers break off; tried for \d+ s"),
        ("reset", r"/object: http://127.0.0.1:\d+ cannot be reached or does not answer; check .*; tried for \d+ s"),
    ):
        faulty.fail_for(60, fault)
        with pytest.raises(RemoteError, match=message):
            bucket.read("object")
    faulty.fail_for(0, "none")
    assert bucket.read("object") == b"0123456789"


def test_a_stretch_that_failed_is_asked_for_again(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("object", bytes(range(200)))
    monkeypatch.setattr("tokenmill.remote.client.PATIENCE_SECONDS", 0.1)
    reader = RangeReader(bucket)
    first, second = Stretch("object", 0, 10), Stretch("object", 20, 30)
    faulty.fail_for(60, "503")
    reader.expect([first, second], {"object": 200})
    with pytest.raises(RemoteError, match="answers 503"):
        reader.read(first, 200)
    faulty.fail_for(0, "none")
    assert reader.read(second, 200) == bytes(range(20, 30))
    assert reader.read(first, 200) == bytes(range(10))
    assert reader._num_ahead == 0


def test_a_server_that_drops_the_very_first_connections_is_waited_for(
    bucket: Bucket, faulty: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.remote.client.reached", set())
    faulty.fail_for(3, "reset")
    bucket.put("object", b"x")


def test_a_forked_process_waits_for_a_server_that_its_parent_has_reached(
    bucket: Bucket, faulty: FaultyProxy, tmp_path: Path
) -> None:
    bucket.put("object", b"0123456789")
    faulty.fail_for(4, "reset")
    pid = os.fork()
    if pid == 0:
        try:
            (tmp_path / "said").write_bytes(bucket.read("object"))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "said").read_bytes() == b"0123456789"


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
        # A machine whose service of roles answers, but not to everybody.
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
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"http://127.0.0.1:9 cannot be reached"):
        bucket.read("nothing")
    assert time.monotonic() - started < 10, "a wrong address is told soon"
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingDependencyError, match=r"tokenmill\[s3\]"):
        perform(Request(do="read", scheme="s3", bucket="another", key="x"))


def test_what_obstore_says_of_other_stores_is_told_in_our_words() -> None:
    from obstore.exceptions import BaseError

    request = Request(do="read", scheme="gs", bucket="box", key="x")
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
        assert str(_explain(request, BaseError(message))) == expected


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
    assert not cache.has("s/b", 1000)
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
        "cache = Cache(Path(sys.argv[1]), 2500); print([cache.use('s/a', 1000), cache.use('s/b', 1000)], flush=True); sys.stdin.read()"
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
    assert cache.use("s/c", 1000)
    assert sum(path.is_file() for path in (cache.folder / "s").iterdir()) == 2


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenmillError, match="cannot be used: .*; pass cache_dir"):
        Cache(tmp_path / "file" / "cache", 100)


def test_a_file_of_another_size_is_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    import xxhash

    cache = Cache(tmp_path / "cache", 2500)
    bucket.put("a", b"a" * 1000)
    info, xxh3 = bucket.head("a"), xxhash.xxh3_64_hexdigest(b"a" * 1000)
    assert cache.fetch("s/a", bucket, info, xxh3)
    for size in (0, 900, 2000):
        os.truncate(cache.folder / "s" / "a", size)
        assert not cache.has("s/a", 1000)
        assert not cache.use("s/a", 1000)
        assert cache.fetch("s/a", bucket, info, xxh3)
        assert (cache.folder / "s" / "a").read_bytes() == b"a" * 1000


def test_a_small_file_is_kept_in_the_room_that_there_is(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 100)
    assert cache.recall("s/note") is None
    cache.keep("s/note", b"x" * 60)
    cache.keep("s/other", b"y" * 60)
    assert (cache.recall("s/note"), cache.recall("s/other")) == (None, b"y" * 60)
    cache.keep("s/other", b"z" * 200)
    assert cache.recall("s/other") in (None, b"y" * 60)
    assert not list(cache.folder.rglob("*.tmp"))
