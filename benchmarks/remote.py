"""Requests per gigabyte, time to the first batch and tokens a second of a store in a bucket, beside a local store.

    python benchmarks/remote.py --save

The server is moto on loopback, or the one that TOKENMILL_S3 names, with its keys in the environment. A proxy in front
of it counts requests and delays each answer, as a network does. Every measurement is of a new process, without imports.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This folder has a tokenize.py, which would hide that of the standard library.
sys.path[0] = str(ROOT)

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np

from tests.support.object_server import KEYS, FaultyProxy, make_bucket, serve_moto
from tests.support.stores import seal_store
from tokenmill.remote import split_url
from tokenmill.store.manifest import ShardInfo, SplitInfo
from tokenmill.store.shard import ShardWriter, publish_shard

SEQ_LEN, BATCH_SIZE = 2048, 8
PROGRAM = """
import json, sys, time
import tokenmill as tm
tm.open, tm.pack, tm.shuffle, tm.Loader, tm.load
source, settings, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
import tokenmill.store.remote_store
started = time.perf_counter()
loader = iter(tm.load(source, **settings))
next(loader)
first = time.perf_counter() - started
started, done = time.perf_counter(), 0
while done < count:
    next(loader)
    done += 1
print(json.dumps([first, done * settings["batch_size"] * settings["seq_len"] / (time.perf_counter() - started)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="tokens of a shard")
    parser.add_argument("--delay", type=float, default=0.03, help="seconds before every answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="measure the cases that have this word in their title")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/remote.md")
    arguments = parser.parse_args()
    os.environ.update({**KEYS, **os.environ})
    with tempfile.TemporaryDirectory() as name, _server() as endpoint, FaultyProxy(endpoint) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        folder = Path(name)
        store = make_store(folder / "store", arguments.shards, arguments.tokens)
        url = upload(store, endpoint)
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        lines = measure(arguments, store, url, proxy, folder)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.save:
        (ROOT / "benchmarks" / "results" / "remote.md").write_text(text)


@contextmanager
def _server() -> Iterator[str]:
    if given := os.environ.get("TOKENMILL_S3"):
        yield given
        return
    with serve_moto() as endpoint:
        yield endpoint


def make_store(folder: Path, num_shards: int, num_tokens: int) -> Path:
    """Write a store of random ids in documents of 1,000."""
    rng = np.random.default_rng(0)
    shards: list[ShardInfo] = []
    for number in range(num_shards):
        writer = ShardWriter(folder, f"train/shard-00000-{number:04d}", dtype="uint16", keep_keys=(), run="x")
        count = num_tokens // 1000
        writer.append(
            rng.integers(0, 50_000, count * 1000).astype(np.uint16),
            np.full(count, 1000, np.int32),
            inputs=np.zeros(count, np.int32),
            positions=np.arange(count, dtype=np.int64),
            kept=None,
        )
        shards.append(writer.finish())
        publish_shard(folder, shards[-1], "x")
    documents, tokens = (sum(getattr(s, name) for s in shards) for name in ("num_documents", "num_tokens"))
    return seal_store(folder, {"train": SplitInfo(documents, tokens, shards)})


def upload(store: Path, endpoint: str) -> str:
    """Upload a store to a new bucket."""
    name = f"bench-{os.urandom(4).hex()}"
    make_bucket(endpoint, name)
    bucket, _ = split_url(f"s3://{name}")
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        bucket.upload(f"tok/{path.relative_to(store).as_posix()}", path)
    return f"s3://{name}/tok"


def measure(arguments: Any, store: Path, url: str, proxy: FaultyProxy, folder: Path) -> list[str]:
    """Measure all cases and write them as a page."""
    size = sum(path.stat().st_size for path in store.rglob("*.bin"))
    num_batches = size // 2 // SEQ_LEN // BATCH_SIZE // 2
    lines = [
        "# Stores in a bucket",
        "",
        f"{os.cpu_count()} cores, Python {platform.python_version()}, obstore {version('obstore')}. Command: "
        f"`python benchmarks/remote.py`. A store of {size / 1e6:.0f} MB in {arguments.shards} shards, batches of "
        f"{BATCH_SIZE} x {SEQ_LEN}; median of {arguments.repeat}.",
        f"The server is on loopback; every answer is delayed by {arguments.delay * 1000:.0f} ms. GETs are counted over "
        "half an epoch (over 300 batches by range), per GB of tokens in batches. The server, a Python program on the "
        "same cores, limits the speeds from the bucket.",
        "",
        "| | first batch, s | million tokens/s | GETs per GB | bytes fetched per byte used |",
        "|---|---|---|---|---|",
    ]
    half = str(max(1, size // 2))
    cases: list[tuple[str, str, dict[str, Any], str | None]] = [
        ("local store, global shuffle", str(store), {}, None),
        ("bucket, all in the cache", url, {"fetch": "shard"}, "warm"),
        ("bucket, empty cache, whole shards", url, {"fetch": "shard", "prefetch": 2}, None),
        ("bucket, by range, global shuffle", url, {"fetch": "range", "prefetch": 2}, None),
        ("bucket, by range, in order", url, {"fetch": "range", "shuffle": False, "prefetch": 2}, None),
        (
            "bucket, in blocks, cache of half the store",
            url,
            {"shuffle": "blocks", "block_tokens": size // 16, "cache_bytes": half, "prefetch": 2},
            None,
        ),
    ]
    proxy.delay = 0
    run(url, {"fetch": "shard"}, num_batches, folder / "warm", warm_up=True)
    proxy.delay = arguments.delay
    for title, source, settings, cache in (case for case in cases if arguments.only in case[0]):
        results = []
        for number in range(arguments.repeat):
            proxy.counts.clear()
            proxy.num_bytes = 0
            place = folder / (cache or f"cache-{len(lines)}-{number}")
            # With one request a row the server is the limit; a few thousand are enough to count them.
            count = min(num_batches, 300) if "range, global" in title else num_batches
            first, speed = run(source, settings, count, place)
            used = count * BATCH_SIZE * SEQ_LEN * 2
            results.append((first, speed / 1e6, proxy.counts["GET"] / used * 1e9, proxy.num_bytes / used))
        first, speed, gets, ratio = (statistics.median(column) for column in zip(*results, strict=True))
        lines.append(f"| {title} | {first:.3f} | {speed:.1f} | {gets:,.0f} | {ratio:.2f} |")
    return lines


def run(
    source: str, settings: dict[str, Any], num_batches: int, cache: Path, *, warm_up: bool = False
) -> tuple[float, float]:
    """The seconds to the first batch and the tokens a second after it, in a new process."""
    load_settings = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, **settings}
    program = PROGRAM
    if warm_up:
        program = "import sys, tokenmill as tm; tm.open(sys.argv[1]).make_local(); print([0, 0])"
    done = subprocess.run(
        [sys.executable, "-c", program, source, json.dumps(load_settings), str(num_batches)],
        env={**os.environ, "TOKENMILL_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    first, speed = json.loads(done.stdout)
    return first, speed


if __name__ == "__main__":
    main()
