"""Memory stays inside `--memory`: caches that grow on text without repetition, long documents, long documents only."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tokenmill as tm
from tests.conftest import make_texts
from tests.support.running import compress, jsonl, start
from tokenmill.errors import UsageError
from tokenmill.pipeline.journal.locks import count_other_ranks_here, locked
from tokenmill.pipeline.plan.budget import Budget, make_budget
from tokenmill.pipeline.plan.ranks import Share
from tokenmill.pipeline.request import Request

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells shared memory")


class Watched:
    """A finished run whose process tree was watched from outside."""

    def __init__(self, *arguments: str | Path) -> None:
        self.peak = 0
        process = start("tokenize", *arguments)
        watcher = threading.Thread(target=self._watch, args=(psutil.Process(process.pid),))
        watcher.start()
        _, self.errors = process.communicate(timeout=120)
        watcher.join()
        assert process.returncode == 0, self.errors
        out = Path(arguments[arguments.index("-o") + 1])
        self.store = tm.open(out)
        self.attempt: dict[str, Any] = json.loads((out / "run.json").read_bytes())["attempts"][-1]

    def _watch(self, process: psutil.Process) -> None:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            try:
                family = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.peak = max(self.peak, sum(_proportional_size(member.pid) for member in family))
            threading.Event().wait(0.03)


def _proportional_size(pid: int) -> int:
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def random_words(num_bytes: int, seed: int) -> str:
    """Words of seven characters, hardly any of which repeats."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz012345", np.uint8)
    words = np.random.default_rng(seed).integers(0, 32, (num_bytes // 8, 8), np.uint8)
    words = letters[words]
    words[:, 7] = 32
    return words.tobytes().decode()


def test_a_cache_that_grows_without_bound_is_recycled_and_the_budget_is_kept(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    text = random_words(45_000_000, 1)
    (tmp_path / "a.jsonl").write_bytes(jsonl(text[at : at + 3_000] for at in range(0, len(text), 3_000)))
    flags = ["--tokenizer", tiny_tokenizer, "--memory", "420MB"]
    run = Watched(tmp_path / "a.jsonl", "-o", tmp_path / "out", *flags)
    assert run.store.manifest.engine.name == "gigatoken"
    assert run.attempt["num_recycled"] > 0
    assert 100e6 < run.peak < 420e6
    assert 0.5 * run.peak < run.attempt["peak_memory_bytes"] < 420e6
    assert run.store.num_documents == 15_000
    assert run.store.decode(run.store.document(14_999)) == text[-3_000:] + "<|endoftext|>"


def test_a_document_of_tens_of_megabytes_keeps_the_budget(tmp_path: Path, tiny_tokenizer: Path) -> None:
    long = (" ".join(make_texts(300, seed=4)) + " ") * 400
    assert len(long.encode()) > 20_000_000
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compress(jsonl(["before", long, "after"]), "zst"))
    run = Watched(path, "-o", tmp_path / "out", "--tokenizer", tiny_tokenizer, "--memory", "1GB")
    assert run.peak < 1e9
    assert run.store.num_documents == 3
    middle = run.store.document(1)
    # A cut between tokens may lie inside a character.
    assert long.startswith(run.store.decode(middle[:1000])[:-4])
    assert f"{long}<|endoftext|>".endswith(run.store.decode(middle[-1000:])[4:])
    assert run.store.decode(run.store.document(2)) == "after<|endoftext|>"


def test_the_gate_reads_a_bounded_part_of_a_corpus_of_long_documents(tmp_path: Path, tiny_tokenizer: Path) -> None:
    base = " ".join(make_texts(100, seed=5))
    texts = [(base * 3)[number : number + 30_000] for number in range(1500)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(compress(jsonl(texts), "gz"))
    run = Watched(path, "-o", tmp_path / "out", "--tokenizer", tiny_tokenizer, "--memory", "600MB")
    parity = run.store.manifest.engine.parity
    assert parity is not None
    assert 200 < parity.num_documents == parity.num_in_parts
    assert 0.5e6 < parity.num_bytes < 3.2e6
    assert run.peak < 600e6
    assert run.store.num_documents == len(texts)


def budget_of(num_others: int = 0, **flags: Any) -> Budget:
    request = Request.from_flags({"inputs": ["a"], "out": "out", "tokenizer": "bytes", "workers": 1, **flags})
    return make_budget(request, 1000, num_others)


def test_ranks_of_one_machine_never_take_more_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.pipeline.plan.budget.available_memory", lambda: 100 * 10**9)
    budgets = [budget_of(others).memory_bytes for others in range(8)]
    assert budgets[0] == 60 * 10**9
    assert budgets == sorted(budgets, reverse=True)
    assert sum(budgets) < 100 * 10**9
    assert budget_of(3, memory="6GB").memory_bytes == 6 * 10**9


def test_a_rank_sees_the_others_of_its_machine(tmp_path: Path) -> None:
    with locked(tmp_path, Share(0, 3)):
        assert count_other_ranks_here(tmp_path, Share(0, 3)) == 0
        assert count_other_ranks_here(tmp_path, Share(2, 3)) == 1
        (tmp_path / ".rank-0-of-3.lock").write_text("1 another-machine")
        assert count_other_ranks_here(tmp_path, Share(2, 3)) == 0


def test_more_memory_than_there_is_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.pipeline.plan.budget.total_memory", lambda: 8 * 10**9)
    with pytest.raises(
        UsageError, match="--memory 9GB is more than the 8.00 GB that this machine or its container has"
    ):
        budget_of(memory="9GB")
    assert budget_of(memory="8GB").memory_bytes == 8 * 10**9
