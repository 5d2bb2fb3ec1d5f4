"""PyTorch: the same batches as numpy's, in worker processes, DataLoader, StatefulDataLoader, DDP and compiled loops."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import CASES, collect, make_documents, make_store, make_two_stores
from tokenmill.errors import UsageError

torch = pytest.importorskip("torch")

from tokenmill.loaders.torch import TorchLoader, TorchRows  # noqa: E402


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch") / "store"
    return make_store(folder, make_documents(900, longest=50), num_shards=4)


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(x, a) and np.array_equal(y, b) for (x, y), (a, b) in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_worker_processes_give_the_same_batches_and_resume(store: Path, num_workers: int, world_size: int) -> None:
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 3, "rank": world_size - 1, "world_size": world_size}
    expected = collect(tm.load(store, **settings), 30)
    loader = tm.load(store, framework="torch", num_workers=num_workers, **settings)
    assert equal(collect(loader, 12), expected[:12])
    assert loader.state_dict()["next_row"] == 12 * 3 * world_size
    resumed = tm.load(store, framework="torch", num_workers=3 - num_workers, persistent_workers=True, **settings)
    resumed.load_state_dict(loader.state_dict())
    assert equal(collect(resumed, 9), expected[12:21])
    assert equal(collect(resumed, 9), expected[21:30]), "persistent workers continue where the loader is"


def test_the_global_stream_is_one_for_all_world_sizes_and_workers(tmp_path: Path) -> None:
    rows = CASES["mix"][0](make_two_stores(tmp_path))
    expected = [np.stack(batch) for batch in collect(tm.Loader(rows, batch_size=12), 6)]
    for world_size, num_workers in ((1, 2), (3, 1), (4, 2)):
        settings: dict[str, Any] = {"batch_size": 12 // world_size, "world_size": world_size}
        ranks = [TorchLoader(rows, rank=rank, num_workers=num_workers, **settings) for rank in range(world_size)]
        found = zip(*(collect(loader, 6) for loader in ranks), strict=True)
        for batches, whole in zip(found, expected, strict=True):
            assert np.array_equal(np.concatenate([np.stack(batch) for batch in batches], axis=1), whole)


def test_worker_processes_end_with_the_epoch_and_know_their_documents(store: Path) -> None:
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 5, "epochs": 1, "packing": "best-fit"}
    ours = list(tm.load(store, framework="torch", num_workers=2, **settings))
    theirs = list(tm.load(store, **settings))
    assert equal(ours, theirs)
    for batch, expected in zip(ours[-3:], theirs[-3:], strict=True):
        assert batch.documents == expected.documents
        assert np.array_equal(batch.segment_ids, expected.segment_ids)


def test_worker_processes_make_layouts_and_keep_tuples_and_numbers(store: Path) -> None:
    for layout in ("torchtitan", "hf", "megatron"):
        settings: dict[str, Any] = {"seq_len": 16, "batch_size": 5, "layout": layout, "document_mask": True}
        ours = collect(tm.load(store, framework="torch", num_workers=2, **settings), 4)
        theirs = collect(tm.load(store, framework="torch", **settings), 4)
        for batch, expected in zip(ours, theirs, strict=True):
            assert type(batch) is type(expected)
            if layout == "torchtitan":
                assert torch.equal(batch[0]["positions"], expected[0]["positions"])
                assert torch.equal(batch[1], expected[1])
            elif layout == "megatron":
                assert all(torch.equal(batch[name], expected[name]) for name in expected)
            else:
                assert torch.equal(batch["cu_seq_lens_q"], expected["cu_seq_lens_q"])
                assert batch["max_length_q"] == expected["max_length_q"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_leave_out_the_last_batch_only(store: Path, num_workers: int) -> None:
    rows = tm.take(tm.pack(tm.open(store), seq_len=16), 52)
    settings: dict[str, Any] = {"batch_size": 5, "epochs": 1, "drop_last": True}
    theirs = list(tm.Loader(rows, **settings))
    assert len(theirs) == 10
    assert equal(list(tm.load(rows, framework="torch", num_workers=num_workers, **settings)), theirs)


def test_mistakes_are_refused_with_a_sentence(store: Path) -> None:
    rows = tm.pack(tm.open(store), seq_len=16)
    for settings, message in (
        ({"device": "mps"}, "device 'mps' is not available"),
        ({"device": "cuda"}, "device 'cuda' is not available"),
        ({"device": "toaster"}, "device 'toaster' is unknown to torch"),
        ({"device": 1.5}, "device 1.5 is unknown to torch"),
        ({"num_workers": "2"}, "num_workers '2' must be a whole number"),
        ({"persistent_workers": 1}, "persistent_workers 1 must be True or False"),
        ({"bogus": 1}, "'bogus' is no setting of framework 'torch'; there are .*device.*num_workers"),
    ):
        if "device" in settings and settings["device"] == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(UsageError, match=message):
            tm.load(rows, batch_size=2, framework="torch", **settings)
    for wrong in (5, tm.open(store), str(store), None):
        with pytest.raises(UsageError, match="TorchRows needs rows"):
            TorchRows(wrong)
    data = TorchRows(rows)
    for index, message in (
        ("a", "row 'a' must be a whole number"),
        (1.5, "row 1.5 must be a whole number"),
        (True, "row True must be a whole number"),
        (-1, f"row -1 does not exist; rows are 0 to {len(rows) - 1}"),
        (len(rows), "does not exist"),
        (10**30, "must be a whole number, at most"),
        (slice(1, 3), "use tm.slice"),
    ):
        with pytest.raises(UsageError, match=message):
            data[index]
    with pytest.raises(IndexError):
        data[len(rows)]
    assert data[np.int64(3)][0].tolist() == rows[3].tolist()


def test_a_process_outside_the_group_says_so(store: Path) -> None:
    import torch.distributed as dist

    with pytest.raises(UsageError, match="this process is not in the group"):
        tm.load(store, seq_len=16, batch_size=2, group=dist.GroupMember.NON_GROUP_MEMBER)


def test_rows_work_in_a_data_loader(store: Path) -> None:
    rows = tm.shuffle(tm.pack(tm.open(store), seq_len=16), seed=3)
    for num_workers in (0, 2):
        loader = torch.utils.data.DataLoader(
            TorchRows(rows), batch_size=8, num_workers=num_workers, collate_fn=TorchRows.collate_fn
        )
        batches = list(loader)
        assert len(batches) == -(-len(rows) // 8)
        assert torch.cat([x for x, _ in batches]).tolist() == [rows[i].tolist() for i in range(len(rows))]


def test_rows_resume_in_a_stateful_data_loader(store: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    rows = TorchRows(tm.shuffle(tm.pack(tm.open(store), seq_len=16), seed=3))

    def make() -> Any:
        return stateful.StatefulDataLoader(rows, batch_size=8, num_workers=2, collate_fn=TorchRows.collate_fn)

    expected = list(make())
    loader = make()
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert equal(list(resumed), expected[7:])


def test_loaders_of_a_mesh_and_of_a_process_group(store: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks with two tensor-parallel peers each: peers get equal batches, ranks different ones.

    One process imports everything and forks the four ranks, before it has any thread.
    """
    program = textwrap.dedent(
        """
        import os, sys, torch, numpy as np, tokenmill as tm, tokenmill.loaders.torch
        import torch._dynamo  # DistributedDataParallel would import it in every rank
        import torch.distributed as dist
        ranks = [0, 1, 2, 3]
        while len(ranks) > 1 and os.fork():
            ranks.pop(0)
        os.environ["RANK"] = str(ranks[0])
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        settings = dict(seq_len=16, batch_size=4, framework="torch")
        by_mesh = tm.load(sys.argv[1], group=mesh["dp"], **settings)
        by_group = tm.load(sys.argv[1], group=mesh.get_group("dp"), **settings)
        alone = tm.load(sys.argv[1], rank="auto", **settings)
        assert (by_mesh.rank, by_mesh.world_size) == (by_group.rank, by_group.world_size)
        assert by_mesh.world_size == 2 and alone.world_size == 4 and alone.rank == dist.get_rank() == ranks[0]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
        for loader in (by_mesh, alone):
            batches = [x for (x, y), _ in zip(loader, range(3))]
            for x in batches:
                model(x.float()).sum().backward()
            np.save(f"{sys.argv[2]}/{loader.world_size}-{dist.get_rank()}.npy", torch.stack(batches).numpy())
        dist.destroy_process_group()
        if len(ranks) == 1:
            assert [os.wait()[1] for _ in range(3)] == [0, 0, 0]
        """
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-c", program, str(store), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    for world_size, ranks in ((2, [0, 0, 1, 1]), (4, [0, 1, 2, 3])):
        for number, rank in enumerate(ranks):
            expected = collect(tm.load(store, seq_len=16, batch_size=4, rank=rank, world_size=world_size), 3)
            found = np.load(tmp_path / f"{world_size}-{number}.npy")
            assert np.array_equal(found, np.stack([x for x, _ in expected]))


def test_a_mesh_of_several_dimensions_is_refused(store: Path) -> None:
    class Mesh:
        ndim = 2
        mesh_dim_names = ("dp", "tp")

        def get_local_rank(self) -> int:
            return 0

    with pytest.raises(UsageError, match=r"pass the data-parallel one, such as mesh\['dp'\]"):
        tm.load(store, seq_len=16, batch_size=4, framework="torch", group=Mesh())


def test_a_compiled_step_takes_every_batch(store: Path) -> None:
    table = torch.nn.Embedding(65536, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Any, y: Any) -> Any:
        return (table(x) - table(y)).square().sum()

    losses = [step(x, y) for x, y in collect(tm.load(store, seq_len=16, batch_size=4, framework="torch"), 5)]
    assert all(torch.isfinite(loss) for loss in losses)


def test_the_loader_leaves_torchs_threads_alone_and_computes_nothing(store: Path) -> None:
    threads = torch.get_num_threads()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for batch in collect(tm.load(store, seq_len=16, batch_size=4, framework="torch", document_mask=True), 50):
            batch.positions, batch.segment_ids, batch.cu_seqlens, batch.loss_mask  # noqa: B018
    assert torch.get_num_threads() == threads
    wrapping = {"aten::unbind", "aten::select", "aten::as_strided", "aten::lift_fresh"}
    assert {event.key for event in profile.key_averages()} <= wrapping


def test_the_class_is_found_by_its_framework(store: Path) -> None:
    assert type(tm.load(store, seq_len=8, batch_size=2, framework="torch", device="cpu")) is TorchLoader
