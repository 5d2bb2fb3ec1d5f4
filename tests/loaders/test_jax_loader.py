"""JAX batches: those of the numpy loader, on a device or as global arrays, also over several processes."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.program import Program
from tests.support.stores import SEQ_LEN, collect, make_short_documents, make_two_stores, shuffled
from tokenmill.errors import UsageError
from tokenmill.filling.buffers import BufferPool
from tokenmill.loaders import make_loader

jax = pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_two_stores(folder)
    return folder


@pytest.fixture(scope="module")
def stores(folder: Path) -> list[Any]:
    return open_stores(folder)


def open_stores(folder: str | Path) -> list[Any]:
    return [tm.open(Path(folder) / str(number)) for number in range(2)]


def same(ours: Any, theirs: Any) -> bool:
    return isinstance(ours, jax.Array) and bool(np.array_equal(np.asarray(ours), theirs))


@pytest.mark.parametrize("offset", [0, 4, 16])
def test_two_hundred_kept_batches_stay_as_they_were(stores: list[Any], monkeypatch: Any, offset: int) -> None:
    # On CPUs JAX copies memory or refers to it, depending on where it lies; only arrays are kept, no batches.
    def allocate(pool: BufferPool, size: int) -> Any:
        raw = np.empty(size + 32, np.int32)
        first = (-raw.ctypes.data % 64) // 4 + offset // 4
        return raw[first : first + size]

    monkeypatch.setattr(BufferPool, "_allocate", allocate)
    rows = shuffled(stores[0])
    loader = iter(make_loader(rows, framework="jax", batch_size=4))
    kept = [tuple(next(loader)) for _ in range(200)]
    gc.collect()
    for _ in range(200):
        next(loader)
    for (x, y), theirs in zip(kept, collect(tm.Loader(rows, batch_size=4), 200), strict=True):
        assert same(x, theirs.inputs) and same(y, theirs.targets)


def test_a_donated_batch_leaves_its_other_parts_alone(stores: list[Any]) -> None:
    rows = shuffled(stores[0])
    step = jax.jit(lambda tokens: tokens * 0 - 1, donate_argnums=0)
    for mine, yours in zip(
        collect(make_loader(rows, framework="jax", batch_size=4), 40),
        collect(tm.Loader(rows, batch_size=4), 40),
        strict=True,
    ):
        step(mine.targets).block_until_ready()
        assert same(mine.inputs, yours.inputs)
        assert same(mine.loss_mask, yours.loss_mask)


def test_int64_is_refused_where_jax_would_cut_it(stores: list[Any]) -> None:
    with pytest.raises(UsageError, match="jax_enable_x64"):
        make_loader(shuffled(stores[0]), framework="jax", batch_size=4, dtype=np.int64)


def test_a_value_that_is_not_a_sharding_is_refused(stores: list[Any]) -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    for wrong in (5, mesh, jax.sharding.PartitionSpec("data"), "data"):
        with pytest.raises(UsageError, match=r"is not a sharding; pass jax.sharding.NamedSharding\(mesh"):
            make_loader(shuffled(stores[0]), framework="jax", batch_size=4, sharding=wrong)


def test_invalid_settings_are_refused(stores: list[Any]) -> None:
    for settings, message in (
        ({"dtype": "nope"}, "dtype 'nope' is no type of numpy"),
        ({"dtype": "uint8"}, "dtype uint8 cannot hold"),
        ({"bogus": 1}, "'bogus' is no setting of framework 'jax'; there are .*sharding"),
        ({"num_workers": 1}, "'num_workers' is no setting of framework 'jax'"),
        ({"rank": [1]}, r"rank \[1\] must be a whole number"),
    ):
        with pytest.raises(UsageError, match=message):
            make_loader(shuffled(stores[0]), framework="jax", **{"batch_size": 4, **settings})


def test_lengths_of_documents_stay_those_of_the_process(tmp_path: Path) -> None:
    rows = tm.pack(tm.open(make_short_documents(tmp_path, SEQ_LEN)), seq_len=SEQ_LEN)
    settings: dict[str, Any] = {"batch_size": 2, "layout": "olmo", "document_mask": True, "epochs": 1}
    sharding = shard_by({"data": 1}, "data", devices=jax.devices()[:1])
    theirs = list(tm.Loader(rows, **settings))
    assert theirs[0]["doc_lens"].shape == theirs[0]["input_ids"].shape == (2, SEQ_LEN)
    for mine, yours in zip(make_loader(rows, framework="jax", sharding=sharding, **settings), theirs, strict=True):
        assert mine["input_ids"].sharding == sharding
        assert mine["doc_lens"].sharding != sharding
        assert same(mine["doc_lens"], yours["doc_lens"])


# What follows runs in processes of their own, because the number of devices is fixed when JAX starts.


def start(check: Callable[..., None], *arguments: Any, num_devices: int) -> Program[str]:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    program = f"import sys; from {__name__} import {check.__name__} as check; check(*sys.argv[1:])"
    return Program(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[Program[str]]) -> None:
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)


def shard_by(shape: dict[str, int], *spec: Any, devices: Any = None) -> Any:
    """A sharding over a mesh of given axes."""
    devices = np.array(jax.devices() if devices is None else devices).reshape(tuple(shape.values()))
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, tuple(shape)), jax.sharding.PartitionSpec(*spec))


def check_global(array: Any, expected: Any, sharding: Any) -> None:
    """The parts that this process has are those of the global batch."""
    assert array.shape == expected.shape
    assert array.sharding == sharding
    assert len(array.addressable_shards) == len(sharding.addressable_devices)
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), expected[shard.index])


def check_batches(rows: tm.Rows, sharding: Any, batch_size: int, count: int = 20) -> Any:
    """Batches over a mesh against those that one process would have alone."""
    loader = make_loader(rows, framework="jax", batch_size=batch_size, sharding=sharding, document_mask=True)
    whole = tm.Loader(rows, batch_size=loader.global_batch_size, document_mask=True)
    total = jax.jit(lambda tokens: tokens.sum())
    for mine, yours in zip(collect(loader, count), collect(whole, count), strict=True):
        for name in ("inputs", "targets", "positions", "segment_ids", "loss_mask"):
            check_global(getattr(mine, name), getattr(yours, name), sharding)
        assert int(total(mine.inputs)) == yours.inputs.sum()
    return loader


def check_eight_devices(folder: str) -> None:
    assert jax.device_count() == 8
    stores = open_stores(folder)
    rows = shuffled(stores[0])
    for sharding in (
        shard_by({"data": 8}, "data"),
        shard_by({"data": 8}),
        shard_by({"data": 4, "seq": 2}, "data", "seq"),
        shard_by({"data": 2, "model": 4}, ("model", "data")),
        shard_by({"data": 8}, "data", devices=jax.devices()[::-1]),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ):
        loader = check_batches(rows, sharding, batch_size=8)
        assert (loader.rank, loader.world_size) == (0, 1)
    check_layout(rows, shard_by({"data": 8}, "data"))
    check_last_batch(stores[1], shard_by({"data": 8}, "data"))


def check_layout(rows: tm.Rows, sharding: Any) -> None:
    loader = make_loader(rows, framework="jax", batch_size=8, sharding=sharding, layout="maxtext")
    for mine, yours in zip(
        collect(loader, 5), collect(tm.Loader(rows, batch_size=8, layout="maxtext"), 5), strict=True
    ):
        assert mine.keys() == yours.keys()
        for name, array in mine.items():
            check_global(array, yours[name], sharding)
    batch = next(iter(make_loader(rows, framework="jax", batch_size=8, sharding=sharding)))
    assert batch.cu_seqlens.is_fully_addressable
    assert np.array_equal(batch.cu_seqlens, next(iter(tm.Loader(rows, batch_size=8))).cu_seqlens)


def check_last_batch(store: Any, sharding: Any) -> None:
    rows = shuffled(store)
    assert len(rows) % 8
    (*_, mine) = make_loader(rows, framework="jax", batch_size=8, sharding=sharding, epochs=1)
    (*_, yours) = tm.Loader(rows, batch_size=8, epochs=1)
    assert not yours.loss_mask[-1].any()
    check_global(mine.targets, yours.targets, sharding)
    check_global(mine.segment_ids, yours.segment_ids, sharding)


def check_refusals(folder: str) -> None:
    rows = shuffled(open_stores(folder)[0])
    data, three = shard_by({"data": 8}, "data"), shard_by({"data": 8}, None, None, "data")
    for wrong, settings in (
        ("do not fit the sharding", {"batch_size": 4, "sharding": data}),
        ("leave rank and world_size out", {"batch_size": 8, "sharding": data, "rank": 1, "world_size": 2}),
        ("not a sharding for arrays of two dimensions", {"batch_size": 8, "sharding": three}),
    ):
        with pytest.raises(UsageError, match=wrong):
            make_loader(rows, framework="jax", **settings)


def check_process(folder: str, port: str, number: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
    rows = shuffled(open_stores(folder)[0], method="best-fit")
    loader = check_batches(rows, shard_by({"data": 8}, "data"), batch_size=4)
    assert (loader.rank, loader.world_size, loader.global_batch_size) == (int(number), 2, 8)
    # A mesh in another order still has the rows of the global batch where they belong.
    loader = check_batches(rows, shard_by({"data": 8}, "data", devices=jax.devices()[::-1]), batch_size=4)
    assert (loader.rank, loader.world_size) == (1 - int(number), 2)
    # Both processes have all rows: as replicas, or half of the columns each.
    for sharding in (shard_by({"model": 2, "data": 4}, "data"), shard_by({"seq": 2, "data": 4}, "data", "seq")):
        loader = check_batches(rows, sharding, batch_size=4)
        assert (loader.rank, loader.world_size) == (0, 1)
    with pytest.raises(UsageError, match="by process"):
        make_loader(rows, framework="jax", batch_size=4, sharding=shard_by({"a": 2, "data": 4}, ("data", "a")))
    check_resuming(rows, shard_by({"data": 8}, "data"))


def check_resuming(rows: tm.Rows, sharding: Any) -> None:
    """Two processes resume from the state of one."""
    alone = tm.Loader(rows, batch_size=8)
    collect(alone, 13)
    loader = make_loader(rows, framework="jax", batch_size=4, sharding=sharding)
    loader.load_state_dict(alone.state_dict())
    for mine, yours in zip(collect(loader, 10), collect(alone, 10), strict=True):
        check_global(mine.inputs, yours.inputs, sharding)


@pytest.mark.parametrize("check", [check_eight_devices, check_refusals])
def test_global_arrays_on_eight_devices(folder: Path, check: Callable[..., None]) -> None:
    finish([start(check, folder, num_devices=8)])


def test_two_processes_together_have_the_global_batch(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    finish([start(check_process, folder, port, number, num_devices=4) for number in range(2)])
