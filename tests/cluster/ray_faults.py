"""Proofs on a real Ray cluster of three nodes on this machine: after any kill, the store has the same bytes.

    python -m tests.cluster.ray_faults --rounds 2

Everything runs in a network namespace that has loopback only, if one can be made; the nodes are 127.0.0.2 and up. Every
store is compared file by file with one of the local executor; prints a tally. Stores are made in a directory, and in a
bucket of moto's server, where processes have no disk in common.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from tests.cluster.loopback import leave_network
from tests.cluster.ray_here import kill_one_at_work
from tests.support.object_server import KEYS, make_bucket, serve_moto
from tests.support.running import command, sentence, snapshot
from tokenmill.remote import split_url

NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
FLAGS = ("--tokenizer", "bytes", "--task-bytes", "20kB", "--val-fraction", "0.1", "--keep-keys", "id")


def make_corpus(folder: Path) -> Path:
    """JSON lines with bad ones among them, a compressed stream, and Parquet, in about 250 tasks."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    folder.mkdir()
    rng = random.Random(0)
    words = ["token", "mill", "grün", "日本", "flour", "stone", "river", "wheel", "café", "a", "the"]

    def lines(count: int) -> bytes:
        rows = []
        for number in range(count):
            row = json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(5, 300))), "id": number})
            rows.append(row if rng.random() > 0.01 else row[:-4])
        return "".join(row + "\n" for row in rows).encode()

    (folder / "a.jsonl").write_bytes(lines(2000))
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(2000)))
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 300))) for _ in range(1000)]
    pq.write_table(pa.table({"text": texts, "id": list(range(1000))}), folder / "c.parquet", row_group_size=20)
    return folder


class Nodes:
    """A cluster of three nodes, of which some may be missing for a while."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self.restore()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def restore(self) -> None:
        """Start the missing nodes."""
        for address in NODES:
            if address not in self._nodes:
                self._nodes[address] = self._cluster.add_node(
                    node_ip_address=address, num_cpus=1, include_dashboard=False, object_store_memory=80_000_000
                )

    def remove(self, address: str) -> None:
        """Kill a node and everything on it."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def live(self) -> bool:
        """Whether the head and its nodes are running: a run must leave the cluster as it was."""
        return all(node.all_processes and node.any_processes_alive() for node in self._nodes.values())

    def shutdown(self) -> None:
        self._cluster.shutdown()


class Directory:
    """A store on a disk that all nodes see."""

    name = "in a directory"

    def __init__(self, folder: Path) -> None:
        self.out = str(folder / "store")
        self.working = folder / "store"
        """Where processes write."""

    def num_entries(self, input: str) -> int:
        return len(list(self.working.glob(f".tasks/{input}-*.json")))

    def files(self) -> dict[str, bytes]:
        return snapshot(self.working)

    def read(self, name: str) -> bytes:
        return (self.working / name).read_bytes()

    def check_swept(self) -> None:
        assert not list(self.working.rglob("*.tmp"))

    def remove(self) -> None:
        shutil.rmtree(self.working)


class InBucket:
    """A store in a bucket; every process has a scratch directory."""

    name = "in a bucket"

    def __init__(self, folder: Path) -> None:
        self.out = "s3://proofs/store"
        self.working = folder / "scratch"
        self._bucket, self._prefix = split_url(self.out)

    def num_entries(self, input: str) -> int:
        keys = [PurePosixPath(info.key) for info in self._bucket.list(f"{self._prefix}/.tasks")]
        return sum(key.match(f"{input}-*.json") for key in keys)

    def files(self) -> dict[str, bytes]:
        names = [info.key.removeprefix(f"{self._prefix}/") for info in self._bucket.list(self._prefix)]
        return {name: self.read(name) for name in sorted(names) if name != "run.json"}

    def read(self, name: str) -> bytes:
        return self._bucket.read(f"{self._prefix}/{name}")

    def check_swept(self) -> None:
        """Processes of the cluster end a moment after their run, and others sweep after them."""

    def remove(self) -> None:
        self._bucket.delete([info.key for info in self._bucket.list(self._prefix)])


