"""Context-parallel parts as Megatron-LM and TransformerEngine cut them: their own functions, on the same batches.

    MEGATRON_LM=path/to/repository TRANSFORMER_ENGINE=path/to/repository pytest tests/interop/test_context_parallel.py

Both are clones, with or without a work tree. Their modules import CUDA libraries, so only the functions that are pure
Python are taken from the source, and run as they are with torch's own fake process group.
"""

from __future__ import annotations

import ast
import os
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.support.stores import make_documents, make_store

SEQ_LEN = 48
MEGATRON = "megatron/core/utils.py"
ENGINE = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"


def functions_of(variable: str, path: str, names: list[str]) -> dict[str, Any]:
    """The functions of a file in a clone that an environment variable names."""
    torch = pytest.importorskip("torch")
    clone = os.environ.get(variable)
    if clone is None:
        pytest.skip(f"{variable} names no clone")
    done = subprocess.run(["git", "-C", clone, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True)
    tree = ast.parse(done.stdout)
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in wanted} == set(names), f"{path} has other functions than it had"
    scope: dict[str, Any] = {**vars(typing), "torch": torch}
    exec(compile(ast.Module(wanted, []), path, "exec"), scope)
    return scope


@pytest.fixture
def fake_group() -> Iterator[Any]:
    """Begins a process group as any rank of any size, in one process."""
    distributed = pytest.importorskip("torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(rank: int, size: int) -> Any:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        return distributed.group.WORLD

    yield begin
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return tm.open(make_store(tmp_path, make_documents(400, longest=60), num_shards=4))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("packing", ["concat", "best-fit", "pad"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_rows_are_cut_as_megatron_cuts_them(
    fake_group: Any, store: Any, packing: Any, size: int, document_mask: bool
) -> None:
    name = "_get_batch_on_this_cp_rank_per_sequence_balancing"
    theirs = functions_of("MEGATRON_LM", MEGATRON, [name])[name]
    settings: Any = {"packing": packing, "layout": "megatron", "framework": "torch", "document_mask": document_mask}
    settings |= {"epochs": 1, "seq_len": SEQ_LEN, "batch_size": 2}
    for rank in range(size):
        group = fake_group(rank, size)
        whole = tm.load(store, **settings)
        ours = tm.load(store, **settings, cp_rank=rank, cp_size=size)
        for batch, part in zip(whole, ours, strict=True):
            for key, expected in theirs(batch, group).items():
                assert part[key].equal(expected), (key, rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("packing", ["best-fit", "pad"])
def test_documents_are_padded_and_cut_as_transformer_engine_does_it(
    fake_group: Any, store: Any, packing: Any, size: int
) -> None:
    torch = pytest.importorskip("torch")
    names = ["pad_thd_sequences_for_cp", "get_batch_on_this_cp_rank", "generate_positional_ids_for_cp"]
    theirs = functions_of("TRANSFORMER_ENGINE", ENGINE, names)
    align = 2 * size
    settings: Any = {"packing": packing, "document_mask": True, "epochs": 1, "seq_len": SEQ_LEN, "batch_size": 2}
    whole = list(tm.load(store, align=align, framework="torch", **settings))
    for rank in range(size):
        group = fake_group(rank, size)
        ours = tm.load(store, align=align, framework="torch", cp_by="document", cp_rank=rank, cp_size=size, **settings)
        for batch, part in zip(whole, ours, strict=True):
            documents = [(row, *document) for row, some in enumerate(batch.documents) for document in some]
            # What they get: the documents one after the other, without padding.
            tokens, labels, sums = [], [], [0]
            for row, _, start, length in documents:
                tokens.append(batch.inputs[row, start : start + length])
                labels.append(batch.targets[row, start : start + length])
                sums.append(sums[-1] + length)
            ids, targets, sums_padded = theirs["pad_thd_sequences_for_cp"](
                torch.cat(tokens), torch.cat(labels), torch.tensor(sums), align
            )
            positions = theirs["generate_positional_ids_for_cp"](torch.tensor(sums), align)
            cut = theirs["get_batch_on_this_cp_rank"](sums_padded, ids[None], targets[None], positions, group)
            # What we have beyond that is padding at the end of rows.
            is_tail = np.concatenate([_is_tail(batch, row, size) for row in range(2)])
            found = [np.asarray(field).reshape(-1)[~is_tail] for field in (part.inputs, part.targets, part.positions)]
            assert np.array_equal(found[0], cut[0][0])
            assert np.array_equal(found[1], cut[1][0])
            real = np.asarray(part.segment_ids).reshape(-1)[~is_tail] > 0
            assert np.array_equal(found[2][real], cut[2][real])
            heads = [at for at in part.cu_seqlens.tolist() if not _in_tail(batch, at)]
            unpadded = part.cu_seqlens_unpadded.tolist()
            assert sorted({*unpadded}) == sums
            assert np.array_equal(np.diff(sums_padded), [_block(batch, at) for at in heads])


def _used(batch: Any, row: int, align: int) -> int:
    """How many tokens of a row its documents take with their padding."""
    _, start, length = batch.documents[row][-1] if batch.documents[row] else (0, 0, 0)
    return start + -(-length // align) * align


def _is_tail(batch: Any, row: int, size: int) -> Any:
    return np.arange(SEQ_LEN // size) >= _used(batch, row, 2 * size) // size


def _in_tail(batch: Any, at: int) -> bool:
    row, place = divmod(at, SEQ_LEN)
    return row >= len(batch.documents) or all(place != start for _, start, _ in batch.documents[row])


def _block(batch: Any, at: int) -> int:
    """The length of the segment that begins somewhere."""
    edges = batch.cu_seqlens.tolist()
    return int(edges[edges.index(at) + 1] - at)
