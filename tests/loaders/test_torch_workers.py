"""Worker processes of PyTorch's loader: the same batches, memory that is never overwritten, and every way to end."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.stores import make_documents, make_store
from tokenmill.errors import StoreError, TokenmillError
from tokenmill.filling.fill import Chunk

torch = pytest.importorskip("torch")

from tokenmill.loaders.torch import TorchLoader  # noqa: E402

SECONDS = 30


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tm.Rows:
    folder = make_store(tmp_path_factory.mktemp("workers") / "store", make_documents(900, longest=50), num_shards=4)
    return tm.shuffle(tm.pack(tm.open(folder), seq_len=16), seed=1)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few batches in each slot, so that slots run out."""
    monkeypatch.setattr("tokenmill.loaders.torch.CHUNK_BYTES", 1 << 11)


def make(rows: tm.Rows, **settings: Any) -> TorchLoader[Any]:
    return TorchLoader(rows, **{"batch_size": 4, "num_workers": 2, **settings})


def plain(batches: Any) -> list[list[Any]]:
    return [[np.asarray(part).tolist() for part in batch] for batch in batches]


def children() -> list[Any]:
    return multiprocessing.active_children()


def wait_until(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()


PLACES = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=4)


@pytest.mark.usefixtures("small_chunks")
@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=PLACES,
    num_workers=st.integers(1, 3),
    batch_size=st.integers(1, 40),
    epochs=st.sampled_from([None, 0.4, 1, 2.5]),
    drop_last=st.booleans(),
    is_persistent=st.booleans(),
)
def test_iterations_that_stop_anywhere_are_those_of_the_numpy_loader(
    rows: tm.Rows, places: Any, num_workers: int, batch_size: int, epochs: Any, drop_last: bool, is_persistent: bool
) -> None:
    settings: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "drop_last": drop_last}
    ours = make(rows, num_workers=num_workers, persistent_workers=is_persistent, **settings)
    theirs = tm.Loader(rows, **settings)
    kept, expected = [], []
    for count, is_resumed in places:
        if is_resumed:
            state, ours = ours.state_dict(), make(rows, num_workers=3, **settings)
            ours.load_state_dict(state)
            assert ours.step == theirs.step
        kept += list(itertools.islice(ours, count))
        expected += list(itertools.islice(theirs, count))
        assert ours.state_dict() == theirs.state_dict()
    assert plain(kept) == plain(expected)
    assert [batch.documents for batch in kept] == [batch.documents for batch in expected]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("layout", ["xy", "hf", "hf-flat", "olmo"])
def test_kept_batches_are_never_overwritten_and_those_that_are_dropped_make_room(rows: tm.Rows, layout: str) -> None:
    def parts(batch: Any) -> list[Any]:
        found = list(batch.values()) if isinstance(batch, dict) else [batch.inputs, batch.targets]
        return [np.asarray(part) for part in found]

    batches = iter(make(rows, layout=layout))
    kept = [next(batches) for _ in range(300)]
    for _ in range(300):
        next(batches)
    kept += [next(batches) for _ in range(100)]
    expected = list(itertools.islice(tm.Loader(rows, batch_size=4, layout=layout), 700))
    for ours, theirs in zip(kept, [*expected[:300], *expected[600:]], strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(parts(ours), parts(theirs), strict=True))


def test_a_batch_is_the_users_own_and_outlives_loader_and_workers(rows: tm.Rows) -> None:
    loader = make(rows)
    x, y = next(iter(loader))
    expected = x.clone()
    x += 1
    del loader
    assert wait_until(lambda: not children())
    assert torch.equal(x - 1, expected) and y.is_contiguous()