class Run:
    """`tokenmill tokenize --executor ray` in a process of its own."""

    def __init__(self, proofs: Proofs, *flags: str) -> None:
        arguments = command("tokenize", proofs.corpus, "-o", proofs.place.out, *FLAGS, "--executor", "ray", *flags)
        self._folder = proofs.folder
        self._place = proofs.place
        with (self._folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                arguments,
                env={**os.environ, "RAY_ADDRESS": proofs.nodes.address},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return (self._folder / "stderr").read_text()

    def wait_for_entries(self, count: int, input: str = "0*") -> None:
        """Wait until this many tasks, or this many of an input, are published."""
        while self._place.num_entries(input) < count:
            assert self.process.poll() is None, f"ended before {count} tasks were done: {self.said}"
            time.sleep(0.01)

    def end(self) -> int:
        code = self.process.wait(120)
        assert "Traceback" not in self.said, self.said
        return code

    def end_well(self) -> None:
        code = self.end()
        assert code == 0, self.said


class Proofs:
    """Each proof is one store, disturbed in one way."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self.folder = folder
        self.nodes = nodes
        self.place: Directory | InBucket = Directory(folder)
        self.corpus = make_corpus(folder / "corpus")
        self.tally: Counter[str] = Counter()
        self._rng = random.Random(0)
        arguments = command("tokenize", self.corpus, "-o", folder / "local", *FLAGS, "--on-error", "skip", "--quiet")
        subprocess.run(arguments, check=True, capture_output=True, timeout=120)
        self.expected = snapshot(folder / "local")

    def compare(self, what: str) -> None:
        found = self.place.files()
        assert found.keys() == self.expected.keys(), found.keys() ^ self.expected.keys()
        different = [name for name in found if found[name] != self.expected[name]]
        assert not different, f"different bytes in {different}"
        assert self.nodes.live(), "the cluster was not left as it was"
        self._count(what)

    def _count(self, what: str) -> None:
        self.place.remove()
        self.tally[f"{self.place.name}: {what}"] += 1
        print(f"  {self.place.name}: {what}", flush=True)

    def skip(self, *flags: str) -> Run:
        return Run(self, "--on-error", "skip", *flags)

    def entries(self) -> int:
        """Early, in the middle, or late."""
        return self._rng.choice((3, 40, 120))

    def all(self, rounds: int) -> list[Callable[[], None]]:
        often = [self.kill_worker, self.remove_node, self.kill_driver, self.interrupt_driver]
        often += [self.kill_one_task_twice, self.finish_here]
        return [self.undisturbed, self.fail, *often * rounds]

    def undisturbed(self) -> None:
        self.skip().end_well()
        attempt = json.loads(self.place.read("run.json"))["attempts"][-1]
        machines = {worker["name"].rpartition(" ")[2] for worker in attempt["last"]["machine"]["workers"]}
        assert machines == set(NODES), machines
        self.compare("undisturbed, on three nodes")

    def kill_worker(self) -> None:
        run = self.skip()
        run.wait_for_entries(self.entries())
        kill_one_at_work(self.place.working)
        run.end_well()
        assert "trying it again" in run.said, run.said
        self.compare("worker killed")

    def kill_one_task_twice(self) -> None:
        """One call at a time, after the stream has ended, so that the same task loses its process twice."""
        run = self.skip("--workers", "1")
        run.wait_for_entries(3, input="00000")
        kill_one_at_work(self.place.working, but=kill_one_at_work(self.place.working))
        assert run.end() == 1, run.said
        done = subprocess.CompletedProcess([], 1, "", run.said)
        assert "was lost with process" in sentence(done) and "the last of 2 attempts" in sentence(done), run.said
        self.skip().end_well()
        self.compare("task killed twice: named, then continued")

    def remove_node(self) -> None:
        run = self.skip()
        run.wait_for_entries(self.entries())
        self.nodes.remove(self._rng.choice(NODES[1:]))
        run.end_well()
        self.nodes.restore()
        self.compare("node removed")

    def kill_driver(self) -> None:
        run = self.skip()
        run.wait_for_entries(self.entries())
        run.process.kill()
        run.process.wait()
        again = self.skip()
        again.end_well()
        assert "tasks are already done" in again.said, again.said
        self.compare("driver killed and rerun")

    def interrupt_driver(self) -> None:
        run = self.skip()
        run.wait_for_entries(self.entries())
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.said
        assert run.said.endswith(f"stopped by SIGINT; run the same command again to continue {self.place.out}\n"), (
            run.said
        )
        self.place.check_swept()
        self.skip().end_well()
        self.compare("interrupted and rerun")

    def finish_here(self) -> None:
        """The local executor finishes what a cluster has begun."""
        run = self.skip()
        run.wait_for_entries(self.entries())
        run.process.kill()
        run.process.wait()
        arguments = command("tokenize", self.corpus, "-o", self.place.out, *FLAGS, "--on-error", "skip")
        subprocess.run(arguments, check=True, capture_output=True, timeout=120)
        self.compare("driver killed, ended by the local executor")

    def fail(self) -> None:
        """The sentence of a bad record is that of the local executor, and nothing of Ray's."""
        run = Run(self, "--limit", "400")
        assert run.end() == 1, run.said
        arguments = command("tokenize", self.corpus, "-o", self.folder / "failing", *FLAGS, "--limit", "400")
        here = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        assert sentence(subprocess.CompletedProcess([], 1, "", run.said)) == sentence(here)
        self._count("bad record: the same sentence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="How often each fault is tried.")
    parser.add_argument("--only", help="One of them.")
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if leave_network():
        # No other user can connect, and a token would be left in the home directory.
        os.environ["RAY_AUTH_MODE"] = "disabled"
    else:
        print("no namespace of the network could be made: Ray listens on all interfaces", file=sys.stderr)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder, serve_moto() as endpoint:
        make_bucket(endpoint, "proofs")
        scratch = Path(folder, "scratch")
        scratch.mkdir()
        os.environ |= {**KEYS, "AWS_ENDPOINT_URL": endpoint, "TMPDIR": str(scratch)}
        nodes = Nodes()
        try:
            proofs = Proofs(Path(folder), nodes)
            for place in (Directory(Path(folder)), InBucket(Path(folder))):
                proofs.place = place
                for proof in proofs.all(arguments.rounds):
                    if arguments.only in (None, proof.__name__):
                        proof()
        finally:
            nodes.shutdown()
    for name, count in sorted(proofs.tally.items()):
        print(f"{name:<60} {count:3d}")
    print(f"all {proofs.tally.total()} stores equal to that of the local executor, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
