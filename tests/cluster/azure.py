"""Stores in `az://` on Azurite, Microsoft's own emulator, on loopback: python tests/cluster/azure.py.

Needs node and npm, which install it beside the other environments of the proofs. The store must have the bytes of one
on a disk, made by one run and by ranks, and batches must be the same by range and by shard. Prints a tally.
"""

from __future__ import annotations

import base64
import datetime
import hmac
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.kills import make_corpus  # noqa: E402
from tests.support.object_server import free_port  # noqa: E402
from tests.support.running import snapshot  # noqa: E402

HOME = ROOT / ".interop" / "azurite"
ACCOUNT = "millaccount"
KEY = base64.b64encode(b"a key that only this emulator knows").decode()
VERSION = "2021-08-06"


def install() -> Path:
    program = HOME / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", str(HOME), "azurite"], check=True, timeout=300)
    return program


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address of an account, which exists until the block ends."""
    port = free_port()
    flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(folder)]
    command = [str(install()), *flags, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    process = subprocess.Popen(command, env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"})
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    try:
        deadline = time.monotonic() + 60
        while not _answers(endpoint):
            assert process.poll() is None and time.monotonic() < deadline, "Azurite does not answer"
            time.sleep(0.1)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _answers(endpoint: str) -> bool:
    try:
        make_container(endpoint, "mill")
    except OSError:
        return False
    return True


def make_container(endpoint: str, name: str) -> None:
    """obstore makes none, so this request is signed here."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    signed = f"x-ms-date:{now}\nx-ms-version:{VERSION}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = hmac.digest(base64.b64decode(KEY), f"PUT{chr(10) * 12}{signed}".encode(), "sha256")
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT")
    request.add_header("x-ms-date", now)
    request.add_header("x-ms-version", VERSION)
    request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}")
    urllib.request.urlopen(request, timeout=10).read()


def prove(folder: Path) -> int:
    import tokenmill as tm
    from tokenmill.errors import TokenmillError
    from tokenmill.remote import split_url
    from tokenmill.tools.verify import verify

    corpus = folder / "corpus"
    make_corpus(corpus)
    bucket, _ = split_url("az://mill")
    for path in sorted(corpus.iterdir()):
        bucket.upload(f"corpus/{path.name}", path)
    flags = {"tokenizer": "bytes", "task_bytes": 20_000, "on_error": "skip", "workers": 2}
    local = tm.tokenize("az://mill/corpus", folder / "local", **flags)
    expected = snapshot(folder / "local")

    def files(name: str) -> dict[str, bytes]:
        keys = [info.key for info in bucket.list(name) if not info.key.endswith("/run.json")]
        return {key.removeprefix(f"{name}/"): bucket.read(key) for key in keys}

    tm.tokenize("az://mill/corpus", "az://mill/tok", **flags)
    assert files("tok") == expected
    stores = [tm.tokenize("az://mill/corpus", "az://mill/ranks", rank=rank, world_size=3, **flags) for rank in range(3)]
    assert files("ranks") == expected
    assert [store is None for store in stores] == [True, True, False]
    for fetch in ("range", "shard"):
        batches = zip(tm.load("az://mill/tok", 64, 4, fetch=fetch), tm.load(local, 64, 4), strict=True)
        for ours, theirs in islice(batches, 100):
            assert (ours[0] == theirs[0]).all() and (ours[1] == theirs[1]).all()
    assert verify("az://mill/tok").is_sound
    assert bucket.create("word", b"one")
    assert not bucket.create("word", b"one")
    try:
        bucket.create("word", b"another")
        raise AssertionError("what is there was replaced")
    except TokenmillError:
        return 6


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as name, serve(Path(name, "azurite")) as endpoint:
        os.environ |= {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
            "TOKENMILL_CACHE": str(Path(name, "cache")),
        }
        count = prove(Path(name))
    print(f"Azurite: {count} proofs, all equal")


if __name__ == "__main__":
    main()