def test_parts_that_do_not_fit_their_slot_are_sent(rows: tm.Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.loaders.torch.CHUNK_BYTES", 1 << 11)
    monkeypatch.setattr("tokenmill.loaders.torch.LAYOUT_SIZE", 1)
    settings: dict[str, Any] = {"batch_size": 16, "layout": "maxtext", "document_mask": True}
    for ours, theirs in zip(itertools.islice(make(rows, **settings), 40), TorchLoader(rows, **settings), strict=False):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_descriptors_and_processes_do_not_grow(rows: tm.Rows) -> None:
    loader = make(rows)
    list(itertools.islice(loader, 10))
    before = len(os.listdir("/proc/self/fd"))
    kept = [list(itertools.islice(loader, 60)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) <= before + len(kept), "a mapping that batches need keeps one"
    del kept
    assert len(os.listdir("/proc/self/fd")) <= before
    assert wait_until(lambda: not children())


def test_persistent_workers_stay_and_others_end_with_the_iteration(rows: tm.Rows) -> None:
    loader = make(rows, persistent_workers=True, epochs=1)
    assert len(list(loader)) == len(loader)
    first = {child.pid for child in children()}
    assert len(first) == 2
    list(itertools.islice(loader, 5))
    assert {child.pid for child in children()} == first
    del loader
    assert wait_until(lambda: not children())
    for _ in make(rows):
        assert len(children()) == 2
        break
    assert wait_until(lambda: not children())


def test_errors_of_workers_are_raised_in_their_place_as_they_are(
    rows: tm.Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Chunk.fill

    def fail(chunk: Chunk, pool: Any) -> Chunk:
        if chunk.stop - chunk.start > 4:
            raise StoreError("shard 7 is damaged; restore it")
        return fill(chunk, pool)

    monkeypatch.setattr(Chunk, "fill", fail)
    loader = make(rows)
    batches = iter(loader)
    expected = plain(itertools.islice(tm.Loader(rows, batch_size=4), 3))
    assert plain([next(batches)]) == expected[:1]
    with pytest.raises(StoreError, match="^shard 7 is damaged; restore it$"):
        next(batches)
    assert wait_until(lambda: not children())
    assert loader.state_dict()["next_row"] == 4
    monkeypatch.undo()
    assert plain(itertools.islice(loader, 2)) == expected[1:]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_killed_worker_is_named_and_the_next_iteration_continues(rows: tm.Rows, is_persistent: bool) -> None:
    loader = make(rows, batch_size=64, persistent_workers=is_persistent)
    expected = plain(itertools.islice(tm.Loader(rows, batch_size=64), 2000))
    batches, found = iter(loader), []
    found += plain([next(batches)])
    victim = children()[1]
    victim.kill()
    pattern = rf"worker process \d of 2 \(pid {victim.pid}\) was killed by signal 9 \(Killed\)"
    with pytest.raises(TokenmillError, match=pattern):
        found.extend(batch for one in batches for batch in plain([one]))
    assert wait_until(lambda: not children())
    found += plain(itertools.islice(loader, 10))
    assert found == expected[: len(found)]


def test_a_worker_that_is_killed_between_iterations_is_replaced(rows: tm.Rows) -> None:
    loader = make(rows, persistent_workers=True)
    found = plain(itertools.islice(loader, 3))
    for child in children():
        child.kill()
        child.join()
    found += plain(itertools.islice(loader, 3))
    assert found == plain(itertools.islice(tm.Loader(rows, batch_size=4), 6))


def test_an_iterator_that_was_replaced_disturbs_no_persistent_workers(rows: tm.Rows) -> None:
    loader = make(rows, persistent_workers=True)
    first = iter(loader)
    found = plain([next(first)])
    second = iter(loader)
    found += plain([next(second)])
    with pytest.raises(tm.UsageError, match="use the new one"):
        next(first)
    del first
    found += plain([next(second) for _ in range(5)])
    assert found == plain(itertools.islice(tm.Loader(rows, batch_size=4), 7))


def test_workers_and_a_thread_work_together(rows: tm.Rows) -> None:
    expected = plain(tm.Loader(rows, batch_size=4, epochs=1))
    assert plain(make(rows, epochs=1, prefetch=2)) == expected
    assert wait_until(lambda: not children())


def test_memory_that_cannot_be_shared_is_a_sentence(rows: tm.Rows) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(
            tm.UsageError, match="bytes of memory cannot be shared with worker processes: .*num_workers=0"
        ):
            next(iter(make(rows)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


PROGRAM = textwrap.dedent(
    """
    import itertools, multiprocessing, sys
    import tokenmill as tm

    def main():
        multiprocessing.set_start_method(sys.argv[2])
        settings = dict(seq_len=16, batch_size=4, layout="hf", document_mask=True)
        loader = tm.load(sys.argv[1], framework="torch", num_workers=2, **settings)
        batches, theirs = iter(loader), tm.load(sys.argv[1], **settings)
        for batch, expected in itertools.islice(zip(batches, theirs), 200):
            assert all((batch[name] == expected[name]).all() for name in ("input_ids", "labels", "seq_idx"))
        print("ready", *(child.pid for child in multiprocessing.active_children()), flush=True)
        if len(sys.argv) > 3:
            for batch in batches:
                pass

    if __name__ == "__main__":
        main()
    """
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A trainer as a file, which processes that are not forked import again."""
    make_store(tmp_path / "store", make_documents(900, longest=50), num_shards=4)
    path = tmp_path / "trainer.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_way_to_start_processes_works(program: Path, method: str) -> None:
    command = [sys.executable, str(program), str(program.parent / "store"), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    workers = [int(pid) for pid in done.stdout.split()[1:]]
    assert len(workers) == 2 and not any(map(psutil.pid_exists, workers))


@contextlib.contextmanager
def training(program: Path, method: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A trainer that loads without end, in a process group of its own, and its workers."""
    command = [sys.executable, str(program), str(program.parent / "store"), method, "endless"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as trainer:
        try:
            assert trainer.stdout is not None
            yield trainer, [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()[1:]]
        finally:
            trainer.kill()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_when_the_trainer_is_killed_and_leave_nothing(program: Path, method: str) -> None:
    with training(program, method) as (trainer, workers):
        assert len(workers) == 2
        mapped = Path(f"/proc/{workers[0].pid}/maps").read_text()
        assert "/memfd:tokenmill (deleted)" in mapped and "/dev/shm" not in mapped, "the memory has no name"
        trainer.kill()
        trainer.wait()
        assert wait_until(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_interrupt_from_the_keyboard_ends_all_without_noise(program: Path, method: str) -> None:
    with training(program, method) as (trainer, workers):
        os.killpg(trainer.pid, signal.SIGINT)
        _, errors = trainer.communicate(timeout=SECONDS)
        assert trainer.returncode == -signal.SIGINT
        assert errors.count("KeyboardInterrupt") == errors.count("Traceback") == 1
        assert not any(worker.is_running() for worker in workers)


def test_a_signal_to_all_processes_leaves_the_trainer_its_batches(program: Path) -> None:
    with training(program, "fork") as (trainer, workers):
        for worker in workers:
            worker.terminate()
        time.sleep(0.3)
        assert trainer.poll() is None and all(worker.is_running() for worker in workers)


def test_a_daemon_process_is_told_what_to_do(rows: tm.Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(tm.UsageError, match="may not start worker processes; pass num_workers=0"):
        next(iter(make(rows)))
