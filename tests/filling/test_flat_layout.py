"""`layout="hf-flat"`: the tokens of a batch in one row, as Transformers' `DataCollatorWithFlattening` gives them.

`make test-interop` compares the same batches with that collator itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.support.exports import add_mask
from tests.support.flat import flatten, same_batches, sequences_of
from tests.support.stores import make_store

PACKINGS = ["concat", "best-fit", "pad"]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 25), min_size=3, max_size=30).filter(lambda n: sum(n) > 40),
    seq_len=st.integers(1, 16),
    batch_size=st.integers(1, 4),
    packing=st.sampled_from(PACKINGS),
    document_mask=st.booleans(),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_flat_batches_are_the_sequences_of_their_rows_laid_end_to_end(
    lengths: list[int], seq_len: int, batch_size: int, packing: Any, document_mask: bool, world_size: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = np.cumsum(lengths).tolist()
        documents = [list(range(1 + end - length, 1 + end)) for end, length in zip(ends, lengths, strict=True)]
        store = make_store(Path(folder), documents, num_shards=2)
        add_mask(store, np.random.default_rng(seed).integers(0, 2, sum(lengths), np.uint8))
        for rank in range(world_size):
            # The last ranks may get rows after the end, which have no tokens.
            shared = {"packing": packing, "document_mask": document_mask, "epochs": 1, "rank": rank}
            shared |= {"seq_len": seq_len, "batch_size": batch_size, "world_size": world_size}
            plain = tm.load(store, **shared)
            flat = tm.load(store, layout="hf-flat", **shared)
            for batch, found in zip(plain, flat, strict=True):
                same_batches(found, flatten(sequences_of(batch)))


def test_rows_that_are_full_share_the_memory_of_the_batch(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [list(range(1, 101))])
    batch = next(iter(tm.load(store, seq_len=8, batch_size=4, shuffle=False, layout="hf-flat")))
    assert batch["input_ids"].base is not None
    assert batch["input_ids"].tolist() == [list(range(1, 33))]
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 16, 24, 32]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_flat_batches_have_the_types_of_the_collator(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    store = make_store(tmp_path / "store", [[1, 2, 3], [4, 5]])
    batch = next(iter(tm.load(store, seq_len=4, batch_size=2, packing="pad", framework=framework, layout="hf-flat")))
    wide = "int64" if framework == "torch" else "int32"  # JAX narrows unless jax_enable_x64 is set
    assert {name: str(part.dtype).rpartition(".")[2] for name, part in batch.items() if hasattr(part, "dtype")} == {
        "input_ids": wide,
        "labels": wide,
        "position_ids": wide,
        "seq_idx": "int32",
        "cu_seq_lens_q": "int32",
        "cu_seq_lens_k": "int32",
    }
    assert type(batch["max_length_q"]) is type(batch["max_length_k"]) is int


def test_flat_batches_stay_local_with_a_sharding(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(jax.devices()[:1], ("data",)), jax.sharding.PartitionSpec("data", None)
    )
    store = make_store(tmp_path / "store", [[1, 2, 3], [4, 5]])
    settings: dict[str, Any] = {"seq_len": 4, "batch_size": 2, "packing": "pad", "framework": "jax"}
    batch = next(iter(tm.load(store, layout="hf-flat", sharding=sharding, shuffle=False, **settings)))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_hf_numbers_the_documents_of_a_row(packing: Any, tmp_path: Path) -> None:
    documents = [list(range(1 + 5 * number, 4 + 5 * number + number % 3)) for number in range(20)]
    store = make_store(tmp_path / "store", documents)
    settings: dict[str, Any] = {"seq_len": 16, "batch_size": 1, "packing": packing, "document_mask": True, "epochs": 1}
    for batch in tm.load(store, layout="hf", **settings):
        lengths = np.diff(batch["cu_seq_lens_q"])
        assert batch["seq_idx"].tolist() == [np.arange(len(lengths)).repeat(lengths).tolist()]
        assert batch["seq_idx"].dtype == np.int32
