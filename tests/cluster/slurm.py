"""Job arrays and steps on a real Slurm: one node on loopback, in a temporary folder, started and ended here.

    python tests/cluster/slurm.py

Needs Debian's slurm-wlm and munge, and no configuration of either. Every store that jobs make must equal the one
that a local run makes, file by file; one rank is requeued and one is killed while it works. Prints a tally.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.kills import compare, make_corpus, run_to_end, snapshot  # noqa: E402
from tokenmill.pipeline.journal.journal import Journal  # noqa: E402
from tokenmill.pipeline.plan.ranks import Share, membership  # noqa: E402

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
NUM_CPUS = 8
"""The cores that the node declares, like its memory: ranks must run side by side on any machine."""
WAIT_SECONDS = 240.0
FLAGS = "--tokenizer bytes --task-bytes 35kB --on-error skip --val-fraction 0.1"

CONFIGURATION = """
ClusterName=mill
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
JobRequeue=1
KillWait=2
ReturnToService=2
NodeName=mill NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=262144 State=UNKNOWN
PartitionName=main Nodes=mill Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of one node, and the commands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o700)
        self._write_configuration()
        self._start_munge()
        configuration = str(self.folder / "slurm.conf")
        self._start("slurmctld", "-D", "-f", configuration)
        self._start("slurmd", "-D", "-N", "mill", "-f", configuration)
        wait_for(lambda: "idle" in self._try("sinfo", "--noheader"), "the node to come up")

    def stop(self) -> None:
        self._try("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full")
        self._try("scancel", "--user", getpass.getuser())
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(15)

    def run(self, *command: str) -> str:
        """Run a command that must succeed, and return its output."""
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout

    def submit(self, script: str, *flags: str) -> str:
        """Submit a script, and return the number of its job."""
        path = self.folder / f"{secrets.token_hex(4)}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
        output = f"--output={self.folder}/job-%A_%a.out"
        return self.run("sbatch", "--parsable", output, *flags, str(path)).strip()

    def wait(self, job: str) -> None:
        """Wait until no task of a job is pending or running."""
        wait_for(lambda: not self._try("squeue", "--noheader", f"--jobs={job}").strip(), f"job {job} to end")

    def requeue(self, task: str) -> None:
        """Requeue a task, and start it again before the two minutes that Slurm would wait."""
        self.run("scontrol", "requeue", task)
        wait_for(lambda: "PENDING" in self._try("scontrol", "show", "job", task), f"{task} to be requeued")
        self.run("scontrol", "update", f"JobId={task}", "StartTime=now+10")

    def _try(self, *command: str) -> str:
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=30).stdout

    def _write_configuration(self) -> None:
        ports = [free_port(), free_port()]
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            folder=self.folder,
            controller_port=ports[0],
            node_port=ports[1],
            cpus=NUM_CPUS,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))
        wait_for((folder / "socket").exists, "munged to listen")

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("wb") as out:
            daemon = subprocess.Popen(command, env=self._environment, stdout=out, stderr=subprocess.STDOUT)
        self._daemons.append(daemon)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited for {what} in vain")
        time.sleep(0.1)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    except BaseException:
        for path in (*sorted(folder.glob("*.out")), *folder.glob("slurm*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}", file=sys.stderr)
        raise
    finally:
        slurm.stop()


class Proof:
    """Stores made by jobs, each compared with the one that a local run makes."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder
        self._inputs = [path for seed in range(6) for path in make_corpus(folder / "corpus" / str(seed), seed)]
        self.tally: Counter[str] = Counter()
        run_to_end(self._command(folder / "local").split())
        self._expected = snapshot(folder / "local")

    def array(self) -> None:
        """Four tasks of an array."""
        out = self._folder / "array"
        job = self._slurm.submit(self._command(out, "--rank slurm"), "--array=0-3")
        self._slurm.wait(job)
        self._compare(out, "array of 4")

    def requeued(self) -> None:
        """An array of which one task is requeued while it works; Slurm kills it and starts it again."""
        out = self._folder / "requeued"
        job = self._slurm.submit(self._command(out, "--rank slurm"), "--array=1-4", "--requeue")
        self._wait_until_at_work(out, Share(1, 4))
        self._slurm.requeue(f"{job}_2")
        self._slurm.wait(job)
        said = [path.read_text() for path in self._slurm.folder.glob(f"job-{job}_2.out")]
        assert any(re.search(r"continuing: \d+ tasks are already done", text) for text in said), said
        self._compare(out, "requeued rank")

    def killed(self) -> None:
        """An array of which one task is killed; it alone is submitted again.

        The program replaces the shell (`exec`): the children of a killed shell could outlive it, because this Slurm
        tracks processes by their parents.
        """
        out = self._folder / "killed"
        command = f"exec {self._command(out, '--rank slurm --world-size 4')}"
        job = self._slurm.submit(command, "--array=0-3", "--no-requeue")
        self._wait_until_at_work(out, Share(2, 4))
        self._slurm.run("scancel", "--signal=KILL", "--full", f"{job}_2")
        self._slurm.wait(job)
        assert not (out / "manifest.json").exists()
        finish = [sys.executable, "-m", "tokenmill", "finish", str(out)]
        missing = subprocess.run(finish, capture_output=True, text=True, timeout=60)
        assert missing.returncode == 1, missing
        assert missing.stderr.rstrip().endswith("with --world-size 4 and --rank 2"), missing
        self._slurm.wait(self._slurm.submit(command, "--array=2"))
        self._compare(out, "killed rank")

    def step(self) -> None:
        """Four processes of one step."""
        out = self._folder / "step"
        self._slurm.run("srun", "--ntasks=4", *self._command(out, "--rank slurm").split())
        self._compare(out, "step of 4")

    def steps_of_an_array(self) -> None:
        """Two tasks of an array with a step of two processes each."""
        out = self._folder / "steps"
        script = f"srun --ntasks=2 {self._command(out, '--rank slurm')}"
        self._slurm.wait(self._slurm.submit(script, "--array=0-1", "--ntasks=2"))
        self._compare(out, "array of 2 steps of 2")

    def documented(self) -> None:
        """The script that the documentation shows, on one core a rank."""
        page = (ROOT / "docs" / "scaling.md").read_text()
        script = next(block for block in re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S) if "#SBATCH" in block)
        for shown, ours in (
            ("tokenmill tokenize corpus", f"{sys.executable} -m tokenmill tokenize {' '.join(self._inputs)}"),
            ("--tokenizer tokenizer", FLAGS),
            ("--memory 28GB", "--memory 1GB"),
        ):
            assert shown in script
            script = script.replace(shown, ours)
        folder = self._folder / "documented"
        folder.mkdir()
        job = self._slurm.submit(script, "--cpus-per-task=1", f"--chdir={folder}")
        self._slurm.wait(job)
        self._compare(folder / "data" / "tok", "documented script")

    def _command(self, out: Path, ranks: str = "") -> str:
        program = f"{sys.executable} -m tokenmill tokenize {' '.join(self._inputs)} -o {out}"
        return f"{program} {FLAGS} --workers 1 --memory 1GB {ranks}".strip()

    def _wait_until_at_work(self, out: Path, share: Share) -> None:
        """Wait until a rank has finished some tasks and is working on another."""
        journal = Journal(out)
        wait_for(journal.exists, f"{share} to begin")
        is_own = membership(share.of(journal.saved_plan().plan))
        wait_for(lambda: sum(map(is_own, journal.names())) >= 3, f"{share} to do some tasks")
        wait_for(lambda: any((out / "train").glob(f"*.{share.name}-*.tmp")), f"{share} to be at another")

    def _compare(self, out: Path, what: str) -> None:
        if not (out / "manifest.json").exists():
            raise AssertionError(f"{what}: no rank wrote the manifest")
        compare(self._expected, snapshot(out))
        attempts = json.loads((out / "run.json").read_bytes())["attempts"]
        ranks = {(attempt["rank"], attempt["world_size"]) for attempt in attempts}
        assert ranks == {(rank, 4) for rank in range(4)}, f"{what}: ran as {sorted(ranks)}"
        self.tally[what] += 1


PROOFS = (Proof.array, Proof.requeued, Proof.killed, Proof.step, Proof.steps_of_an_array, Proof.documented)


def main() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        sys.exit(f"{', '.join(missing)} not found: install Slurm and Munge, on Debian: apt-get install slurm-wlm munge")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        (Path(folder) / "cluster").mkdir(mode=0o700)
        with running_slurm(Path(folder) / "cluster") as slurm:
            proof = Proof(slurm, Path(folder))
            for prove in PROOFS:
                prove(proof)
    for name, count in proof.tally.items():
        print(f"{name:<24} {count:3d}")
    print(f"all {proof.tally.total()} stores equal to the local one, 4 ranks each, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
